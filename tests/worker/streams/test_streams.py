"""How long clients read, how many may, and where they go when the server drains."""

import asyncio
import itertools
import json
import math
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from helpers.reading import EVENTS, Reading, keep, read_token
from helpers.server import Server
from helpers.wire import Api
from redpoll._fanout import Flusher, Sink
from redpoll.cli import main
from redpoll.cluster.envelopes import event_envelope
from redpoll.cluster.lifecycle import Life, Lifecycle
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.errors import ApiError
from redpoll.protocol.grants import Grant, RevokedGrants
from redpoll.protocol.streams import Live
from redpoll.worker.streams import streams as module
from redpoll.worker.streams.formats import KEEP_ALIVE_S, STREAM_S
from redpoll.worker.streams.streams import POLL_S, Streams

# -- in a whole server -------------------------------------------------------------------------------------------


async def test_readers_count_as_connections_of_their_address():
    with Server(workers=1, max_connections_per_address=2, trusted_proxies="127.0.0.1") as server:
        keep(server, "kept-")
        token = read_token(server)
        client, other = {"X-Forwarded-For": "203.0.113.7"}, {"X-Forwarded-For": "203.0.113.8"}
        async with Reading(server, token) as reading, Api(server) as api:
            await api.publish("kept-a", "n", "1")
            async with (
                reading.stream("kept-a", headers={**EVENTS, **client}) as one,
                reading.stream("kept-a", headers={**EVENTS, **client}) as two,
            ):
                await one.next()
                await two.next()
                refused = await reading.ask("kept-a", headers={**EVENTS, **client})
                assert (refused.status, refused.body["code"]) == (429, "too_many_connections")
                # Others aren't concerned, and neither is a request that doesn't wait.
                async with reading.stream("kept-a", headers={**EVENTS, **other}) as three:
                    await three.next()
                assert (await reading.ask("kept-a", headers=client)).data == ["1"]
            await room_again(reading, headers=client)


async def test_readers_count_as_connections_of_the_app():
    with Server(workers=2) as server:
        keep(server, "kept-")
        token = read_token(server)
        words = ["app", "set", server.app_id, "max_connections=2", "--data-dir", str(server.folder / "data")]
        assert CliRunner().invoke(main, words).exit_code == 0
        async with Reading(server, token) as reading, Api(server) as api:
            await api.publish("kept-a", "n", "1")
            async with (
                reading.stream("kept-a", headers=EVENTS) as one,
                reading.stream("kept-a", offset="-1") as two,
            ):
                await one.next()
                await two.messages(1)
                # While the other worker's heartbeat isn't seen, an EventSource is to come again.
                status = 200
                while status == 200:
                    async with reading.request("kept-a", headers=EVENTS) as refused:
                        status, text = refused.status, await refused.text()
                assert (status, json.loads(text)["code"]) == (429, "too_many_connections")
            await room_again(reading)


async def room_again(reading: Reading, **more) -> None:
    """Those who left make room, as soon as the server knows it."""
    while (again := await reading.ask("kept-a", offset="-1", live="long-poll", **more)).status == 429:
        await asyncio.sleep(0.01)
    assert again.data == ["1"]


async def test_streams_end_cleanly_when_the_server_stops():
    with Server(workers=2) as server:
        keep(server, "kept-")
        async with (
            Reading(server, read_token(server)) as reading,
            reading.stream("kept-a", offset="now") as stream,
            reading.stream("kept-a", headers=EVENTS) as source,
        ):
            await stream.next()
            stopped = asyncio.create_task(asyncio.to_thread(server.stop))
            # The last chunk came: a cut would raise.
            assert await stream.rest() == []
            assert await source.rest() == []
            await stopped


# -- by itself ---------------------------------------------------------------------------------------------------


class Listening:
    def __init__(self) -> None:
        self.heard: list = []

    def topic(self, app_id: str, channel: str) -> bytes:
        return f"{app_id}:{channel}".encode()

    def add(self, listener) -> None:
        self.heard.append(listener)

    def remove(self, listener) -> None:
        self.heard.remove(listener)


class Client:
    """A reader who is at the tail."""

    form = None

    def __init__(
        self, live: Live = Live.SSE, app_id: str = "1", channel: str = "c", grant: Grant | None = None
    ) -> None:
        self.live = live
        self.app_id = app_id
        self.channel = channel
        self.grant = grant
        self.stream = object()
        self.ends: list[str] = []

    def close(self) -> None:
        self.ends.append("closed")

    def dismiss(self) -> None:
        self.ends.append("dismissed")

    def end(self, error: ApiError) -> None:
        self.ends.append(error.message)


