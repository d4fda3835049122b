"""A channel's history over HTTP: pages in both directions, bounds, and errors for unknown positions."""

import asyncio
import time

import pytest

from redpoll.config.settings import Settings
from redpoll.control.commands import commands
from redpoll.control.commands.context import Context
from redpoll.ipc.command_socket import CommandError
from redpoll.protocol.apps import HistoryRule

HISTORY = "/apps/3/channels/{}/history"


@pytest.fixture
async def keeping(plane):
    """The plane. Its app 3 keeps ten messages of every channel except `nothing`."""
    await plane.records.add_history_rule("3", HistoryRule(id="", name="", prefix=True, keep=10, seconds=60))
    await plane.records.add_history_rule("3", HistoryRule(id="", name="nothing"))
    return plane


async def publish(plane, *numbers, channel="news"):
    for number in numbers:
        reply = await plane.trigger(channels=[channel], name=f"e{number}", data=str(number))
        assert reply.status == 200


async def ask(plane, channel="news", **params):
    """The body of a GET, which must succeed."""
    reply = await plane.call("GET", HISTORY.format(channel), params=params)
    assert reply.status == 200, reply.body
    answer = reply.json()
    assert list(answer) == ["epoch", "messages", "next"]
    return answer


def numbers(answer) -> list[int]:
    return [int(message["data"]) for message in answer["messages"]]


async def fault(plane, **params) -> tuple[int, str]:
    reply = await plane.call("GET", HISTORY.format("news"), params=params)
    return reply.status, reply.json().get("code")


async def test_messages_are_oldest_first_with_offset_and_time(keeping):
    before_ms = int(time.time() * 1000)
    await publish(keeping, 1, 2, 3)
    answer = await ask(keeping)
    assert numbers(answer) == [1, 2, 3]
    assert answer["next"] is None
    assert answer["epoch"]
    for message in answer["messages"]:
        assert list(message) == ["offset", "event", "data", "time_ms"]
        assert message["event"] == f"e{message['data']}"
        assert before_ms - 1000 < message["time_ms"] < before_ms + 60_000
    offsets = [message["offset"] for message in answer["messages"]]
    assert offsets == sorted(set(offsets))


async def test_history_keeps_as_many_messages_as_the_rule_allows(keeping):
    await publish(keeping, *range(12))
    assert numbers(await ask(keeping)) == list(range(2, 12))
    await publish(keeping, 1, channel="nothing")
    assert await ask(keeping, "nothing") == {"epoch": "", "messages": [], "next": None}


async def test_pages_without_bounds_go_from_newest_to_oldest(keeping):
    await publish(keeping, *range(7))
    pages, cursor = [], {}
    while cursor is not None:
        answer = await ask(keeping, limit="3", **cursor)
        pages.append(numbers(answer))
        cursor = {"cursor": answer["next"]} if answer["next"] else None
    assert pages == [[4, 5, 6], [1, 2, 3], [0]]


@pytest.mark.parametrize("word", ["backwards", "newest_first"])
async def test_backwards_lists_the_newest_first(keeping, word):
    await publish(keeping, *range(5))
    first = await ask(keeping, limit="3", direction=word)
    assert numbers(first) == [4, 3, 2]
    assert numbers(await ask(keeping, limit="3", direction=word, cursor=first["next"])) == [1, 0]
    assert numbers(await ask(keeping, limit="3", direction="forwards")) == [2, 3, 4]


async def test_pages_after_a_position_go_to_the_newest(keeping):
    await publish(keeping, *range(7))
    everything = await ask(keeping)
    place = f"{everything['epoch']}:{everything['messages'][1]['offset']}"
    first = await ask(keeping, since=place, limit="3")
    assert numbers(first) == [2, 3, 4]
    # The cursor continues in the same direction, with or without the first request's parameters.
    for more in ({}, {"since": place}):
        second = await ask(keeping, limit="3", cursor=first["next"], **more)
        assert (numbers(second), second["next"]) == ([5, 6], None)
    assert numbers(await ask(keeping, since=place, limit="3", direction="backwards")) == [6, 5, 4]
    last = f"{everything['epoch']}:{everything['messages'][-1]['offset']}"
    assert await ask(keeping, since=last) == {"epoch": everything["epoch"], "messages": [], "next": None}


async def test_pages_up_to_a_position_and_between_two_positions(keeping):
    await publish(keeping, *range(7))
    everything = await ask(keeping)
    places = [f"{everything['epoch']}:{message['offset']}" for message in everything["messages"]]
    assert numbers(await ask(keeping, until=places[4])) == [0, 1, 2, 3, 4]
    newest = await ask(keeping, until=places[4], limit="2")
    assert numbers(newest) == [3, 4]
    assert numbers(await ask(keeping, until=places[4], limit="2", cursor=newest["next"])) == [1, 2]
    assert numbers(await ask(keeping, since=places[1], until=places[4])) == [2, 3, 4]
    assert numbers(await ask(keeping, since=places[4], until=places[1])) == []


