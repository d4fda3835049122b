"""Fixtures of the control plane's tests, with a client that sends exact bytes over real sockets."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import shutil
import socket
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop
from argon2 import PasswordHasher
from redis.asyncio import Redis

from control.webhooks.transitions import APP, OTHER, Clock
from helpers.known_nodes import known
from helpers.messages import unpack_answer
from helpers.receiver import Receiver
from helpers.unkeyed import shard
from redpoll._http import pack_request
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.config.config import Settings
from redpoll.control.accounts.accounts import Accounts
from redpoll.control.accounts.passwords import Passwords
from redpoll.control.plane import ControlPlane
from redpoll.control.records.records import Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.http.messages import FIELDS, SIZE_BYTES, pack_fields, size_of
from redpoll.ipc.messages import Lead, LivingWorkers, NodesChanged, Start, WorkersReady
from redpoll.store.charts import Charts
from redpoll.store.eventlog import EventLog
from redpoll.store.store import Store, database_url


@dataclass
class Reply:
    """One response as received. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self):
        return json.loads(self.body)


class Wire:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self, *, head_only: bool = False) -> Reply:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)
        status_line, *lines = head.decode().rstrip("\r\n").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        length = 0 if head_only else int(headers.get("content-length", "0"))
        return Reply(int(status_line.split(" ")[1]), headers, await self.reader.readexactly(length))

    async def ask(self, data: bytes, *, head_only: bool = False) -> Reply:
        self.send(data)
        return await self.receive(head_only=head_only)

    async def wait_closed(self) -> bytes:
        """Everything up to the end of file, when the server closes."""
        return await asyncio.wait_for(self.reader.read(), 60)

    @property
    def address(self) -> tuple[str, int]:
        return self.writer.get_extra_info("sockname")[:2]


@pytest.fixture
async def connect():
    """`await connect(port)`: a Wire to 127.0.0.1; closed after the test."""
    wires: list[Wire] = []

    async def open_wire(port: int) -> Wire:
        wires.append(Wire(*await asyncio.open_connection("127.0.0.1", port)))
        return wires[-1]

    yield open_wire
    for wire in wires:
        wire.writer.close()


# The real password hash takes a quarter of a second, on purpose.
CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)

APP_ID, KEY, SECRET = "3", "278d425bdf160c739803", "7ad3773142a6692b25b8"
OTHER_ID, OTHER_KEY, OTHER_SECRET = "4", "1111111111111111aaaa", "2222222222222222bbbb"


def signed(method: str, path: str, body: bytes = b"", params: dict[str, str] | None = None, **changed: str) -> str:
    """A request target with a signature (protocol/README.md "Request signing"), computed independently of redpoll.

    `changed` replaces a parameter after signing; `secret`, `key` and `signed_path` change what is signed.
    """
    secret, signed_path = changed.pop("secret", SECRET), changed.pop("signed_path", path)
    fields = {
        "auth_key": changed.pop("key", KEY),
        "auth_timestamp": changed.pop("timestamp", str(int(time.time()))),
        "auth_version": "1.0",
        **(params or {}),
    }
    if body:
        fields["body_md5"] = hashlib.md5(body).hexdigest()
    text = "&".join(f"{name}={value}" for name, value in sorted(fields.items()))
    digest = hmac.new(secret.encode(), f"{method}\n{signed_path}\n{text}".encode(), hashlib.sha256).hexdigest()
    fields["auth_signature"] = digest
    fields.update(changed)
    return f"{path}?{urllib.parse.urlencode(fields)}"


