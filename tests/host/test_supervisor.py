"""The supervisor: restarts, the order of a stop, reloads, and what it tells its children."""

import fcntl
import itertools
import json
import os
import signal
import socket
import termios

import pytest
import redis as redis_py

from helpers.certs import self_signed
from helpers.ports import kept_port
from host.supervised import is_alive, said, said_by
from redpoll.cluster.redis.keys import Keys
from redpoll.config.certificate_files import unbundle
from redpoll.ipc.messages import (
    BeginStop,
    CertificateChanged,
    DirectoryVersion,
    Lead,
    LivingWorkers,
    Reloaded,
    SettingsChanged,
    ShardKey,
    Stop,
)


async def test_child_that_hangs_is_killed_and_only_then_reported_dead(tree, wait_until):
    # It hangs for nine seconds.
    tree.start(workers=2, environment={"PING_EVERY_S": "0.3", "PINGED": "worker 1"})
    await wait_until(lambda: tree.is_ready)
    hung = tree.pids("worker1")[0]
    os.kill(hung, signal.SIGSTOP)
    await wait_until(lambda: len(tree.pids("worker1")) == 2 and len(tree.notes("worker1")) > 0)
    assert not is_alive(hung)
    await wait_until(lambda: len(tree.lists()) >= 5)
    assert [note["alive"] for note in tree.lists()][-2:] == [[1], [1, 3]]
    (killed,) = [line for line in tree.err.splitlines() if "does not answer" in line]
    assert "worker 1" in killed
    assert tree.err.index("does not answer") < tree.err.index("child ended")
    assert len(tree.pids("worker0")) == len(tree.pids("control")) == 1


async def test_connections_waiting_at_a_dead_worker_are_served_by_its_successor(tree, wait_until):
    tree.does("worker0", "deaf")
    tree.start(workers=1)
    await wait_until(lambda: tree.is_ready)
    with socket.create_connection(("127.0.0.1", tree.port), 60) as waiting:
        waiting.settimeout(60)
        tree.does("worker0", "")
        os.kill(tree.pids("worker0")[0], signal.SIGKILL)
        assert waiting.recv(100) == b"worker0 2"


async def test_a_server_whose_record_store_is_replaced_by_another_one_ends(tree, wait_until):
    """Its control plane would look for channels where its workers don't have them."""
    tree.does("control", "records")
    tree.start(workers=1)
    await wait_until(lambda: tree.is_ready)
    tree.does("control", "other")
    os.kill(tree.pids("control")[0], signal.SIGKILL)
    assert tree.process.wait(60) == 1
    assert "the record store was replaced by another one while the server ran" in tree.err
    assert said(ShardKey("bb" * 16)) not in tree.notes("worker0")


async def test_after_a_crash_of_the_whole_server_its_control_reaps_what_the_killed_run_held(tree, wait_until):
    """With an embedded Redis, which no other server uses. Its workers were reaped 4 s later."""
    tree.does("control", "records")
    tree.start(workers=1, redis_url="")
    await wait_until(lambda: said(Lead(4)) in tree.notes("control"))
    killed = tree.notes("control")[0]["run"]
    os.kill(tree.process.pid, signal.SIGKILL)
    tree.process.wait(60)
    tree.start(workers=1, redis_url="")
    await wait_until(lambda: len(tree.pids("control")) == 2 and said(Lead(5)) in tree.notes("control"))
    own = tree.notes("control")[0]["run"]
    first = next(note["nodes"] for note in tree.notes("control") if "nodes" in note)
    assert {node["run"]: node["alive"] for node in first} == {killed: False, own: True}


async def test_node_leads_alone_tells_control_and_leaves_redis_as_it_was(tree, redis, wait_until):
    tree.redis_url = redis.url
    tree.does("control", "records")
    tree.start(workers=2, node_name="here")
    # The record store has seen term 3.
    await wait_until(lambda: said(Lead(4)) in tree.notes("control"))
    (message,) = [note for note in tree.notes("control") if "nodes" in note][-1:]
    (node,) = message["nodes"]
    assert (node["name"], node["store"], node["workers"], node["alive"]) == ("here", "5eed", [1, 2], True)
    assert message["leader"] == node["run"]
    # A control plane that starts again learns the same; its node goes on to lead.
    os.kill(tree.pids("control")[0], signal.SIGKILL)
    await wait_until(lambda: len(tree.pids("control")) == 2 and said(Lead(4)) in tree.notes("control"))
    assert tree.stop() == 0
    with redis_py.Redis(unix_socket_path=redis.path) as client:
        assert client.hgetall(Keys().nodes) == {}
        assert client.get(Keys().leader) == b"- 4 0"


