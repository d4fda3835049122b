"""Workers within the test process: real sockets, a real Redis, apps in the directory; no supervisor."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import socket
from dataclasses import dataclass, field

import msgspec
import pytest
import redis.asyncio
import websockets

from cluster.links import be_patient
from helpers.bus_publishing import publish_all
from helpers.fallback_wire import FallbackSocket
from redpoll.cluster.bus import Bus
from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.config.config import Settings
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.messages import DirectoryVersion, ShardKey, Start, encode
from redpoll.protocol.apps import App, HistoryRule, Key
from redpoll.worker.main import Worker

APP = App(id="1", name="test", keys=(Key(key="278d425bdf160c739803", secret="7ad3773142a6692b25b8"),))

OTHER = App(id="2", name="other", keys=(Key(key="aaaabbbbccccddddeeee", secret="ffff0000ffff0000ffff"),))

# What a worker gives up when Redis or this process stalls, it doesn't give up on the slowest machine.
PATIENT = Timings(unanswered_s=60.0)


def sign(app: App, text: str) -> str:
    """`auth` of a subscribe: KEY:HEX (protocol/README.md "Authentication of channels")."""
    key = app.keys[0]
    return f"{key.key}:{hmac.new(key.secret.encode(), text.encode(), hashlib.sha256).hexdigest()}"


@pytest.fixture(autouse=True)
def _patient_with_redis():
    # Not the fixture `monkeypatch`: what tests patch with that is to be undone before their workers end.
    with pytest.MonkeyPatch.context() as patches:
        be_patient(patches)
        # And a worker to answer for a session's.
        patches.setattr("redpoll.worker.fallback.relay._ANSWER_S", 60.0)
        yield


@dataclass
class Client:
    """A Pusher client without a library: sends and receives frames as they are on the wire."""

    socket: websockets.ClientConnection
    socket_id: str = ""
    seen: list = field(default_factory=list)

    async def send(self, event: str, data=None, **more) -> None:
        await self.socket.send(json.dumps({"event": event, "data": data if data is not None else {}, **more}))

    async def next(self, timeout_s: float = 60.0) -> dict:
        frame = json.loads(await asyncio.wait_for(self.socket.recv(), timeout_s))
        self.seen.append(frame)
        return frame

    async def until(self, event: str, timeout_s: float = 60.0) -> dict:
        """The next frame with this event; those before it are in `seen`."""
        while (frame := await self.next(timeout_s))["event"] != event:
            pass
        return frame

    async def events(self, count: int, timeout_s: float = 60.0) -> list[dict]:
        """The next `count` frames of the app's own events; the protocol's are in `seen`."""
        found: list[dict] = []
        while len(found) < count:
            frame = await self.next(timeout_s)
            if not frame["event"].startswith("pusher"):
                found.append(frame)
        return found

    async def subscribe(self, channel: str, member: dict | None = None, app: App = APP, **more) -> dict:
        """Subscribe, signed if the channel needs it, and return the success frame; `more`: rewind, since, recover."""
        await self.ask(channel, member, app, **more)
        return await self.until("pusher_internal:subscription_succeeded")

    def sign(self, channel: str, app: App = APP) -> str:
        """`auth` for a channel, without member data."""
        return sign(app, f"{self.socket_id}:{channel}")

    async def ask(self, channel: str, member: dict | None = None, app: App = APP, **more) -> None:
        data = {"channel": channel, **more}
        if member is not None:
            data["channel_data"] = json.dumps(member)
            data["auth"] = sign(app, f"{self.socket_id}:{channel}:{data['channel_data']}")
        elif channel.startswith(("private-", "presence-")):
            data["auth"] = self.sign(channel, app)
        await self.send("pusher:subscribe", data)

    async def sign_in(self, user_id: str, app: App = APP, **more) -> dict:
        """Sign in, with `watchlist` and `user_info` if given, and return the success frame."""
        user_data = json.dumps({"id": user_id, **more})
        auth = sign(app, f"{self.socket_id}::user::{user_data}")
        await self.send("pusher:signin", {"auth": auth, "user_data": user_data})
        return await self.until("pusher:signin_success")

    async def closed_with(self, timeout_s: float = 60.0) -> int:
        """The code of the close frame; the error frame before it has the same."""
        code = (await self.until("pusher:error", timeout_s))["data"]["code"]
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await self.next(timeout_s)
        assert closed.value.rcvd.code == code
        return code

    async def nothing_more(self, but: str = "") -> None:
        """Assert that no frame waits, or only some with the event `but`: a ping is answered by its pong first."""
        await self.send("pusher:ping")
        while (frame := await self.next())["event"] == but:
            pass
        assert frame["event"] == "pusher:pong", frame


class Bench:
    """Runs workers against one Redis and opens clients to them."""

    def __init__(self, redis, tmp_path, stack: contextlib.AsyncExitStack) -> None:
        self.redis = redis
        self.tmp_path = tmp_path
        self.stack = stack
        self.workers: list[Worker] = []
        self.version = 0
        self.app = APP
        self.other = OTHER

    async def put(self, app_id: str, app: App | None) -> None:
        """Write one record to the directory, as the control plane does."""
        self.version += 1
        await self.directory.put(app_id, app, self.version)

    async def publish(self, channel: str, event: str, data: str, skip: str | None = None) -> None:
        """One event, as the HTTP API publishes it."""
        await publish_all(self.bus, self.app, [(channel, event, data, skip)])

    async def publish_numbers(self, channel: str, numbers: range, data: str = "{n}", event: str = "n") -> None:
        """Events with these numbers in their data, in a few calls."""
        for at in range(0, len(numbers), 500):
            items = [(channel, event, data.replace("{n}", str(n)), None) for n in numbers[at : at + 500]]
            await publish_all(self.bus, self.app, items)

    async def keep(self, name: str = "stored-", **rule) -> None:
        """The app stores the messages of channels whose names begin with `name`."""
        rule = {"prefix": True, "keep": 1000, "seconds": 600, **rule}
        await self.change(history=(HistoryRule(id="0a0b0c", name=name, **rule),))

    async def exchange_keys(self, worker, **settings) -> None:
        """The other app gets the keys of the app, and the app its keys and these settings."""
        keys = self.app.keys
        await self.change(keys=self.other.keys, **settings)
        self.other = msgspec.structs.replace(self.other, keys=keys)
        await self.put(self.other.id, self.other)

        def has_moved() -> bool:
            app = worker.directory.find(keys[0].key)
            return app is not None and app.id == self.other.id

        await self.settled(worker, has_moved)

    async def change(self, **settings) -> None:
        """Change the app's record, and wait until every worker has it."""
        self.app = msgspec.structs.replace(self.app, **settings)
        await self.put("1", self.app)
        for worker in self.workers:
            await self.settled(worker, lambda worker=worker: worker.directory.by_id["1"] == self.app)

    async def start(self, *, shard_key: str | None = "", timings: Timings = PATIENT, **settings) -> Worker:
        """`shard_key` None: the supervisor doesn't know it yet, and the test sends it."""
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        ours, theirs = socket.socketpair()
        self.stack.callback(ours.close)
        number = len(self.workers)
        start = Start(
            role="worker",
            number=number,
            run="0123456789ab",
            process=number + 1,
            redis_url=self.redis.url,
            listen_fd=listening.detach(),
            requests_path=str(self.tmp_path / "requests.sock"),
            data_dir=str(self.tmp_path),
            settings=Settings(**settings),
        )
        worker = Worker(start, ChildPipe(theirs.detach()), timings)
        worker.supervisor = ours
        # It would take the silence of the supervisor, which is not here, for its end.
        worker.aside.start = lambda: None
        # As the supervisor does, with what control says about the record store.
        if shard_key is not None:
            ours.sendall(encode(ShardKey(shard_key)))
        ours.sendall(encode(DirectoryVersion(self.version)))
        self.workers.append(worker)
        task = asyncio.create_task(worker.run())

        async def stop() -> None:
            worker.drain()
            await asyncio.wait_for(task, 60)

        self.stack.push_async_callback(stop)
        ready = asyncio.create_task(worker.ready.wait())
        await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if task.done():
            task.result()
        assert ready.done()
        return worker

    async def settled(self, worker: Worker, predicate) -> None:
        """Wait until the worker has received what was sent to Redis."""
        async with asyncio.timeout(60):
            while not predicate():
                await asyncio.sleep(0.005)

    def url(self, worker: Worker, path: str) -> str:
        return f"ws://127.0.0.1:{worker.port}{path}"

    async def open(self, worker: Worker, path: str | None = None, **more) -> Client:
        """A WebSocket to the worker, nothing read yet."""
        url = self.url(worker, path or f"/app/{APP.keys[0].key}?protocol=7&client=test&version=1")
        options = {"ping_interval": None, "compression": None, "max_queue": None, "open_timeout": 60, **more}
        connection = await websockets.connect(url, **options)
        self.stack.push_async_callback(connection.close)
        return Client(connection)

    async def client(self, worker: Worker, app: App = APP, query: str = "", **more) -> Client:
        """A client that has been greeted; `query` as `&recover=1`."""
        client = await self.open(worker, f"/app/{app.keys[0].key}?protocol=7&client=test&version=1{query}", **more)
        established = await client.next()
        assert established["event"] == "pusher:connection_established", established
        client.socket_id = json.loads(established["data"])["socket_id"]
        return client

    async def fallback(self, *workers: Worker, kind: str = "xhr_streaming", app: App = APP, **more) -> Client:
        """A client of the HTTP fallback that has been greeted. Its requests go to these workers by turns."""
        targets = [("127.0.0.1", worker.port) for worker in workers]
        fallback = FallbackSocket(targets, app.keys[0].key, kind, **more)
        self.stack.push_async_callback(fallback.close)
        await fallback.open()
        client = Client(fallback)
        established = await client.next()
        assert established["event"] == "pusher:connection_established", established
        client.socket_id = json.loads(established["data"])["socket_id"]
        return client


async def _bench(redis, tmp_path, stack: contextlib.AsyncExitStack) -> Bench:
    link = Link(redis.url)
    link.start()
    await link.wait_up()
    stack.push_async_callback(link.close)
    made = Bench(redis, tmp_path, stack)
    made.bus = Bus(link, Keys())
    made.directory = DirectoryWriter(link, Keys())
    made.version = 1
    await made.directory.fill([APP, OTHER], 1)
    return made


@pytest.fixture
async def bench(redis, tmp_path):
    """Start workers with `await bench.start()`, clients with `await bench.client(worker)`."""
    async with contextlib.AsyncExitStack() as stack:
        yield await _bench(redis, tmp_path, stack)


@pytest.fixture
async def bench_on(tmp_path):
    """`await bench_on(redis)`: the same on a Redis of the test's own."""
    async with contextlib.AsyncExitStack() as stack:
        yield lambda redis: _bench(redis, tmp_path, stack)


@pytest.fixture
async def client_of_redis(bench):
    client = redis.asyncio.Redis(unix_socket_path=bench.redis.path)
    yield client
    await client.aclose()
