"""Channels with a rate: fewer frames for live subscribers, newcomers and slow readers, and no text is lost."""

import asyncio
import json
import socket

import msgspec
import websockets

from helpers.bus_publishing import publish_all
from redpoll.protocol.apps import HistoryRule

JOIN = {"max_rate": 5, "join": "delta", "by": "id"}
LATEST = {"max_rate": 5, "latest": True}


def delta(text: object, of: str = "m") -> str:
    return json.dumps({"id": of, "delta": str(text)})


async def stream(bench, channel: str, numbers: range, of: str = "m") -> None:
    """Each number as one delta, `N `."""
    for at in range(0, len(numbers), 500):
        await publish_all(
            bench.bus, bench.app, [(channel, "text", delta(f"{n} ", of), None) for n in numbers[at : at + 500]]
        )


async def end(bench, channel: str) -> None:
    """An event that can't be joined: everything before it is sent."""
    await bench.publish(channel, "end", "{}")


async def until_end(client) -> list[dict]:
    """The app's events before the next `end`."""
    events = []
    while (frame := await client.next())["event"] != "end":
        if not frame["event"].startswith("pusher"):
            events.append(frame)
    return events


def text(events: list[dict], of: str = "m") -> str:
    found = [json.loads(event["data"]) for event in events if event["event"] == "text"]
    return "".join(data["delta"] for data in found if data["id"] == of)


def numbers(count: int, first: int = 0) -> str:
    return "".join(f"{n} " for n in range(first, count))


def hold(worker, channel: str) -> None:
    """Let nothing be sent until an event passes: whatever the machine does, events wait."""
    for lane in (pacing(worker, channel).plain, pacing(worker, channel).recovering):
        lane.pacer.free_at = 1e9


def waiting_parts(worker, channel: str, lane: str = "plain") -> int:
    """How many published events wait for those who have all others."""
    return sum(joined.parts for joined in getattr(pacing(worker, channel), lane).pacer.joiner._waiting)


def pacing(worker, channel: str):
    return worker.registry.local_channel("1", channel).audience.readers.pacing


async def test_texts_are_joined_and_their_last_part_comes_although_nothing_follows(bench):
    worker = await bench.start()
    await bench.keep("chat-", **JOIN)
    client = await bench.client(worker)
    await client.subscribe("chat-a")
    await stream(bench, "chat-a", range(300))
    events = []
    while text(events) != numbers(300):
        events += await client.events(1)
    # The first one at once, and the others together.
    assert text(events[:1]) == "0 "
    assert len(events) < 100
    await stream(bench, "chat-a", range(300, 301))
    assert text(await client.events(1)) == "300 "


async def test_the_newest_value_is_sent_and_the_last_is_never_lost(bench):
    worker = await bench.start()
    # A rule that stores nothing.
    await bench.change(history=(HistoryRule(id="0a0b0c", name="price-", prefix=True, **LATEST),))
    client = await bench.client(worker)
    await client.subscribe("price-a")
    await bench.publish_numbers("price-a", range(500))
    received = []
    while not received or received[-1] != "499":
        received += [event["data"] for event in await client.events(1)]
    assert received[0] == "0"
    assert len(received) < 100
    assert sorted(received, key=int) == received


async def test_two_texts_at_once_and_an_event_between_keep_their_order(bench):
    worker = await bench.start()
    await bench.keep("chat-", **{**JOIN, "max_rate": 1})
    client, recovers = await bench.client(worker), await bench.client(worker, query="&recover=1")
    await client.subscribe("chat-a")
    await recovers.subscribe("chat-a")
    parts = [("chat-a", "text", delta(f"{n} ", "mn"[n % 2]), None) for n in range(100)]
    await publish_all(bench.bus, bench.app, [*parts, ("chat-a", "end", "{}", None)])
    for one in (client, recovers):
        events = await until_end(one)
        for at, of in enumerate("mn"):
            assert text(events, of) == "".join(f"{n} " for n in range(at, 100, 2))
        if one is recovers:
            offsets = [event["offset"] for event in events]
            assert offsets == sorted(set(offsets))
    assert worker.hub.pacing.passed == 1