async def test_server_with_another_record_store_than_a_live_node_does_not_start(tree, redis, wait_until):
    tree.redis_url = redis.url
    tree.does("control", "records")
    with redis_py.Redis(unix_socket_path=redis.path) as client:
        entry = {"name": "first", "version": "1", "store": "other", "started": 0, "workers": [1], "greatest": 1}
        entry |= {"control": True}

        def beat():
            client.hset(Keys().nodes, "f" * 12, json.dumps({**entry, "beat": client.incr("beats")}))
            return tree.process.poll() is not None

        client.set(Keys().leader, f"{'f' * 12} 1 1")
        tree.start(workers=1)
        await wait_until(beat)
        assert tree.process.returncode == 1
        assert "the server first, up since 1970-01-01 00:00:00 UTC, has another record store" in tree.err
        assert said(DirectoryVersion(17)) not in tree.notes("worker0")
        assert not [note for note in tree.notes("control") if note.get("term")]
        assert client.hkeys(Keys().nodes) == [b"f" * 12]
        assert client.get(Keys().leader) == b"f" * 12 + b" 1 1"


async def test_stop_goes_in_order_and_exits_with_0(tree, wait_until):
    tree.start()
    await wait_until(lambda: tree.is_ready)
    port = tree.port
    with kept_port(port):
        assert tree.stop() == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 10)
    for place in ("worker0", "worker1"):
        assert tree.notes(place)[1:] == [said(BeginStop()), said(Stop())]
    notes = tree.notes("control")
    assert notes.index(said(BeginStop())) < notes.index(said(LivingWorkers([], 2)))
    assert notes[-1] == said(Stop())
    assert not any(is_alive(pid) for place in ("control", "worker0", "worker1") for pid in tree.pids(place))


async def test_port_is_closed_before_clients_are_disconnected(tree, wait_until):
    tree.does("worker0", "stay")
    tree.start(workers=2)
    await wait_until(lambda: tree.is_ready)
    with kept_port(tree.port):
        tree.process.send_signal(signal.SIGTERM)
        # A worker that is slow to close the port is not waited for.
        await wait_until(lambda: all(said(Stop()) in tree.notes(place) for place in ("worker0", "worker1")))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", tree.port), 60)


async def test_worker_that_does_not_end_is_killed_after_the_grace_period(tree, wait_until):
    tree.does("worker0", "stay")
    tree.start(shutdown_grace_s=0)
    await wait_until(lambda: tree.is_ready)
    assert tree.stop() == 0
    assert 'child killed, it did not end in time child="worker 0"' in tree.err


async def test_worker_that_hangs_at_its_start_is_killed_and_started_again(tree, wait_until):
    tree.does("worker1", "hang")
    # 18 s, in which its successor starts on a slow machine.
    tree.start(workers=2, environment={"PING_EVERY_S": "0.3", "PINGED": "worker 1"})
    await wait_until(lambda: tree.is_ready)
    assert 'child killed, it does not start child="worker 1" unanswered_pings=60' in tree.err
    assert [note["k"] for note in tree.notes("worker1") if "k" in note] == [3]
    assert len(tree.pids("worker0")) == 1
    # Control may read it after the worker is ready.
    await wait_until(lambda: tree.lists()[-1:] == [said(LivingWorkers([1, 3], 3))])


async def test_first_ctrl_c_stops_in_order_and_the_second_kills(tree, wait_until):
    tree.does("worker0", "stay")
    tree.start(shutdown_grace_s=600)
    await wait_until(lambda: tree.is_ready)
    # To the group, as a terminal does. The children must ignore it.
    os.killpg(tree.process.pid, signal.SIGINT)
    await wait_until(lambda: said(Stop()) in tree.notes("worker0"))
    assert is_alive(tree.pids("worker0")[0])
    os.killpg(tree.process.pid, signal.SIGINT)
    assert tree.process.wait(60) == 130
    assert not is_alive(tree.pids("worker0")[0])


