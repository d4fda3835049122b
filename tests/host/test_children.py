"""How children are started: their settings, sockets and first messages."""

import os
import re
import resource
import signal
import socket
import stat
from pathlib import Path

import pytest
import redis as redis_py

from helpers.ports import kept_port
from host.supervised import environment_of, said, said_by
from redpoll.ipc.messages import (
    DirectoryVersion,
    LivingWorkers,
    ShardKey,
    WorkersReady,
)


async def test_secrets_are_in_no_childs_environment_and_only_control_gets_them(tree, wait_until):
    secrets = ["the-app-secret", "the-admin-password", "c2VjcmV0" + "A" * 35 + "="]
    environment = {
        "SOKETI_DEFAULT_APP_ID": "1",
        "SOKETI_DEFAULT_APP_KEY": "abc",
        "SOKETI_DEFAULT_APP_SECRET": secrets[0],
        "REDPOLL_ADMIN_PASSWORD": secrets[1],
        "REDPOLL_ENCRYPTION_MASTER_KEY": secrets[2],
        "REDIS_URL": "redis://:the-redis-password@127.0.0.1:1",
        "PUSHER_APP_SECRET": "unused-but-secret",
        "TZ": "UTC",
    }
    tree.start(environment=environment)
    await wait_until(lambda: tree.is_ready)
    assert tree.notes("control")[0]["secrets"] == secrets
    assert tree.notes("worker0")[0]["secrets"] == ["", "", ""]
    for place in ("control", "worker0", "worker1"):
        (pid,) = tree.pids(place)
        inherited = environment_of(pid)
        assert b"TZ=UTC" in inherited
        values = [line.partition(b"=")[2].decode() for line in inherited]
        assert not [value for value in values if value in environment.values() and value not in ("UTC", "1")]


async def test_all_workers_serve_the_public_port(tree, wait_until):
    tree.start(workers=3)
    await wait_until(lambda: tree.is_ready)
    # The kernel picks by a hash of the addresses: 200 connections miss one of three with a probability of 1e-35.
    seen = {said_by(tree.port) for _ in range(200)}
    assert seen == {"worker0 1", "worker1 2", "worker2 3"}


async def test_control_gets_the_list_of_living_workers_before_a_start_and_after_an_end(tree, wait_until):
    tree.start(workers=2)
    await wait_until(lambda: tree.is_ready)
    os.kill(tree.pids("worker1")[0], signal.SIGKILL)
    await wait_until(lambda: len(tree.pids("worker1")) == 2 and len(tree.notes("worker1")) > 0)
    await wait_until(lambda: len(tree.lists()) >= 5)
    assert tree.lists() == [
        said(LivingWorkers([], 0)),
        said(LivingWorkers([1], 1)),
        said(LivingWorkers([1, 2], 2)),
        said(LivingWorkers([1], 2)),
        said(LivingWorkers([1, 3], 3)),
    ]
    first, second = tree.notes("worker1", 0)[0], tree.notes("worker1", 1)[0]
    assert (first["k"], second["k"]) == (2, 3)
    assert first["number"] == second["number"] == 1
    assert first["run"] == second["run"]
    assert len(bytes.fromhex(first["run"])) == 6


async def test_a_worker_that_cannot_be_started_is_not_among_the_living_and_is_tried_more_and_more_slowly(
    tree, wait_until
):
    tree.start(workers=2)
    await wait_until(lambda: tree.is_ready)
    supervisor, (lost,) = tree.process.pid, tree.pids("worker1")
    limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (4, limits[1]))
    os.kill(lost, signal.SIGKILL)
    await wait_until(lambda: tree.err.count("child not started") >= 2)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
    await wait_until(lambda: len(tree.pids("worker1")) == 2 and len(tree.notes("worker1")) > 0)
    k = tree.notes("worker1")[0]["k"]
    assert k > 3
    await wait_until(lambda: tree.lists()[-1] == said(LivingWorkers([1, k], k)))
    delays = re.findall(r"child (?:ended|not started) .*restart_in_s=([0-9.]+)", tree.err)
    assert delays[:3] == ["0.1", "0.2", "0.4"]


async def test_restarted_control_plane_gets_the_whole_state(tree, wait_until):
    tree.start(workers=2)
    await wait_until(lambda: tree.is_ready)
    old = tree.pids("control")[0]
    os.kill(old, signal.SIGKILL)
    await wait_until(lambda: len(tree.pids("control")) == 2)
    (new,) = set(tree.pids("control")) - {old}
    await wait_until(lambda: said(WorkersReady()) in tree.of("control", new))
    assert tree.of("control", new)[1] == said(LivingWorkers([1, 2], 2))
    assert tree.out.count("ready public=") == 1


