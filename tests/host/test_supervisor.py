"""A real supervisor with stand-ins for the control plane and the workers.

A stand-in uses the child pipe as a real child does and records the messages it gets.
"""

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path

import msgspec
import pytest
import redis as redis_py

from certs import self_signed
from ports import kept_port
from redpoll.cluster.redis.keys import Keys
from redpoll.config.certificate import read_pair
from redpoll.host.supervisor import child_command
from redpoll.ipc.messages import (
    BeginStop,
    CertificateChanged,
    DirectoryVersion,
    Lead,
    LivingWorkers,
    Message,
    Reloaded,
    SettingsChanged,
    ShardKey,
    Stop,
    WorkersReady,
)

# The program of a child. It writes the file `NAME.PID` with a line of JSON for its start and for every message. The
# file `NAME.does` has words that change what it does.
STAND_IN = """
import asyncio, json, os, resource, signal, socket, sys
from pathlib import Path
import msgspec
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.messages import *

folder, place, fd = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
does = (folder / f"{place}.does").read_text() if (folder / f"{place}.does").exists() else ""
if "die" in does:
    sys.exit(3)
pipe = ChildPipe(fd)
start = pipe.read_start()
if "hang" in does and start.k == 2:
    signal.pause()
notes = open(folder / f"{place}.{os.getpid()}", "a", buffering=1)
def note(what): notes.write(json.dumps(what) + "\\n")
note({"k": start.k, "number": start.number, "run": start.run, "redis_url": start.redis_url,
      "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "notify": os.environ.get("NOTIFY_SOCKET"),
      "secrets": [start.settings.app_secret, start.settings.admin_password, start.settings.encryption_master_key],
      "message_bytes": start.settings.max_message_bytes,
      "pair": [start.settings.tls_cert, start.settings.tls_key],
      "ports": [start.settings.port, start.settings.control_port, start.settings.tls_port]})
listeners = [socket.socket(fileno=fd) for fd in (start.listen_fd, start.tls_fd) if fd is not None]

async def main():
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    def receive(message):
        note(msgspec.to_builtins(message))
        if isinstance(message, BeginStop) and start.role == "worker":
            for listening in listeners:
                loop.remove_reader(listening)
                listening.close()
            pipe.send(ListenersClosed())
        if isinstance(message, Stop) and "stay" not in does:
            ended.set()
    def accept(listening):
        connection, _ = listening.accept()
        with connection:
            behind = " by TLS" if listening.fileno() == start.tls_fd else ""
            connection.sendall(f"{place} {start.k}{behind}".encode())
    pipe.attach(loop, TO_CONTROL if start.role == "control" else TO_WORKER, receive, lambda: os._exit(1))
    for listening in listeners:
        listening.setblocking(False)
        if "deaf" not in does:
            loop.add_reader(listening, accept, listening)
    if "fatal" in does:
        pipe.send(Fatal("the disk is full"))
        return
    if "records" in does:
        pipe.send(RecordStore("5eed", 3, "aa" * 16))
        pipe.send(DirectoryVersion(17))
    if "other" in does:
        pipe.send(RecordStore("5eed", 3, "bb" * 16))
    if "create" in does:
        pipe.send(AppCreated({"id": "77", "key": "abc", "secret": "a-secret", "name": "x", "keys": []}))
        pipe.send(AdminCreated("the-first-password"))
    if "unready" not in does:
        pipe.send(Ready())
    if "reload" in does:
        pipe.send(Reload())
    await ended.wait()

asyncio.run(main())
"""

SUPERVISOR = """
import os, sys
from redpoll.text import logs
from redpoll.host import supervisor
from redpoll.config.config import load

folder = sys.argv[1]
def command_of(role, number, fd):
    place = role if role == "control" else f"{role}{number}"
    return [sys.executable, f"{folder}/stand_in.py", folder, place, str(fd)]
supervisor._PING_EVERY_S = float(os.environ.get("PING_EVERY_S", "1"))
file = f"{folder}/redpoll.toml"
def reread():
    flags = dict(word.split("=", 1) for word in sys.argv[2:])
    return load(flags, os.environ, file if os.path.exists(file) else None)[0]
settings = reread()
logs.configure(settings, "supervisor")
try:
    sys.exit(supervisor.serve(settings, command_of, reread))
except supervisor.StartError as error:
    sys.exit(f"refused: {error}")
"""