async def test_a_subscriber_in_the_middle_gets_each_part_once(bench):
    """Newcomers, while events wait that the others haven't got: with a replay, without one, and with offsets."""
    worker = await bench.start()
    await bench.keep("chat-", replay=1, **{**JOIN, "max_rate": 1})
    first = await bench.client(worker)
    await first.subscribe("chat-a")
    clients = []
    for at in range(6):
        await stream(bench, "chat-a", range(at * 50, at * 50 + 50))
        # All of them, or all but the first, wait now for the first client.
        query = "&recover=1" if at % 2 else ""
        client = await bench.client(worker, query=query)
        await client.subscribe("chat-a")
        clients.append(client)
    await stream(bench, "chat-a", range(300, 350))
    await end(bench, "chat-a")
    assert text(await until_end(first)) == numbers(350)
    for client in clients:
        assert text(await until_end(client)) == numbers(350)


async def test_a_newcomer_without_replay_gets_only_what_follows(bench):
    worker = await bench.start()
    await bench.change(history=(HistoryRule(id="0a0b0c", name="chat-", prefix=True, **{**JOIN, "max_rate": 1}),))
    first = await bench.client(worker)
    await first.subscribe("chat-a")
    hold(worker, "chat-a")
    await stream(bench, "chat-a", range(50))
    await bench.settled(worker, lambda: waiting_parts(worker, "chat-a") == 50)
    later = await bench.client(worker)
    await later.subscribe("chat-a")
    gone = await bench.client(worker)
    await gone.subscribe("chat-a")
    await gone.socket.close()
    await stream(bench, "chat-a", range(50, 90))
    await end(bench, "chat-a")
    assert text(await until_end(first)) == numbers(90)
    assert text(await until_end(later)) == numbers(90, 50)


async def test_a_replay_is_one_event_with_the_offset_of_its_last_part(bench):
    worker = await bench.start()
    await bench.keep("chat-", replay=1, **JOIN)
    await stream(bench, "chat-a", range(1000))
    for query in ("", "&recover=1"):
        client = await bench.client(worker, query=query)
        success = await client.subscribe("chat-a")
        (event,) = await client.events(1)
        assert text([event]) == numbers(1000)
        if query:
            position = json.loads(success["data"])
            assert event["offset"] > position["offset"]
            again = await bench.client(worker, query=query)
            since = {"epoch": position["epoch"], "offset": event["offset"]}
            assert json.loads((await again.subscribe("chat-a", since=since))["data"])["recovered"]
            await again.nothing_more()
        await client.nothing_more()
    # The history stores each part.
    await client.send("pusher:history", {"channel": "chat-a", "limit": 1000})
    stored = json.loads((await client.until("pusher:history"))["data"])["messages"]
    assert len(stored) == 1000


async def test_limits_of_replays_count_after_joining(bench):
    worker = await bench.start()
    await bench.keep("chat-", replay=2, **JOIN)
    await stream(bench, "chat-a", range(100), "a")
    # b and c are written at the same time.
    parts = [("chat-a", "text", delta(f"{n} ", "bc"[n % 2]), None) for n in range(200)]
    await publish_all(bench.bus, bench.app, parts)
    client = await bench.client(worker)
    await client.subscribe("chat-a")
    events = await client.events(2)
    assert [text(events, of).split()[:2] for of in "bc"] == [["0", "2"], ["1", "3"]]
    await client.nothing_more()
    rewinds = await bench.client(worker)
    await rewinds.subscribe("chat-a", rewind={"count": 1})
    (event,) = await rewinds.events(1)
    assert text([event], "c") == "".join(f"{n} " for n in range(1, 200, 2))
    await rewinds.nothing_more()
    everything = await bench.client(worker)
    await everything.subscribe("chat-a", rewind={"count": 900})
    assert text(await everything.events(3), "a") == numbers(100)
    await everything.nothing_more()