async def test_no_child_survives_a_killed_supervisor(tree, wait_until):
    tree.start(redis_url="")
    await wait_until(lambda: tree.is_ready)
    children = tree.family()
    assert len(children) == 4  # redis, control, two workers
    tree.process.kill()
    tree.process.wait()
    await wait_until(lambda: not any(is_alive(pid) for pid in children))


async def test_fatal_child_ends_the_start_with_its_reason(tree):
    tree.does("control", "fatal")
    tree.start()
    assert tree.process.wait(60) == 1
    assert 'start failed reason="the disk is full"' in tree.err
    assert "ready" not in tree.out


async def test_child_that_keeps_dying_before_all_are_ready_ends_the_start(tree):
    tree.does("worker1", "die")
    tree.start()
    assert tree.process.wait(60) == 1
    assert 'reason="worker 1 ended 5 times in a row"' in tree.err


async def test_redis_that_cannot_start_ends_the_start_with_its_log_tail(tree):
    manifest = tree.folder / "data" / "redis" / "appendonlydir" / "appendonly.aof.manifest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("this is no manifest\n")
    tree.start(redis_url="")
    assert tree.process.wait(60) == 1
    assert "redis ended 5 times in a row; its log ends with" in tree.err
    assert "manifest" in tree.err.partition("its log ends with")[2]


async def test_after_the_start_children_are_always_restarted(tree, wait_until):
    tree.start(workers=1)
    await wait_until(lambda: tree.is_ready)
    for times in range(1, 7):
        await wait_until(lambda count=times: len(tree.pids("worker0")) == count)
        await wait_until(lambda: len(tree.notes("worker0")) > 0)
        os.kill(tree.pids("worker0")[-1], signal.SIGKILL)
    assert tree.err.count("child ended") <= 6
    pauses = [float(part.split()[0]) for part in tree.err.split("restart_in_s=")[1:]]
    assert pauses[0] == 0.1
    # A child that lived for ten seconds, as on a slow machine, begins again at the first pause.
    assert all(later >= earlier or later == 0.1 for earlier, later in itertools.pairwise(pauses))
    assert tree.stop() == 0


async def test_systemd_is_notified_of_ready_running_and_stopping(tree, wait_until):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tree.folder / "notify"))
        systemd.settimeout(60)
        tree.start(environment={"NOTIFY_SOCKET": str(tree.folder / "notify"), "WATCHDOG_USEC": "30000000"})
        received = systemd.recv(100)
        while received == b"WATCHDOG=1":
            received = systemd.recv(100)
        assert received == b"READY=1"
        # As long as it runs, systemd knows that it doesn't hang.
        assert systemd.recv(100) == b"WATCHDOG=1"
        assert tree.stop() == 0
        while received != b"STOPPING=1":
            received = systemd.recv(100)
    assert tree.notes("worker0")[0]["notify"] is None


async def test_stop_before_all_are_ready_works(tree, wait_until):
    # Otherwise all may be ready before the test sees the folder.
    tree.does("worker0", "unready")
    tree.start(redis_url="")
    await wait_until(lambda: (tree.folder / "data" / "redis").exists())
    assert tree.stop() == 0
    assert not tree.out


async def test_sighup_reloads_the_certificate_in_every_worker(tree, pair, wait_until):
    tree.start(workers=2, **pair)
    await wait_until(lambda: tree.is_ready)
    self_signed(tree.folder)
    tree.process.send_signal(signal.SIGHUP)
    await wait_until(lambda: all(said(CertificateChanged()) in tree.notes(place) for place in ("worker0", "worker1")))
    (written,) = unbundle((tree.folder / "data" / "tls.pem").read_bytes(), "tls.pem")
    assert written.pem == pair["tls_key"].read_bytes() + pair["tls_cert"].read_bytes()
    await wait_until(lambda: "certificates reloaded" in tree.err)
    assert said(CertificateChanged()) not in tree.notes("control")


