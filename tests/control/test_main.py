"""The control process: start, messages of the supervisor, failures of Redis, shutdown; also as a real process."""

import asyncio
import json
import signal
import socket
import subprocess
import sys

import pytest
import redis.asyncio

from redpoll.child_pipe import ChildPipe, Start
from redpoll.cluster.keys import Keys
from redpoll.config import Settings
from redpoll.control.commands import ask, socket_path


async def test_control_reports_that_it_is_ready_and_readyz_waits_for_the_workers(make_plane, redis, wait_until):
    plane = await make_plane(redis.url)
    assert plane.heard == [{"ready": True}]
    assert (await plane.ask("GET", "/readyz")).status == 200
    plane.plane.health.workers_ready = False
    reply = await plane.ask("GET", "/readyz")
    assert (reply.status, reply.json()["code"], reply.headers["retry-after"]) == (503, "unavailable", "1")
    plane.plane.receive({"workers_ready": True})
    assert (await plane.ask("GET", "/readyz")).status == 200
    plane.plane.receive({"draining": True})
    assert (await plane.ask("GET", "/readyz")).status == 503
    # While draining it serves until the supervisor sends `drain`.
    assert (await plane.trigger()).status == 200
    assert not plane.plane.finished.is_set()


async def test_without_redis_control_is_alive_but_not_ready_and_responds_503_in_time(make_plane, tmp_path):
    plane = await make_plane(f"unix://{tmp_path}/none.sock", ready=False)
    assert (await plane.ask("GET", "/healthz")).status == 200
    assert (await plane.ask("GET", "/readyz")).status == 503
    began = asyncio.get_running_loop().time()
    reply = await plane.trigger()
    assert asyncio.get_running_loop().time() - began < 4
    assert (reply.status, reply.json()["code"], reply.headers["retry-after"]) == (503, "unavailable", "1")
    assert (await plane.call("GET", "/apps/3/channels")).status == 503
    assert (await plane.ask("GET", "/metrics")).status == 200


async def test_an_unsuitable_redis_ends_the_start_with_a_reason(make_plane, own_redis, wait_until):
    async with redis.asyncio.Redis(unix_socket_path=own_redis.path) as admin:
        await admin.execute_command("ACL", "SETUSER", "poor", "on", ">pass", "~*", "resetchannels", "+@all")
    plane = await make_plane(own_redis.url + "?username=poor&password=pass", ready=False)
    await wait_until(lambda: any("fatal" in message for message in plane.heard))
    (fatal,) = [message["fatal"] for message in plane.heard if "fatal" in message]
    assert "may not use PUBLISH on our keys or topics" in fatal
    assert "&rp:*" in fatal


async def test_publishes_get_503_while_redis_is_killed_and_then_work_again(make_plane, own_redis, wait_until):
    plane = await make_plane(own_redis.url)
    assert (await plane.trigger()).status == 200
    own_redis.kill()
    assert (await plane.trigger()).status == 503
    own_redis.start()
    await wait_until(lambda: plane.plane.publisher.open)
    assert (await plane.trigger()).status == 200


async def test_publishes_get_503_in_time_while_redis_hangs(make_plane, own_redis):
    plane = await make_plane(own_redis.url)
    own_redis.pause()
    try:
        assert (await plane.trigger()).status == 503
    finally:
        own_redis.resume()


async def test_workers_that_leave_the_supervisors_list_are_reaped(plane, wait_until):
    link, keys = plane.plane.link, Keys("rp")
    await link.ask(b"HSET", keys.beat, "0123456789ab.1.1", 5)
    plane.plane.receive({"alive": [1], "greatest": 1})
    await wait_until(lambda: plane.plane.reaper.workers() == ["0123456789ab.1.1"])
    plane.plane.receive({"alive": [2], "greatest": 2})
    await wait_until(lambda: plane.plane.reaper.reaped == 1)
    assert await link.ask(b"HLEN", keys.beat) == 0


async def test_a_new_app_is_usable_at_once(plane, sign):
    app = await plane.records.create_app("later")
    key = app.signing_key()
    body = b'{"name":"e","channel":"c","data":""}'
    target = sign("POST", f"/apps/{app.id}/events", body, key=key.key, secret=key.secret)
    assert (await plane.ask("POST", target, body)).status == 200
    assert await plane.plane.link.ask(b"HEXISTS", Keys("rp").directory, app.id)


async def test_the_public_port_has_the_api_and_health_but_no_metrics(plane, workers_request, sign):
    for path, status in (("/healthz", 200), ("/", 200), ("/readyz", 200), ("/metrics", 404), ("/dashboard", 404)):
        assert (await workers_request("GET", path)).status == status
    body = b'{"name":"e","channel":"c","data":""}'
    reply = await workers_request("POST", sign("POST", "/api/v1/apps/3/events", body), body)
    assert (reply.status, reply.body) == (200, b"{}")


async def test_an_exception_in_the_loop_is_counted(plane, wait_until):
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await wait_until(lambda: plane.plane._own_counters()["loop_exceptions_total"] == 1)


