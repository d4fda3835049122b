import asyncio
import subprocess
import sys
import time

import pusher
import pytest

from helpers.wire import Socket
from redpoll.testing import FakeServer


def publisher(server: FakeServer) -> pusher.Pusher:
    return pusher.Pusher(
        app_id=server.app_id,
        key=server.app_key,
        secret=server.app_secret,
        host=server.host,
        port=server.port,
        ssl=False,
        timeout=60,
    )


def test_the_official_library_publishes_without_an_event_loop(server):
    backend = publisher(server)
    assert backend.trigger(["orders", "audit"], "order.paid", {"id": 7}) == {}
    assert [event.channel for event in server.published] == ["orders", "audit"]
    assert server.wait("order.paid", "audit").json == {"id": 7}
    assert server.assert_published("order.paid", "orders", data={"id": 7}, times=1).data == '{"id": 7}'
    server.assert_not_published("order.refunded")
    assert backend.channels_info() == {"channels": {}}


async def test_waits_end_when_the_event_comes_and_say_at_the_deadline_what_came(server):
    waiting = asyncio.create_task(server.wait_for("late", count=2, timeout_s=60))
    backend = publisher(server)
    for _ in range(2):
        await asyncio.to_thread(backend.trigger, "c", "late", "x")
    assert (await waiting).channel == "c"
    with pytest.raises(AssertionError, match=r"event 'never' on 'c'.* within 0.01 s; published were:\n  'late' on 'c'"):
        await server.wait_for("never", "c", timeout_s=0.01)
    with pytest.raises(AssertionError, match=r"'late' was not published 3 times, but 2 times"):
        server.assert_published("late", times=3)
    with pytest.raises(AssertionError, match="any event was published"):
        server.assert_not_published()
    server.reset()
    with pytest.raises(AssertionError, match="nothing was published"):
        server.assert_published("late")


async def test_connections_are_closed_as_asked(server):
    clients = [await Socket.connect(server) for _ in range(3)]
    assert server.disconnect(4200, socket_id=clients[0].socket_id) == 1
    assert await clients[0].until_closed() == 4200
    assert server.disconnect(None, socket_id=clients[1].socket_id) == 1
    assert await clients[1].until_closed() is None
    assert server.connections == [clients[2].socket_id]
    assert server.disconnect() == 1
    assert await clients[2].until_closed() == 4200
    with pytest.raises(ValueError, match="from 4000 to 4999"):
        server.disconnect(1000)
    with pytest.raises(ValueError, match="status of an error"):
        server.fail(200)


# In a process of its own: here, other tests' sockets may be collected meanwhile.
TWO_HUNDRED = """
import gc, os, socket, threading
from redpoll.testing import FakeServer

def held():
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))

before = held()
for _ in range(200):
    with FakeServer() as server, socket.create_connection((server.host, server.port)):
        pass
assert held() == before, (held(), before)
"""


def test_two_hundred_servers_leave_no_thread_no_task_and_no_descriptor():
    # A task or a transport that is left makes a warning when it is collected.
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", TWO_HUNDRED], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_server_that_is_not_running_says_so():
    server = FakeServer()
    with pytest.raises(RuntimeError, match="isn't running"):
        server.clock.advance(1)
    with FakeServer() as other, pytest.raises(OSError, match="address already in use"):
        FakeServer(port=other.port).start()
    with pytest.raises(ValueError, match="app_key must be"):
        FakeServer(app_key="a:b")


async def test_history_rules_are_checked_and_kept(server):
    with pytest.raises(ValueError, match="seconds must be between"):
        server.keep_history("news", seconds=0)
    server.keep_history("news-", keep=2, seconds=60, replay=2)
    backend = publisher(server)
    for number in range(3):
        await asyncio.to_thread(backend.trigger, "news-a", "n", str(number))
    client = await Socket.connect(server)
    await client.subscribe("news-a")
    assert [(await client.next("n"))["data"] for _ in range(2)] == ["1", "2"]
    server.clock.advance(60)
    late = await Socket.connect(server)
    await late.subscribe("news-a")
    await late.settle()
    assert not late.all("n")
    assert server.subscribers("news-a") == [client.socket_id, late.socket_id]
    assert server.members("presence-none") == []


def test_it_needs_no_compiled_code_no_redis_and_no_uvloop():
    code = (
        "import sys\n"
        "for name in ('_engine', '_fanout', '_frame', '_http', '_sockets', '_tls', '_wheel', '_shards', '_text',\n"
        "             '_memory', '_fast_publish', '_publish', '_publish_body'):\n"
        "    sys.modules[f'redpoll.{name}'] = None\n"
        "sys.modules.update(dict.fromkeys(('uvloop', 'redis', 'hiredis', 'sqlalchemy', 'resource', 'fcntl')))\n"
        "from redpoll.testing import FakeServer\n"
        "with FakeServer() as server: print(server.port)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_app_of_another_language_finds_everything_in_one_url(server):
    assert server.pusher_url == f"http://fake-key:fake-secret@127.0.0.1:{server.port}/apps/1"
    assert server.url == f"ws://127.0.0.1:{server.port}/app/fake-key"
    assert time.time() - server.clock.time_s() < 60
    assert FakeServer(host="::1", port=6001).url == "ws://[::1]:6001/app/fake-key"