def request_bytes(method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """One HTTP/1.1 request, with its Content-Length."""
    lines = [f"{method} {target} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Plane:
    """A complete control plane in this process on a real Redis, with the apps 3 and 4, and a client of it."""

    def __init__(self, plane: ControlPlane, records: Records, port: int, wire: Wire, heard: list):
        self.plane = plane
        self.records = records
        self.port = port
        self.wire = wire
        # Messages to the supervisor.
        self.heard = heard

    async def ask(self, method, target, body=b"", headers=None):
        return await self.wire.ask(request_bytes(method, target, body, headers), head_only=method == "HEAD")

    async def call(self, method, path, body=None, params=None, **changed):
        """A signed request; `body` is rendered as JSON."""
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask(method, signed(method, path, raw, params, **changed), raw)

    async def write_log(self):
        """Writes all calls so far to the event log."""
        # The tracer's own flush may be writing rows at this moment; another flush doesn't wait for that.
        await self.plane.observation.tracer.finish()
        await self.plane.observation.tracer.flush()

    async def trigger(self, **event):
        return await self.call("POST", "/apps/3/events", {"name": "e", "data": "{}", "channels": ["c"], **event})


@pytest.fixture
def node():
    """`node(run, name, …)`: a node as the supervisor describes it."""
    return known


async def _fill(folder: Path, *apps: tuple[str, str, str]) -> None:
    """Writes the files of a new control plane with these apps (id, key, secret)."""
    store = await Store.open(database_url(folder))
    records = Records(store)
    await records.load()
    for app in apps:
        await records.upsert_app(*app)
    await store.close()
    event_log = await EventLog.open(folder / "events.sqlite", 10_000, 3_600)
    await event_log.close()
    charts = await Charts.open(folder / "charts.sqlite")
    await charts.close()


def _filled(folder: Path, *apps: tuple[str, str, str]) -> Path:
    loop = uvloop.new_event_loop()
    loop.run_until_complete(_fill(folder, *apps))
    loop.close()
    return folder


def _copy_missing(prepared: Path, target: Path) -> None:
    for file in prepared.iterdir():
        if not (target / file.name).exists():
            shutil.copy(file, target)


@pytest.fixture(scope="session")
def prepared_plane(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a control plane with the apps 3 and 4. A copy costs a tenth of the statements that made them."""
    apps = (APP_ID, KEY, SECRET), (OTHER_ID, OTHER_KEY, OTHER_SECRET)
    return _filled(tmp_path_factory.mktemp("plane"), *apps)


@pytest.fixture(scope="session")
def prepared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record store without apps, to be copied."""
    folder = _filled(tmp_path_factory.mktemp("store"))
    for name in ("events.sqlite", "charts.sqlite"):
        (folder / name).unlink()
    return folder


@pytest.fixture
async def make_plane(tmp_path, connect, wait_until, prepared_plane):
    """`await make_plane(redis_url, ready=True, **settings)`: a Plane; shut down after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(redis_url, *, ready=True, body_timeout_s=15.0, **settings):
            _copy_missing(prepared_plane, tmp_path)
            store = await Store.open(database_url(tmp_path))
            stack.push_async_callback(store.close)
            records = Records(store)
            await records.load()
            settings = Settings(**{"trigger_rate_per_minute": 0, "control_names": ("test",), **settings})
            webhooks = Webhooks(store, records, settings)
            await webhooks.load()
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            start = Start(
                role="control",
                number=0,
                run="0123456789ab",
                process=0,
                redis_url=redis_url,
                listen_fd=listener.fileno(),
                requests_path=str(tmp_path / "requests.sock"),
                data_dir=str(tmp_path),
                settings=settings,
            )
            heard = []
            event_log = await EventLog.open(tmp_path / "events.sqlite", 10_000, 3_600)
            stack.push_async_callback(event_log.close)
            charts = await Charts.open(tmp_path / "charts.sqlite")
            stack.push_async_callback(charts.close)
            plane = ControlPlane(
                start,
                records,
                webhooks,
                listener,
                heard.append,
                shard_key=b"",
                accounts=Accounts(store, passwords=Passwords(CHEAP)),
                event_log=event_log,
                charts=charts,
                body_timeout_s=body_timeout_s,
            )
            await plane.start()
            stack.push_async_callback(plane.finish)
            plane.receive(LivingWorkers([], 0))
            plane.receive(NodesChanged([known(start.run, "here")], start.run))
            plane.receive(Lead(1))
            plane.receive(WorkersReady())
            if ready:
                await wait_until(lambda: plane.publishing.publisher.open and plane.health.obstacle() is None)
                await wait_until(lambda: plane.health.directory_written)
            return Plane(plane, records, port, await connect(port), heard)

        yield make


@pytest.fixture
async def plane(make_plane, redis):
    """A ready Plane on the session's Redis, emptied."""
    return await make_plane(redis.url)


class WorkersEnd:
    """A worker's connection to control: requests as messages, in any order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer
        self.number = 0

    def send(self, method, target, body=b"", *, fields=(), flags=0, client="203.0.113.9", announced=0, refusal=0):
        """Send a request; returns its number."""
        self.number += 1
        packed = pack_fields(
            (FIELDS.index(name), value.encode("utf-8", "surrogateescape")) for name, value in dict(fields).items()
        )
        self.writer.write(
            pack_request(
                self.number,
                flags,
                method.encode(),
                client.encode(),
                target.encode("utf-8", "surrogateescape"),
                packed,
                body,
                announced,
                refusal,
            )
        )
        return self.number

    async def next(self):
        """The next response; skips heartbeats."""
        async with asyncio.timeout(60):
            while True:
                head = await self.reader.readexactly(SIZE_BYTES)
                answer = unpack_answer(head + await self.reader.readexactly(size_of(head, 0) - SIZE_BYTES))
                if answer.number:
                    return answer

    async def __call__(self, method, target, body=b"", **more):
        number = self.send(method, target, body, **more)
        answer = await self.next()
        assert answer.number == number
        head, _, content = answer.response.partition(b"\r\n\r\n")
        status_line, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return Reply(int(status_line.split(" ")[1]), headers, content)


@pytest.fixture
async def workers_request(plane, tmp_path):
    """`await workers_request(method, target, body)`: a Reply; or WorkersEnd for single messages."""
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "requests.sock"))
    yield WorkersEnd(reader, writer)
    writer.close()


class Listener:
    """Receives the messages of Redis topics, as a worker does."""

    def __init__(self, link):
        self.link = link
        self.heard = []
        link.on_push = lambda topic, payload: self.heard.append(payload)

    async def subscribe(self, *topics):
        done = asyncio.get_running_loop().create_future()
        self.link.subscribe(topics, done.set_result)
        await done


@pytest.fixture
async def hear(redis, plane):
    """`await hear(channel, …)`: a Listener to channels of app 3."""
    links = []

    async def start(*channels, app_id=APP_ID):
        link = Link(redis.url)
        links.append(link)
        listener = Listener(link)
        link.start()
        await link.wait_up()
        await listener.subscribe(*(Keys("rp").topic(app_id, channel) for channel in channels))
        return listener

    yield start
    for link in links:
        await link.close()


@pytest.fixture
async def occupy(redis):
    """`await occupy(channel, {worker: count}, users=(…))`: writes the keys of an occupied channel of app 3."""
    client = Redis(unix_socket_path=redis.path)
    keys = Keys("rp")

    async def put(channel, holders, users=()):
        await client.hset(keys.counts(APP_ID, channel), mapping=holders)
        await client.sadd(keys.occupied(shard(APP_ID, channel), APP_ID), channel)
        for user in users:
            await client.hset(keys.members(APP_ID, channel), user, "w\n")

    yield put
    await client.aclose()


@pytest.fixture
def sign():
    """`sign(method, path, body, params, **changed)`: see `signed`."""
    return signed


# -- webhooks: a clock, a store with two apps, `Webhooks`, and a receiver


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def link(redis):
    link = Link(redis.url)
    link.start()
    await link.wait_up()
    yield link
    await link.close()


@pytest.fixture
async def store(tmp_path, prepared_store):
    _copy_missing(prepared_store, tmp_path)
    opened = await Store.open(database_url(tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
async def records(store):
    loaded = Records(store)
    await loaded.load()
    await loaded.upsert_app(APP, "a" * 20, "b" * 40)
    await loaded.upsert_app(OTHER, "c" * 20, "d" * 40)
    return loaded


LOOPBACK = {"webhook_allow_http": True, "webhook_allow_addresses": ("127.0.0.0/8",)}


@pytest.fixture
async def make_webhooks(monkeypatch, store, records, clock):
    """`await make_webhooks(box, **settings)`: a Webhooks, started if a box is given, and ended after the test. `limits`
    are arguments of Webhooks."""
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    async with contextlib.AsyncExitStack() as stack:

        async def make(box=None, limits=None, **settings):
            settings = Settings(**{**LOOPBACK, **settings})
            made = Webhooks(store, records, settings, clock=clock, steady=clock.steady, **(limits or {}))
            await made.load()
            stack.push_async_callback(made.finish)
            if box is not None:
                made.start(box, lambda *traced: None)
            return made

        yield make


@pytest.fixture
async def receiver():
    async with Receiver() as it:
        yield it