@pytest.mark.parametrize("place", ["control", "worker0"])
async def test_restarted_children_get_the_folder_of_sockets_again(tree, wait_until, tmp_path, place):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    tree.start(environment={"TMPDIR": str(temporary)})
    await wait_until(lambda: tree.is_ready)
    (run_dir,) = temporary.glob("redpoll-*")
    run_dir.rmdir()
    os.kill(tree.pids(place)[0], signal.SIGKILL)
    await wait_until(lambda: len(tree.pids(place)) == 2)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


@pytest.mark.parametrize("place", ["control", "worker0"])
@pytest.mark.parametrize("made", ["folder", "link"])
async def test_no_child_starts_with_a_folder_of_sockets_that_others_may_enter(tree, wait_until, tmp_path, made, place):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    tree.start(environment={"TMPDIR": str(temporary)})
    await wait_until(lambda: tree.is_ready)
    (run_dir,) = temporary.glob("redpoll-*")
    run_dir.rmdir()
    strange = run_dir if made == "folder" else tmp_path / "strange"
    strange.mkdir()
    # A link is refused also if it leads to a private folder.
    strange.chmod(0o777 if made == "folder" else 0o700)
    if made == "link":
        run_dir.symlink_to(strange)
    os.kill(tree.pids(place)[0], signal.SIGKILL)
    await wait_until(lambda: tree.err.count("child not started") >= 2)
    assert f"{run_dir} was replaced" in tree.err
    assert len(tree.pids(place)) == 1
    # When it is gone, all is as before.
    run_dir.unlink() if made == "link" else run_dir.rmdir()
    await wait_until(lambda: len(tree.pids(place)) == 2)
    assert stat.S_IMODE(run_dir.lstat().st_mode) == 0o700


async def test_every_worker_gets_the_version_of_the_records_restarted_ones_too(tree, redis, wait_until):
    tree.redis_url = redis.url
    tree.does("control", "records")
    tree.start(workers=2)
    await wait_until(lambda: tree.is_ready)
    for place in ("worker0", "worker1"):
        await wait_until(lambda place=place: said(DirectoryVersion(17)) in tree.notes(place))
    os.kill(tree.pids("worker0")[0], signal.SIGKILL)
    await wait_until(lambda: len(tree.pids("worker0")) == 2 and said(DirectoryVersion(17)) in tree.notes("worker0"))


async def test_every_worker_gets_the_shard_key_restarted_ones_too(tree, wait_until):
    tree.does("control", "records")
    tree.start(workers=2)
    for place in ("worker0", "worker1"):
        await wait_until(lambda place=place: said(ShardKey("aa" * 16)) in tree.notes(place))
    os.kill(tree.pids("worker0")[0], signal.SIGKILL)
    await wait_until(lambda: len(tree.pids("worker0")) == 2 and said(ShardKey("aa" * 16)) in tree.notes("worker0"))
    assert "aa" * 16 not in tree.out + tree.err


async def test_embedded_redis_is_restarted_with_its_data_and_stopped_last(tree, wait_until):
    tree.start(redis_url="")
    await wait_until(lambda: tree.is_ready)
    url = tree.notes("control")[0]["redis_url"]
    assert url == f"unix://{tree.folder}/data/redis.sock"
    client = redis_py.Redis.from_url(url)
    client.set("kept", "yes")
    pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGKILL)

    def answers_again() -> bool:
        try:
            return client.info("server")["process_id"] != pid and not client.info("persistence")["loading"]
        except redis_py.ConnectionError:
            return False

    await wait_until(answers_again)
    assert client.get("kept") == b"yes"
    client.close()
    assert tree.stop() == 0
    log = (tree.folder / "data" / "redis" / "redis.log").read_text()
    assert "Redis is now ready to exit" in log or "now ready to exit" in log


async def test_long_data_folder_path_moves_the_redis_socket(tree, wait_until):
    deep = tree.folder / ("d" * 60) / ("e" * 60)
    tree.start(redis_url="", data_dir=deep)
    await wait_until(lambda: tree.is_ready)
    url = tree.notes("control")[0]["redis_url"]
    assert len(url) < 107
    path = Path(url.removeprefix("unix://"))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert tree.stop() == 0
    assert not path.parent.exists()


async def test_all_workers_serve_the_tls_port(tree, pair, wait_until):
    tree.start(workers=3, **pair)
    await wait_until(lambda: tree.is_ready)
    (line,) = tree.out.splitlines()
    assert line.split()[-1] == f"tls=https://127.0.0.1:{tree.tls_port}"
    assert tree.tls_port != tree.port
    seen = {said_by(tree.tls_port) for _ in range(200)}
    assert seen == {"worker0 1 by TLS", "worker1 2 by TLS", "worker2 3 by TLS"}
    assert not said_by(tree.port).endswith("TLS")
    with kept_port(tree.port), kept_port(tree.tls_port):
        assert tree.stop() == 0
        for port in (tree.port, tree.tls_port):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 10)