@pytest.mark.parametrize("how", ["away", "hanging"])
async def test_the_deadline_of_503_includes_the_daily_limit_and_the_idempotency_claim(
    make_plane, own_redis, wait_until, how
):
    plane = await make_plane(own_redis.url)
    await plane.records.set_app("3", {"plan": "free", "idempotency": True})
    loop = asyncio.get_running_loop()
    if how == "away":
        own_redis.kill()
    else:
        own_redis.pause()
    for event in ({}, {"correlation_id": "1"}, {"channels": ["a", "b"], "info": "subscription_count"}):
        began = loop.time()
        reply = await plane.trigger(**event)
        # The deadline is 2 s. A busy machine may take longer; three waits in sequence would take 6 s.
        assert loop.time() - began < 4
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    if how == "away":
        own_redis.start()
    else:
        own_redis.resume()
    await wait_until(lambda: plane.plane.publisher.open)
    assert (await plane.trigger(correlation_id="1")).status == 200


async def test_the_daily_counter_continues_after_redis_lost_its_data(make_plane, own_redis, wait_until):
    plane = await make_plane(own_redis.url)
    await plane.records.set_app("3", {"plan": "free"})
    for _ in range(5):
        reply = await plane.trigger()
    assert reply.headers["x-ratelimit-remaining"] == "199995"
    own_redis.kill()
    await wait_until(lambda: not plane.plane.publisher.open)
    for file in own_redis.folder.rglob("*.*of*"):
        if file.is_file():
            file.unlink()
    own_redis.start()
    await wait_until(lambda: plane.plane.publisher.open)
    assert (await plane.trigger()).headers["x-ratelimit-remaining"] == "199994"


# -- as a process -----------------------------------------------------------------------------------------------

CONTROL = (
    "import sys; from redpoll.control.main import main; from redpoll.child_pipe import ChildPipe; "
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
            k=0,
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
        self.child_pipe.send({"alive": [], "greatest": 0})
        self.child_pipe.send({"lead": 1})
        self.child_pipe.send({"workers_ready": True})
        self.received = []
        self.child_pipe.attach(asyncio.get_running_loop(), self.received.append, lambda: self.received.append("end"))

    async def wait_ended(self):
        _, errors = await asyncio.to_thread(self.process.communicate, None, 20)
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
    await wait_until(lambda: {"ready": True} in it.received)
    (made,) = [message["created_app"] for message in it.received if "created_app" in message]
    assert made["id"].isdecimal()
    apps = await asyncio.to_thread(ask, socket_path(tmp_path), "app list", {})
    assert [app["id"] for app in apps] == [made["id"]]
    wire = await connect(it.port)
    async with asyncio.timeout(10):
        while not await ready(wire):
            pass
    it.child_pipe.send({"drain": True})
    code, errors = await it.wait_ended()
    assert (code, "Traceback" in errors) == (0, False)


async def test_open_requests_are_answered_after_sigterm(start_process, connect, wait_until):
    it = start_process(app_id="3", app_key="k", app_secret="s")
    await wait_until(lambda: {"ready": True} in it.received)
    wire, idle = await connect(it.port), await connect(it.port)
    await idle.ask(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
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


async def test_control_exits_when_its_supervisor_dies(start_process, wait_until):
    it = start_process()
    await wait_until(lambda: {"ready": True} in it.received)
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
    assert "redpoll.sqlite" in json.dumps(it.received)
    assert "fatal" in it.received[0]


HEAD = b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %b\r\nContent-Length: 36\r\n\r\n"
EVENT = b'{"name":"e","channel":"c","data":""}'


async def test_a_token_created_by_command_works_until_a_command_revokes_it(
    start_process, connect, wait_until, tmp_path
):
    it = start_process(app_id="3", app_key="k", app_secret="s")
    await wait_until(lambda: {"ready": True} in it.received)

    async def command(verb, **arguments):
        return await asyncio.to_thread(ask, socket_path(tmp_path), verb, arguments)

    made = await command("token create", app="3", name="t", scopes=["publish"], lasts_s=None)
    wire = await connect(it.port)
    async with asyncio.timeout(10):
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
    await wait_until(lambda: {"ready": True} in it.received)
    await asyncio.to_thread(ask, socket_path(tmp_path), "app set", {"id": "3", "settings": {"plan": "free"}})
    head = b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nX-Service-Key: k\r\nX-Service-Secret: s\r\n"
    request = head + b"Content-Length: 36\r\n\r\n" + EVENT

    async def left(process):
        wire = await connect(process.port)
        async with asyncio.timeout(10):
            while not await ready(wire):
                pass
        for _ in range(7):
            reply = await wire.ask(request)
        return int(reply.headers["x-ratelimit-remaining"])

    assert await left(it) == 200_000 - 7
    it.process.kill()
    await asyncio.to_thread(it.process.wait)
    later = start_process(app_id="3", app_key="k", app_secret="s", trigger_rate_per_minute=0)
    await wait_until(lambda: {"ready": True} in later.received)
    assert await left(later) == 200_000 - 14