async def test_bounds_in_ms_are_inclusive(keeping):
    for number in range(3):
        await publish(keeping, number)
        # Gives each message its own millisecond.
        begin = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 - begin < 2:
            await asyncio.sleep(0)
    times = [str(message["time_ms"]) for message in (await ask(keeping))["messages"]]
    assert numbers(await ask(keeping, since=times[1])) == [1, 2]
    assert numbers(await ask(keeping, until=times[1])) == [0, 1]
    assert numbers(await ask(keeping, since=times[1], until=times[1])) == [1]
    assert numbers(await ask(keeping, since="0")) == [0, 1, 2]
    assert numbers(await ask(keeping, since="9000000000000")) == []


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "999999999999", "x", "1.5", "", "١"])
async def test_limit_outside_1_to_1000_is_refused(keeping, limit):
    assert await fault(keeping, limit=limit) == (400, "bad_request")


async def test_invalid_parameters_are_refused(keeping):
    assert await fault(keeping, direction="up") == (400, "bad_request")
    for name in ("since", "until"):
        for text in ("-1", "soon", "1e3", "99999999999999999999", ""):
            assert await fault(keeping, **{name: text}) == (400, "bad_request")
        for text in ("e:-1", "e:x", ":1", "e:99999999999999999999", "e:"):
            assert await fault(keeping, **{name: text}) == (400, "invalid_offset")
    for cursor in ("x", "e:1:older", "e:-1", "", ":newer"):
        assert await fault(keeping, cursor=cursor) == (400, "invalid_cursor")


async def test_epoch_of_another_history_is_refused(keeping):
    # The channel has no epoch yet.
    assert await fault(keeping, since="abc:5") == (400, "unknown_epoch")
    await publish(keeping, 1)
    for name in ("since", "until", "cursor"):
        assert await fault(keeping, **{name: "abc:5"}) == (400, "unknown_epoch")


async def test_offset_beyond_the_newest_is_refused(keeping):
    await publish(keeping, 1)
    answer = await ask(keeping)
    ahead = f"{answer['epoch']}:{answer['messages'][0]['offset'] + 1}"
    for name in ("since", "until", "cursor"):
        assert await fault(keeping, **{name: ahead}) == (400, "invalid_offset")


async def test_cleared_history_has_a_new_epoch_and_refuses_old_cursors(keeping):
    await publish(keeping, *range(4))
    before = await ask(keeping, limit="2")
    reply = await keeping.call("DELETE", HISTORY.format("news"))
    assert reply.status == 200
    epoch = reply.json()["epoch"]
    assert epoch not in ("", before["epoch"])
    assert await ask(keeping) == {"epoch": epoch, "messages": [], "next": None}
    assert await fault(keeping, cursor=before["next"]) == (400, "unknown_epoch")
    assert await fault(keeping, since=f"{before['epoch']}:1") == (400, "unknown_epoch")
    await publish(keeping, 9)
    assert (await ask(keeping))["epoch"] == epoch
    assert numbers(await ask(keeping)) == [9]


async def test_clearing_an_empty_history_succeeds(keeping):
    assert (await keeping.call("DELETE", HISTORY.format("never"))).json() == {"epoch": ""}


async def test_invalid_channel_name_is_refused(keeping):
    for method in ("GET", "DELETE"):
        reply = await keeping.call(method, HISTORY.format("a%20b"))
        assert (reply.status, reply.json()["code"]) == (400, "invalid_channel")


async def test_histories_of_apps_are_separate(keeping):
    await publish(keeping, 1)
    other = {"key": "1111111111111111aaaa", "secret": "2222222222222222bbbb"}
    reply = await keeping.call("GET", "/apps/4/channels/news/history", **other)
    assert reply.json() == {"epoch": "", "messages": [], "next": None}
    assert (await keeping.call("DELETE", "/apps/4/channels/news/history", **other)).json() == {"epoch": ""}
    assert numbers(await ask(keeping)) == [1]


async def test_page_is_limited_in_bytes_and_has_a_cursor(keeping, monkeypatch):
    monkeypatch.setattr("redpoll.control.api.history._MAX_BYTES", 20_000)
    for number in range(6):
        reply = await keeping.trigger(channels=["news"], name="e", data=f"{number:>9000}")
        assert reply.status == 200
    found, cursor = [], {}
    while cursor is not None:
        answer = await ask(keeping, **cursor)
        assert 0 < len(answer["messages"]) <= 4
        found = numbers(answer) + found
        cursor = {"cursor": answer["next"]} if answer["next"] else None
    assert found == list(range(6))


async def test_history_without_redis_is_503(make_plane, tmp_path):
    plane = await make_plane(f"unix://{tmp_path}/nowhere.sock", ready=False)
    assert await fault(plane) == (503, "unavailable")


async def test_commands_return_the_same_history_as_http(keeping):
    store = keeping.plane.dashboard.accounts.store
    context = Context(store, keeping.records, Settings(), cluster=keeping.plane.cluster)
    await publish(keeping, *range(3))
    args = {"app": "3", "channel": "news"}
    shown = await commands.run(context, "history show", {**args, "query": {"limit": "2", "direction": "backwards"}})
    assert shown == await ask(keeping, limit="2", direction="backwards")
    with pytest.raises(CommandError, match="limit must be a number from 1 to 1000, not '0'"):
        await commands.run(context, "history show", {**args, "query": {"limit": "0"}})
    cleared = await commands.run(context, "history clear", args)
    assert cleared["epoch"] == (await ask(keeping))["epoch"] != shown["epoch"]
