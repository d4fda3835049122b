"""The control process: start, requests and exits of a real process."""

import asyncio
import signal
import socket
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from redpoll.config.config import Settings
from redpoll.control import main
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.command_socket import ask, socket_path
from redpoll.ipc.messages import (
    FROM_CHILD,
    AppCreated,
    Fatal,
    Lead,
    LivingWorkers,
    NodesChanged,
    Ready,
    Start,
    Stop,
    WorkersReady,
)

CONTROL = (
    "import sys; from redpoll.control.main import main; from redpoll.ipc.child_pipe import ChildPipe; "
    "main(ChildPipe(int(sys.argv[1])))"
)


class Process:
    """A control process; the test has the other end of its pipe."""

    def __init__(self, redis_url, folder, **settings):
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        ours, theirs = socket.socketpair()
        start = Start(
            role="control",
            number=0,
            run="0123456789ab",
            process=0,
            redis_url=redis_url,
            listen_fd=listener.fileno(),
            requests_path=str(folder / "requests.sock"),
            data_dir=str(folder),
            settings=Settings(**settings),
        )
        fds = (listener.fileno(), theirs.fileno())
        command = [sys.executable, "-c", CONTROL, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE)
        theirs.close()
        listener.close()
        self.child_pipe = ChildPipe(ours.detach())
        self.child_pipe.send(start)
        self.child_pipe.send(LivingWorkers([], 0))
        self.child_pipe.send(NodesChanged([], None))
        self.child_pipe.send(Lead(1))
        self.child_pipe.send(WorkersReady())
        self.received = []
        take = self.received.append
        self.child_pipe.attach(asyncio.get_running_loop(), FROM_CHILD, take, lambda: take("end"))

    async def wait_ended(self):
        _, errors = await asyncio.to_thread(self.process.communicate, None, 60)
        return self.process.returncode, errors.decode()


@pytest.fixture
async def start_process(redis, tmp_path):
    started = []

    def start(**settings):
        started.append(Process(redis.url, tmp_path, **settings))
        return started[-1]

    yield start
    for child in started:
        child.child_pipe.close()
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
        child.process.stderr.close()


async def ready(wire):
    reply = await wire.ask(b"GET /readyz HTTP/1.1\r\nHost: h\r\n\r\n")
    return reply.status == 200


async def test_the_first_start_creates_an_app_and_reports_it_to_the_supervisor(
    start_process, connect, wait_until, tmp_path
):
    it = start_process()
    await wait_until(lambda: Ready() in it.received)
    (made,) = [message.app for message in it.received if isinstance(message, AppCreated)]
    assert made["id"].isdecimal()
    apps = await asyncio.to_thread(ask, socket_path(tmp_path), "app list", {})
    assert [app["id"] for app in apps] == [made["id"]]
    wire = await connect(it.port)
    async with asyncio.timeout(60):
        while not await ready(wire):
            pass
    it.child_pipe.send(Stop())
    code, errors = await it.wait_ended()
    assert (code, "Traceback" in errors) == (0, False)


async def test_open_requests_are_answered_after_sigterm(start_process, connect, wait_until):
    it = start_process(app_id="3", app_key="k", app_secret="s")
    await wait_until(lambda: Ready() in it.received)
    wire, idle = await connect(it.port), await connect(it.port)
    # The publish below waits for Redis for at most 1.8 s.
    async with asyncio.timeout(60):
        while not await ready(idle):
            pass
    wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nX-Service-Key: k\r\nX-Service-Secret: s\r\n")
    wire.send(b"Content-Length: 36\r\nExpect: 100-continue\r\n\r\n")
    assert (await wire.receive()).status == 100
    it.process.send_signal(signal.SIGTERM)
    assert await idle.wait_closed() == b""
    reply = await wire.ask(b'{"name":"e","channel":"c","data":""}')
    assert reply.status == 200
    assert reply.headers["connection"] == "close"
    code, errors = await it.wait_ended()
    assert (code, "Traceback" in errors) == (0, False)


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"control_host": "127.0.0.1"}, False),
        ({"control_host": "localhost"}, False),
        ({"control_host": "0.0.0.0"}, True),
        ({"control_host": "0.0.0.0", "tls_client_ca": "/etc/redpoll/operators.crt"}, False),
    ],
)
def test_control_port_that_is_open_to_a_network_without_tls_is_logged(settings, warns):
    with capture_logs() as logged:
        main._warn_of_exposure(Settings(**settings))
    assert [entry["event"] for entry in logged] == ["control port open to a network"] * warns


async def test_control_exits_when_its_supervisor_dies(start_process, wait_until):
    it = start_process()
    await wait_until(lambda: Ready() in it.received)
    it.child_pipe.close()
    code, _errors = await it.wait_ended()
    assert code == 1


async def test_unusable_records_end_the_start_with_a_reason(start_process, tmp_path, wait_until):
    (tmp_path / "redpoll.sqlite").write_bytes(b"this is no database" * 100)
    it = start_process()
    code, errors = await it.wait_ended()
    assert code == 1
    assert "Traceback" not in errors
    await wait_until(lambda: it.received)
    assert isinstance(it.received[0], Fatal)
    assert "redpoll.sqlite" in it.received[0].reason


HEAD = b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %b\r\nContent-Length: 36\r\n\r\n"
EVENT = b'{"name":"e","channel":"c","data":""}'


async def test_a_token_created_by_command_works_until_a_command_revokes_it(
    start_process, connect, wait_until, tmp_path
):
    it = start_process(app_id="3", app_key="k", app_secret="s")
    await wait_until(lambda: Ready() in it.received)

    async def command(verb, **arguments):
        return await asyncio.to_thread(ask, socket_path(tmp_path), verb, arguments)

    made = await command("token create", app="3", name="t", scopes=["publish"], lasts_s=None)
    wire = await connect(it.port)
    async with asyncio.timeout(60):
        while not await ready(wire):
            pass
    request = HEAD % made["token"].encode() + EVENT
    assert (await wire.ask(request)).status == 200
    await command("token revoke", ids=[made["id"]])
    reply = await wire.ask(request)
    assert (reply.status, reply.json()["code"]) == (401, "token_revoked")
    (listed,) = await command("token list", app="3")
    assert listed["last_used_at"] is not None


async def test_the_daily_counter_is_not_lower_after_control_was_killed(start_process, connect, wait_until, tmp_path):
    it = start_process(app_id="3", app_key="k", app_secret="s", trigger_rate_per_minute=0)
    await wait_until(lambda: Ready() in it.received)
    await asyncio.to_thread(ask, socket_path(tmp_path), "app set", {"id": "3", "settings": {"plan": "free"}})
    head = b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nX-Service-Key: k\r\nX-Service-Secret: s\r\n"
    request = head + b"Content-Length: 36\r\n\r\n" + EVENT

    async def left(process):
        wire = await connect(process.port)
        async with asyncio.timeout(60):
            while not await ready(wire):
                pass
        for _ in range(7):
            reply = await wire.ask(request)
        return int(reply.headers["x-ratelimit-remaining"]), reply.headers["x-ratelimit-reset"]

    remaining, midnight = await left(it)
    assert remaining == 200_000 - 7
    it.process.kill()
    await asyncio.to_thread(it.process.wait)
    later = start_process(app_id="3", app_key="k", app_secret="s", trigger_rate_per_minute=0)
    await wait_until(lambda: Ready() in later.received)
    remaining, later_midnight = await left(later)
    # A new day begins at zero.
    assert remaining == 200_000 - (14 if later_midnight == midnight else 7)