class Table:
    def __init__(self) -> None:
        self.listening = Listening()
        self.life = Life()
        self.ready = True
        self.waits: list[float] = []
        self.begun: list[str] = []
        self.flusher = Flusher(lambda: None)
        history = SimpleNamespace(begin=lambda app, channel, rule, done: self.begun.append(channel))
        registry = SimpleNamespace(history=history, listening=self.listening)
        self.grants = RevokedGrants(lambda: 1_000.0)
        hub = SimpleNamespace(
            registry=registry,
            admission=None,
            flusher=self.flusher,
            sent=lambda *sent: None,
            revoked_grants=self.grants,
        )
        self.apps: dict[str, App] = {}
        self.streams = Streams(hub, self.apps, None, self.life, lambda: self.ready, named_by_proxy=False)
        self.streams.serve_by(lambda stream, then: None, lambda stream, seconds: self.waits.append(seconds))


@pytest.fixture
async def table():
    made = Table()
    yield made
    made.streams.close()


async def test_streams_last_about_a_minute_and_polls_less(table):
    for _ in range(50):
        table.streams.entered(Client())
    assert all(0.8 * STREAM_S < seconds <= STREAM_S for seconds in table.waits)
    # They don't all come again at once.
    assert len(set(table.waits)) > 10
    table.streams.entered(Client(Live.LONG_POLL))
    assert table.waits[-1] == POLL_S


def granted(table, user: str, channel: str = "c", expires_at: float = 2_000.0, live: Live = Live.SSE) -> Client:
    grant = Grant("k", b"", user, b"", None, expires_at, 0, 0, "", "", True, False)
    reader = Client(live, channel=channel, grant=grant)
    table.streams.carries_grant(reader)
    return reader


async def test_stream_lasts_no_longer_than_its_grant(table):
    for expires_at, seconds in ((1_005.0, 15.5), (995.0, 5.5), (980.0, 0.5)):
        table.streams.entered(granted(table, "7", expires_at=expires_at))
        assert table.waits[-1] == seconds
    table.streams.entered(granted(table, "7"))
    assert 0.8 * STREAM_S < table.waits[-1] <= STREAM_S
    table.streams.entered(granted(table, "7", expires_at=1_009.0, live=Live.LONG_POLL))
    assert table.waits[-1] == POLL_S


async def test_readers_end_with_what_their_grants_no_longer_open(table):
    readers = [granted(table, "7"), granted(table, "8"), granted(table, "7", "d"), Client()]
    for reader in readers[1:]:
        table.streams.entered(reader)
    is_over = lambda channel, grant: (channel, grant.user_id) == ("c", "7")  # noqa: E731
    assert await table.streams.end_granted("2", is_over) == 0
    assert await table.streams.end_granted("1", is_over) == 1
    assert [reader.ends for reader in readers] == [["access was revoked"], [], [], []]
    # Those that are over don't count again.
    table.streams.left(readers[0])
    assert await table.streams.end_granted("1", is_over) == 0
    assert await table.streams.end_granted("1", lambda channel, grant: True) == 2


async def test_readers_of_an_app_end_with_the_reason(table, wait_until):
    readers = [Client(app_id=app_id) for app_id in "112"]
    for reader in readers:
        table.streams.entered(reader)
    table.streams.end_app("1", ApiError("app_disabled", "off"))
    await wait_until(lambda: readers[1].ends)
    assert [reader.ends for reader in readers] == [["off"], ["off"], []]


async def test_readers_are_counted_by_app(table):
    readers = [Client(), Client()]
    for reader in readers:
        table.streams.entered(reader)
    other = Client(app_id="2")
    table.streams.entered(other)
    assert (len(table.streams), dict(table.streams.by_app)) == (3, {"1": 2, "2": 1})
    for reader in (*readers, other, other):
        table.streams.left(reader)
    assert (len(table.streams), dict(table.streams.by_app)) == (0, {})


async def test_nobody_enters_while_the_worker_drains_or_is_not_ready(table):
    table.streams.check_admits()
    table.ready = False
    with pytest.raises(ApiError, match="isn't ready"):
        table.streams.check_admits()
    table.ready = True
    table.life.become(Lifecycle.EVACUATING)
    with pytest.raises(ApiError, match="draining"):
        table.streams.check_admits()


async def test_tail_goes_some_time_after_its_last_reader(table, wait_until, monkeypatch):
    monkeypatch.setattr(module, "_TICK_S", 0.001)
    monkeypatch.setattr(module, "_LINGER_S", 0.001)
    tail = table.streams.tail_of("1", "c")
    assert table.streams.tail_of("1", "c") is tail
    reader = Client()
    tail.readers[reader] = None
    other = table.streams.tail_of("1", "d")
    await wait_until(lambda: other not in table.listening.heard)
    assert table.listening.heard == [tail]
    tail.leave(reader)
    await wait_until(lambda: not table.listening.heard)
    assert table.streams.tails == 0


async def test_drain_ends_all_readers(table):
    readers = [Client() for _ in range(20)]
    for reader in readers:
        table.streams.entered(reader)
    await table.streams.drain(0.1)
    assert all(reader.ends == ["closed"] for reader in readers)