class Tree:
    """A supervisor with its stand-ins, in its own folder."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.process: subprocess.Popen[bytes] | None = None
        self._terminal: int | None = None
        self._printed = b""
        (folder / "stand_in.py").write_text(STAND_IN)
        (folder / "supervisor.py").write_text(SUPERVISOR)

    def does(self, place: str, what: str) -> None:
        (self.folder / f"{place}.does").write_text(what)

    def start(self, *, environment=None, before=None, terminal=False, **settings: object) -> None:
        """`terminal`: a terminal reads what the supervisor prints."""
        given = {"port": 0, "control_port": 0, "host": "127.0.0.1", "workers": 2, "redis_url": self.redis_url}
        given |= {"data_dir": self.folder / "data", "shutdown_grace_s": 5} | settings
        arguments = [f"{name}={value}" for name, value in given.items()]
        if terminal:
            ours, theirs = os.openpty()
            self._terminal = ours
            os.set_blocking(ours, False)
        else:
            theirs = os.open(self.folder / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(theirs, "wb") as out, open(self.folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, self.folder / "supervisor.py", self.folder, *arguments],
                stdout=out,
                stderr=err,
                env={**os.environ, **(environment or {})},
                preexec_fn=before,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        if self._terminal is not None:
            # Nothing more was printed, or the other side is closed.
            with contextlib.suppress(BlockingIOError, OSError):
                while printed := os.read(self._terminal, 65_536):
                    self._printed += printed
            return self._printed.decode().replace("\r\n", "\n")
        return (self.folder / "out").read_text()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self._terminal is not None:
            os.close(self._terminal)

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.err
        return "ready public=" in self.out

    @property
    def port(self) -> int:
        return self._port("public")

    @property
    def tls_port(self) -> int:
        return self._port("tls")

    def _port(self, what: str) -> int:
        return int(self.out.partition(f" {what}=")[2].split()[0].rpartition(":")[2])

    def pids(self, place: str) -> list[int]:
        """The pids of all processes that this child has had, oldest first."""
        notes = [path for path in self.folder.glob(f"{place}.*") if path.suffix[1:].isdigit()]
        notes.sort(key=lambda path: path.stat().st_ctime_ns if place == "control" else self._k(path))
        return [int(path.suffix[1:]) for path in notes]

    def _k(self, path: Path) -> int:
        return json.loads(path.read_text().partition("\n")[0] or '{"k": 999}')["k"]

    def notes(self, place: str, which: int = -1) -> list[dict]:
        """What a process of this child recorded, by default the present one."""
        pids = self.pids(place)
        return self.of(place, pids[which]) if pids else []

    def lists(self) -> list[dict]:
        """The lists of living workers that control got so far."""
        return [note for note in self.notes("control") if note.get("type") == "LivingWorkers"]

    def of(self, place: str, pid: int) -> list[dict]:
        lines = (self.folder / f"{place}.{pid}").read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def family(self) -> list[int]:
        """Pids of all children of the supervisor."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


def said(message: Message) -> dict:
    """A message as a stand-in records it."""
    return msgspec.to_builtins(message)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def said_by(port: int) -> str:
    """What the worker that accepts this connection sends."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.settimeout(60)
        return connection.recv(100).decode()


@pytest.fixture
def tree(tmp_path):
    """A tree without Redis, which the stand-ins don't use."""
    tree = Tree(tmp_path, "redis://127.0.0.1:1")
    yield tree
    tree.close()


async def test_data_folder_that_others_can_list_is_logged(tree, wait_until):
    (tree.folder / "data").mkdir()
    (tree.folder / "data").chmod(0o755)
    tree.start()
    await wait_until(lambda: tree.is_ready)
    assert "data folder open to others" in tree.err
    assert f"chmod 700 {tree.folder / 'data'}" in tree.err


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


async def test_ready_line_is_printed_when_all_are_ready_and_names_the_ports(tree, wait_until):
    tree.start(control_host="::1")
    await wait_until(lambda: tree.is_ready)
    (line,) = tree.out.splitlines()
    public, control = line.removeprefix("ready ").split()
    assert public == f"public=http://127.0.0.1:{tree.port}"
    assert control.startswith("control=http://[::1]:")
    # The settings asked for port 0.
    ports = [tree.port, int(control.rpartition(":")[2]), None]
    assert tree.notes("control")[0]["ports"] == tree.notes("worker0")[0]["ports"] == ports
    await wait_until(lambda: said(WorkersReady()) in tree.notes("control"))
    assert said_by(tree.port).startswith("worker")
    assert tree.stop() == 0


async def test_all_workers_serve_the_public_port(tree, wait_until):
    tree.start(workers=3)
    await wait_until(lambda: tree.is_ready)
    # The kernel picks by a hash of the addresses: 200 connections miss one of three with a probability of 1e-35.
    seen = {said_by(tree.port) for _ in range(200)}
    assert seen == {"worker0 1", "worker1 2", "worker2 3"}


async def test_first_start_prints_no_secret_into_a_log_but_the_command_that_shows_them(tree, wait_until):
    tree.does("control", "create")
    tree.start()
    await wait_until(lambda: tree.is_ready)
    assert "a-secret" not in tree.out + tree.err
    assert "the-first-password" not in tree.out + tree.err
    said, ready = tree.out.splitlines()
    assert said.startswith("redpoll created an app and the user admin ")
    assert said.endswith(f"redpoll first-login --data-dir {tree.folder / 'data'}")
    assert ready.startswith("ready public=")


async def test_created_app_is_printed_before_the_ready_line_in_a_terminal(tree, wait_until):
    tree.does("control", "create")
    tree.start(terminal=True)
    await wait_until(lambda: tree.is_ready)
    assert f"PUSHER_URL=http://abc:a-secret@127.0.0.1:{tree.port}/apps/77" in tree.out
    assert tree.out.splitlines()[-1].startswith("ready public=")
    assert "a-secret" not in tree.err