async def test_sighup_applies_live_settings_and_names_those_that_need_a_restart(tree, wait_until):
    tree.start(workers=1)
    await wait_until(lambda: tree.is_ready)
    (tree.folder / "redpoll.toml").write_text('max_message_bytes = 5000\nactivity_timeout_s = 77\nlog_level = "debug"')
    tree.process.send_signal(signal.SIGHUP)
    changes = said(SettingsChanged({"log_level": "debug", "max_message_bytes": 5_000}))
    await wait_until(lambda: changes in tree.notes("worker0") and changes in tree.notes("control"))
    await wait_until(lambda: "applied=log_level,max_message_bytes need_restart=activity_timeout_s" in tree.err)
    # A child that starts later gets them too, but not what needs a restart.
    os.kill(tree.pids("worker0")[0], signal.SIGKILL)
    await wait_until(lambda: len(tree.pids("worker0")) == 2)
    await wait_until(lambda: tree.notes("worker0"))
    assert tree.notes("worker0")[0]["message_bytes"] == 5_000


async def test_faulty_settings_change_nothing_and_say_why(tree, wait_until):
    tree.start(workers=1)
    await wait_until(lambda: tree.is_ready)
    (tree.folder / "redpoll.toml").write_text("max_message_bytes = 5000\nmax_unsent_bytes = 1\nprot = 1")
    tree.process.send_signal(signal.SIGHUP)
    await wait_until(lambda: "not reloaded, everything stays as it was" in tree.err)
    assert "unknown setting; did you mean port?" in tree.err
    assert "$.max_unsent_bytes: " in tree.err
    assert not [note for note in tree.notes("worker0") if note.get("type") == "SettingsChanged"]


async def test_child_that_asks_for_a_reload_gets_the_report(tree, wait_until):
    tree.does("control", "reload")
    tree.start(workers=1)
    report = {"faults": [], "applied": {}, "restart": [], "certificate": False}
    await wait_until(lambda: said(Reloaded(report)) in tree.notes("control"))


async def test_unusable_pair_is_logged_and_changes_nothing(tree, pair, wait_until):
    tree.start(workers=1, **pair)
    await wait_until(lambda: tree.is_ready)
    written = (tree.folder / "data" / "tls.pem").read_bytes()
    good = pair["tls_key"].read_bytes()
    _, other = self_signed(tree.folder, "other")
    pair["tls_key"].write_bytes(other.read_bytes())
    tree.process.send_signal(signal.SIGHUP)
    await wait_until(lambda: "is not the key of the certificate" in tree.err)
    # A restarted worker serves the previous pair too.
    os.kill(tree.pids("worker0")[0], signal.SIGKILL)
    await wait_until(lambda: len(tree.pids("worker0")) == 2)
    assert (tree.folder / "data" / "tls.pem").read_bytes() == written
    assert said(CertificateChanged()) not in tree.notes("worker0", 0)
    pair["tls_key"].write_bytes(good)
    tree.process.send_signal(signal.SIGHUP)
    await wait_until(lambda: said(CertificateChanged()) in tree.notes("worker0"))


async def test_sighup_to_the_group_without_tls_changes_nothing(tree, wait_until):
    tree.start()
    await wait_until(lambda: tree.is_ready)
    os.killpg(tree.process.pid, signal.SIGHUP)
    await wait_until(lambda: "nothing to reload" in tree.err)
    assert said_by(tree.port).startswith("worker")
    assert "child ended" not in tree.err
    assert tree.stop() == 0


@pytest.mark.parametrize("nohup", [False, True])
async def test_closed_terminal_ends_the_server_unless_nohup_started_it(tree, wait_until, nohup):
    ours, terminal = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        # Set in both cases: the tests themselves may run under nohup.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    tree.start(before=take_terminal)
    os.close(terminal)
    await wait_until(lambda: tree.is_ready)
    workers = tree.pids("worker0") + tree.pids("worker1")
    os.close(ours)
    if nohup:
        await wait_until(lambda: "nothing to reload" in tree.err)
        assert tree.stop() == 0
    else:
        assert tree.process.wait(60) == -signal.SIGHUP
        await wait_until(lambda: not any(is_alive(pid) for pid in workers))