async def test_a_joined_event_has_at_most_max_data_bytes(bench):
    worker = await bench.start()
    await bench.keep("chat-", replay=1, **{**JOIN, "keep": 3000})
    await bench.change(max_data_bytes=1000)
    live = await bench.client(worker)
    await live.subscribe("chat-a")
    await stream(bench, "chat-a", range(2000))
    await end(bench, "chat-a")
    events = await until_end(live)
    assert text(events) == numbers(2000)
    client = await bench.client(worker)
    await client.subscribe("chat-a", rewind={"count": 2})
    replayed = await until_end(client)
    assert text(replayed) == numbers(2000)
    assert len(replayed) <= len(numbers(2000)) // 900 + 1
    assert max(len(event["data"]) for event in events + replayed) <= 1000


async def test_a_cut_client_continues_where_it_was(bench):
    """Recovery at any offset that a client has seen: neither a gap nor anything twice."""
    worker = await bench.start()
    await bench.keep("chat-", **{**JOIN, "max_rate": 50})
    client = await bench.client(worker, query="&recover=1")
    position = json.loads((await client.subscribe("chat-a"))["data"])
    publishing = asyncio.ensure_future(_publish_slowly(bench, 600))
    events: list[dict] = []
    while True:
        frame = (await client.events(1))[0]
        if frame["event"] == "end":
            break
        events.append(frame)
        if len(events) % 3 == 0:
            await client.socket.close()
            client = await bench.client(worker, query="&recover=1")
            since = {"epoch": position["epoch"], "offset": frame["offset"]}
            success = await client.subscribe("chat-a", since=since)
            assert json.loads(success["data"])["recovered"]
    await publishing
    assert [text(events, of) for of in "mn"] == [_every(600, 0), _every(600, 1)]