async def test_drain_ends_with_another_drain_and_when_it_is_taken_back(table):
    """`redpoll node undrain` left it running: readers were ended on a worker that serves."""
    readers = [Client() for _ in range(20)]
    for reader in readers:
        table.streams.entered(reader)
    first = asyncio.create_task(table.streams.drain(36_000.0))
    await asyncio.sleep(0)
    second = asyncio.create_task(table.streams.drain(36_000.0))
    await asyncio.wait_for(first, 60)
    table.streams.keep()
    await asyncio.wait_for(second, 60)
    # While they ran, each ended one reader per 0.1 s.
    assert sum(not reader.ends for reader in readers) >= 10


async def test_readers_of_a_cleared_channel_end_one_after_the_other(table, wait_until):
    tail = table.streams.tail_of("1", "c")
    tail.subscribed()
    readers = [Client() for _ in range(20)]
    for reader in readers:
        tail.readers[reader] = None
        tail.join(reader, "e", 5, None)
    tail.pushed(b"x f")
    await wait_until(lambda: all(reader.ends == ["dismissed"] for reader in readers))


async def test_history_is_begun_again_while_clients_wait_for_its_first_message(table, wait_until, monkeypatch):
    """It expired after five minutes, and its first message ended all readers."""
    monkeypatch.setattr(module, "_TICK_S", 0.001)
    monkeypatch.setattr(module, "_BEGIN_AGAIN_TICKS", 1)
    rule = HistoryRule(id="0a0b0c", name="", prefix=True, keep=10, seconds=60)
    table.apps["1"] = App(id="1", name="a", keys=(), history=(rule,))
    tail = table.streams.tail_of("1", "c")
    tail.subscribed()
    reader = Client(Live.LONG_POLL)
    tail.readers[reader] = None
    tail.join(reader, "e", 5, None)
    await wait_until(lambda: table.streams._ticks > 3)
    # As far as the tail knows, something was published.
    assert table.begun == []
    table.streams.at_end("1", "c", ("e", 5), True)
    assert table.begun == ["c"]
    await wait_until(lambda: len(table.begun) > 3)
    reader.answer = lambda batch: None
    tail.pushed(event_envelope("n", "1", offset=6, prev=5))
    begun, ticks = len(table.begun), table.streams._ticks
    await wait_until(lambda: table.streams._ticks > ticks + 3)
    assert len(table.begun) == begun
    # One with messages expires too, a day after them.
    monkeypatch.setattr(module, "_RENEW_TICKS", 1)
    await wait_until(lambda: len(table.begun) > begun)


async def test_history_of_old_messages_lives_on_while_somebody_reads_it(table):
    """Who read page by page got 410 a day after the messages, although it had missed nothing."""
    rule = HistoryRule(id="0a0b0c", name="", prefix=True, keep=10, seconds=60)
    table.apps["1"] = App(id="1", name="a", keys=(), history=(rule,))
    table.streams.at_end("1", "c", ("e", int((time.time() - 30) * 1_000_000)), False)
    assert table.begun == []
    table.streams.at_end("1", "c", ("e", int((time.time() - 90) * 1_000_000)), False)
    assert table.begun == ["c"]


class TimedForm:
    """How a stream is written, and when something was."""

    def __init__(self, clock) -> None:
        self.times = [clock()]
        self.clock = clock

    def written(self, batch, now_s: float) -> bytes:
        self.times.append(self.clock())
        return b"event"

    def keep_alive(self) -> bytes:
        return self.written(None, 0.0)


@pytest.mark.parametrize("second", range(15, 20))
async def test_no_stream_is_silent_for_longer_than_is_promised(table, monkeypatch, second):
    """An event just after a look put the comment off, for up to 30 s."""
    loop = asyncio.get_running_loop()
    now = float(math.ceil(loop.time()))
    monkeypatch.setattr(loop, "time", lambda: now)
    tail = table.streams.tail_of("1", "c")
    tail.subscribed()
    reader, form = Client(), TimedForm(loop.time)
    reader.form, reader.stream = form, Sink(table.flusher)
    tail.readers[reader] = None
    tail.join(reader, "e", 5, form)
    for passed in range(60):
        if passed == second:
            tail.pushed(event_envelope("n", "1", offset=6, prev=5))
        now += 1
        if passed % module._TICK_S == 0:
            table.streams.close()
            table.streams._tick()
            while table.streams._unseen:
                await asyncio.sleep(0)
    silences = [after - before for before, after in itertools.pairwise((*form.times, now))]
    assert max(silences) <= KEEP_ALIVE_S


async def test_tails_are_looked_at_in_slices(table, wait_until, monkeypatch):
    """Other clients waited until all tails had written their keep-alives."""
    monkeypatch.setattr(module, "_TICK_S", 0.001)
    clock = iter(range(1_000_000))
    table.streams._looks.clock = lambda: next(clock)
    looks: list[int] = []
    passes = 0

    def count() -> None:
        nonlocal passes
        passes += 1
        asyncio.get_running_loop().call_soon(count)

    for n in range(20):
        tail = table.streams.tail_of("1", f"c{n}")
        tail.readers[Client()] = None
        tail.keep_alive = lambda quiet_s: looks.append(passes)
    asyncio.get_running_loop().call_soon(count)
    await wait_until(lambda: len(looks) >= 20)
    assert len(set(looks[:20])) == 20