async def test_first_password_is_printed_once_in_a_terminal_and_written_to_a_private_file(tree, wait_until):
    tree.does("control", "create")
    tree.start(terminal=True)
    await wait_until(lambda: tree.is_ready)
    (line,) = [line for line in tree.out.splitlines() if "the-first-password" in line]
    assert line.split() == ["password", "the-first-password"]
    path = tree.folder / "data" / "first-login"
    assert str(path) in tree.out
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("the-first-password\n", 0o600)
    assert "the-first-password" not in tree.err


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


async def test_child_that_hangs_is_killed_and_only_then_reported_dead(tree, wait_until):
    # It hangs for four and a half seconds, which no healthy child does on a slow machine.
    tree.start(workers=2, environment={"PING_EVERY_S": "0.15"})
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
    # 18 s, in which the healthy one starts on a slow machine.
    tree.start(workers=2, environment={"PING_EVERY_S": "0.3"})
    await wait_until(lambda: tree.is_ready)
    assert 'child killed, it does not start child="worker 1" unanswered_pings=60' in tree.err
    assert [note["k"] for note in tree.notes("worker1") if "k" in note] == [3]
    assert len(tree.pids("worker0")) == 1
    assert tree.lists()[-1] == said(LivingWorkers([1, 3], 3))


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
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.1
    assert tree.stop() == 0


async def test_port_in_use_is_reported_and_nothing_starts(tree, tmp_path, wait_until):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tree.start(port=port)
        assert tree.process.wait(60) == 1
    assert tree.err.splitlines()[-1] == f"refused: can't listen on 127.0.0.1 port {port}: Address already in use"
    assert tree.pids("control") == []


async def test_second_server_in_the_same_folder_is_refused(tree, wait_until, tmp_path):
    tree.start()
    await wait_until(lambda: tree.is_ready)
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = Tree(other_folder, tree.redis_url)
    other.start(data_dir=tree.folder / "data")
    assert other.process.wait(60) == 1
    assert f"is in use by redpoll serve, process {tree.process.pid}" in other.err


async def test_file_limit_is_raised_for_all_children(tree, wait_until):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tree.start(before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)))
    await wait_until(lambda: tree.is_ready)
    assert tree.notes("worker0")[0]["files"] == hard
    assert f"file limit raised before=256 now={hard}" in tree.err


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


async def test_files_in_the_data_folder_are_private(tree, wait_until):
    tree.start(redis_url="")
    await wait_until(lambda: tree.is_ready)
    folder = tree.folder / "data"
    modes = {path: path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]}
    assert not any(modes.values()), modes


# -- TLS


@pytest.fixture
def pair(tmp_path):
    """Settings of a TLS port; `tls_cert` and `tls_key` are paths."""
    cert, key = self_signed(tmp_path)
    return {"tls_port": 0, "tls_cert": cert, "tls_key": key}


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


async def test_ready_line_omits_tls_without_a_tls_port(tree, wait_until):
    tree.start()
    await wait_until(lambda: tree.is_ready)
    assert "tls=" not in tree.out
    assert tree.notes("worker0")[0]["pair"] == ["", ""]


async def test_tls_port_in_use_is_reported(tree, pair):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tree.start(**pair | {"tls_port": port})
        assert tree.process.wait(60) == 1
    assert tree.err.splitlines()[-1] == f"refused: can't listen on 127.0.0.1 port {port}: Address already in use"


async def test_workers_read_a_copy_of_the_pair_that_is_deleted_at_stop(tree, pair, wait_until):
    tree.start(**pair)
    await wait_until(lambda: tree.is_ready)
    ours = tree.folder / "data" / "tls.pem"
    assert tree.notes("worker0")[0]["pair"] == [str(ours), str(ours)]
    assert ours.read_bytes() == read_pair(pair["tls_cert"], pair["tls_key"])
    assert ours.stat().st_mode & 0o777 == 0o600
    assert tree.stop() == 0
    assert not ours.exists()


async def test_sighup_reloads_the_certificate_in_every_worker(tree, pair, wait_until):
    tree.start(workers=2, **pair)
    await wait_until(lambda: tree.is_ready)
    self_signed(tree.folder)
    tree.process.send_signal(signal.SIGHUP)
    await wait_until(lambda: all(said(CertificateChanged()) in tree.notes(place) for place in ("worker0", "worker1")))
    written = (tree.folder / "data" / "tls.pem").read_bytes()
    assert written == read_pair(pair["tls_cert"], pair["tls_key"])
    await wait_until(lambda: "certificate reloaded" in tree.err)
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


def test_command_line_of_a_child_names_its_role():
    assert child_command("worker", 3, 9)[1:] == ["-P", "-m", "redpoll", "worker", "3", "--pipe", "9"]
    assert child_command("control", 0, 9)[-3:] == ["control", "--pipe", "9"]