async def _publish_slowly(bench, count: int) -> None:
    for n in range(count):
        # In runs of three, so that neighbours can be joined.
        await bench.publish("chat-a", "text", delta(f"{n} ", "mn"[n // 3 % 2]))
    await end(bench, "chat-a")


def _every(count: int, which: int) -> str:
    return "".join(f"{n} " for n in range(count) if n // 3 % 2 == which)


async def _slow(bench, worker, channel: str, query: str = "", **more):
    """A client whose socket holds little and that doesn't read until it is asked to."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", worker.port))
    client = await bench.client(worker, query=query, sock=raw, max_queue=1, **more)
    # A closing handshake would wait for what it hasn't read.
    bench.stack.callback(client.socket.transport.abort)
    await client.subscribe(channel)
    return client


async def _fill(bench, worker, channel: str, event: str = "filler") -> None:
    """Publish until a subscriber's kernel is full."""
    before = worker.hub.pacing.lagged
    async with asyncio.timeout(60):
        while worker.hub.pacing.lagged == before:
            await bench.publish(channel, event, "x" * 10_000)
            await bench.publish(channel, event, "x" * 10_000)
            await asyncio.sleep(0)


async def test_a_slow_reader_gets_the_whole_text_in_fewer_frames(bench):
    worker = await bench.start(max_unsent_bytes=262_144)
    await bench.keep("chat-", **{**JOIN, "max_rate": 100})
    for query in ("", "&recover=1"):
        slow, fast = await _slow(bench, worker, "chat-a", query), await bench.client(worker, query=query)
        await fast.subscribe("chat-a")
        reading = asyncio.ensure_future(until_end(fast))
        await _fill(bench, worker, "chat-a")
        # Much more than may be unsent, but the text alone is less.
        for first in range(0, 6000, 500):
            await stream(bench, "chat-a", range(first, first + 500))
        await end(bench, "chat-a")
        assert text(await reading) == numbers(6000)
        events = await until_end(slow)
        assert text(events) == numbers(6000)
        assert sum(event["event"] == "text" for event in events) < 100
        # It hears live events as the others do.
        await end(bench, "chat-a")
        assert await until_end(slow) == await until_end(fast) == []
        assert pacing(worker, "chat-a").plain.due is None
        await slow.socket.close()
        await fast.socket.close()
        await bench.settled(worker, lambda: not worker.hub.registry.local_channel("1", "chat-a"))
    assert worker.flushing.flusher.overruns == 0


async def test_a_slow_reader_of_the_newest_values_misses_what_was_replaced(bench):
    worker = await bench.start(max_unsent_bytes=262_144)
    await bench.keep("price-", **{**LATEST, "max_rate": 1000})
    slow = await _slow(bench, worker, "price-a")
    await _fill(bench, worker, "price-a")
    for at in range(200):
        await bench.publish("price-a", "n", str(at) + " " * 5000)
    await bench.publish("price-a", "end", "{}")
    events = await until_end(slow)
    values = [int(event["data"]) for event in events if event["event"] == "n"]
    assert values[-1] == 199
    assert values == sorted(values)
    assert len(values) < 100


async def test_what_waits_for_a_slow_reader_is_bounded(bench):
    worker = await bench.start(max_unsent_bytes=262_144)
    await bench.keep("chat-", **{**JOIN, "max_rate": 1000})
    slow = await _slow(bench, worker, "chat-a")
    await _fill(bench, worker, "chat-a")
    async with asyncio.timeout(60):
        while worker.flushing.flusher.overruns == 0:
            await bench.publish("chat-a", "text", delta("x" * 9_000))
    with_code = None
    while with_code is None:
        try:
            await slow.next()
        except websockets.ConnectionClosed as closed:
            with_code = closed.rcvd.code
    assert with_code == 4100
    await bench.settled(worker, lambda: not worker.hub.registry.local_channel("1", "chat-a"))


async def test_what_waits_in_several_channels_counts_together(bench):
    worker = await bench.start(max_unsent_bytes=131_072)
    await bench.keep("chat-", **{**JOIN, "max_rate": 1000})
    slow = await _slow(bench, worker, "chat-0")
    channels = [f"chat-{n}" for n in range(8)]
    for channel in channels[1:]:
        await slow.subscribe(channel)
    # The kernel is full for all channels.
    await _fill(bench, worker, "chat-0")
    sent = 0
    async with asyncio.timeout(60):
        while worker.flushing.flusher.overruns == 0:
            for channel in channels:
                await bench.publish(channel, "text", delta("x" * 2_000))
            sent += 2_000
    # Much less than the limit in each of them.
    assert sent < 60_000
    await bench.settled(worker, lambda: not len(worker.hub.open_connections))
    assert not worker.hub.pacing._held


async def test_many_newcomers_at_different_moments_are_bounded(bench):
    worker = await bench.start()
    await bench.keep("chat-", **JOIN)
    first = await bench.client(worker)
    await first.subscribe("chat-a")
    hold(worker, "chat-a")
    local_channel = worker.registry.local_channel("1", "chat-a")
    clients = []
    for n in range(70):
        last = local_channel.history.last
        await stream(bench, "chat-a", range(n, n + 1))
        await bench.settled(worker, lambda last=last: local_channel.history.last > last)
        clients.append(await bench.client(worker))
        await clients[-1].subscribe("chat-a")
        assert len(pacing(worker, "chat-a").plain._newcomers) <= 64
    await end(bench, "chat-a")
    assert text(await until_end(first)) == numbers(70)
    for n, client in enumerate(clients):
        assert text(await until_end(client)) == numbers(70, n + 1)


async def test_a_changed_rule_sends_what_waits(bench):
    worker = await bench.start()
    await bench.keep("chat-", **{**JOIN, "max_rate": 1})
    client = await bench.client(worker)
    await client.subscribe("chat-a")
    hold(worker, "chat-a")
    await stream(bench, "chat-a", range(40))
    await bench.settled(worker, lambda: waiting_parts(worker, "chat-a") == 40)
    later = await bench.client(worker)
    await later.subscribe("chat-a")
    # Without a rate each part is an event of its own.
    await bench.keep("chat-")
    await bench.settled(worker, lambda: worker.registry.local_channel("1", "chat-a").audience.readers is None)
    await stream(bench, "chat-a", range(40, 50))
    assert len(await later.events(10)) == 10
    await bench.keep("chat-", **LATEST)
    await end(bench, "chat-a")
    assert text(await until_end(client)) == numbers(50)


async def test_a_cleared_history_comes_after_what_was_before_it(bench):
    worker = await bench.start()
    await bench.keep("chat-", **{**JOIN, "max_rate": 1})
    client = await bench.client(worker, query="&recover=1")
    await client.subscribe("chat-a")
    hold(worker, "chat-a")
    await stream(bench, "chat-a", range(40))
    await worker.registry.history.clear("1", "chat-a")
    await stream(bench, "chat-a", range(40, 41))
    await end(bench, "chat-a")
    await until_end(client)
    names = [frame["event"] for frame in client.seen]
    before = client.seen[: names.index("pusher:position")]
    assert text(before) == numbers(40)
    assert text(client.seen) == numbers(41)


async def test_a_second_subscribe_is_answered_after_all_events_before_it(bench):
    worker = await bench.start()
    await bench.keep("chat-", **{**JOIN, "max_rate": 1})
    client = await bench.client(worker, query="&recover=1")
    await client.subscribe("chat-a")
    hold(worker, "chat-a")
    await stream(bench, "chat-a", range(40))
    await bench.settled(worker, lambda: waiting_parts(worker, "chat-a", "recovering") == 40)
    success = json.loads((await client.subscribe("chat-a"))["data"])
    assert text(client.seen) == numbers(40)
    assert success["offset"] == [frame for frame in client.seen if frame["event"] == "text"][-1]["offset"]


async def test_the_publisher_is_left_out_and_members_are_told_at_once(bench):
    worker = await bench.start()
    await bench.keep("presence-", **{**JOIN, "max_rate": 1})
    client, other = await bench.client(worker), await bench.client(worker)
    await client.subscribe("presence-a", {"user_id": "1"})
    await other.subscribe("presence-a", {"user_id": "2"})
    parts = [("presence-a", "text", delta(f"{n} "), client.socket_id if n % 2 else None) for n in range(20)]
    await publish_all(bench.bus, bench.app, [*parts, ("presence-a", "end", "{}", None)])
    mine, others = await until_end(client), await until_end(other)
    assert text(mine) == "".join(f"{n} " for n in range(0, 20, 2))
    assert sorted(text(others).split(), key=int) == numbers(20).split()


async def test_user_resume_brings_what_waited(bench):
    worker = await bench.start()
    await bench.keep("private-", **{**JOIN, "max_rate": 1})
    await bench.change(user_resume_s=60)
    client = await bench.client(worker)
    await client.sign_in("u")
    await client.subscribe("private-a")
    # The replay that user resume may need is over.
    await bench.settled(worker, lambda: len(worker.registry.local_channel("1", "private-a").audience) == 1)
    hold(worker, "private-a")
    await stream(bench, "private-a", range(40))
    await bench.settled(worker, lambda: waiting_parts(worker, "private-a") == 40)
    await client.socket.close()
    # Redis has when the user was there last.
    await bench.settled(worker, lambda: not len(worker.hub.open_connections) and not worker.hub.user_resume._tasks)
    back = await bench.client(worker)
    await back.sign_in("u")
    await back.subscribe("private-a")
    await end(bench, "private-a")
    # At least once.
    assert set(text(await until_end(back)).split()) == set(numbers(40).split())


async def test_channels_without_a_rate_have_nothing_of_it(bench):
    worker = await bench.start()
    await bench.keep("chat-", **JOIN)
    client = await bench.client(worker)
    await client.subscribe("news")
    assert worker.registry.local_channel("1", "news").audience.readers is None
    assert msgspec.structs.asdict(bench.app.history[0])["max_rate"] == 5
