"""The table of held channels; and each channel is in one stage and in one queue."""

import asyncio
import random

import pytest

from redpoll.cluster.membership.hold_call import CHANNEL, CONNECTIONS, PRESENCE, SIGNED_IN, TOPIC, Flag
from redpoll.cluster.membership.join import Join, Stage
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.local_channels import Agenda, LocalChannels
from redpoll.protocol.apps import App
from redpoll.protocol.channels import CONSOLE


class Events:
    """Records the two events that the table reports."""

    def __init__(self) -> None:
        self.opened_channels = []
        self.dropped_channels = []

    def opened(self, local_channel):
        self.opened_channels.append(local_channel.channel)

    def dropped(self, local_channel):
        self.dropped_channels.append(local_channel.channel)


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def channels(keys, events):
    return LocalChannels(keys, events, lambda _: None)


@pytest.mark.parametrize(
    ("channel", "kind"),
    [
        ("news", CHANNEL),
        ("private-cache-x", CHANNEL),
        ("presence-room", PRESENCE),
        ("#server-to-user-7", TOPIC),
        (CONSOLE, TOPIC),
    ],
)
def test_name_of_a_channel_gives_its_kind(channels, channel, kind):
    assert channels.channel("1", channel).kind == kind


def test_channel_is_opened_once_and_found_by_name_and_topic(channels, events):
    local_channel = channels.channel("1", "news")
    assert channels.channel("1", "news") is local_channel
    assert channels.hold("1", "news", CHANNEL) is local_channel
    assert channels.channel("2", "news") is not local_channel
    assert channels.by_name["1", "news"] is channels.by_topic[local_channel.topic] is local_channel
    assert events.opened_channels == ["news", "news"]


def test_pseudo_channel_has_no_topic_and_raises_no_event(channels, events):
    for pseudo, kind in (("%u:7", SIGNED_IN), ("%conn", CONNECTIONS)):
        local_channel = channels.hold("1", pseudo, kind)
        assert channels.by_name["1", pseudo] is local_channel
        channels.drop(local_channel)
    assert (events.opened_channels, events.dropped_channels) == ([], [])
    assert not channels.by_name
    assert not channels.by_topic


def test_dropped_channel_is_opened_as_a_new_one(channels, events):
    local_channel = channels.channel("1", "news")
    channels.drop(local_channel)
    assert events.dropped_channels == ["news"]
    assert channels.channel("1", "news") is not local_channel


async def test_waiting_ends_with_the_last_that_is_dropped(channels):
    first, second = channels.channel("1", "a"), channels.hold("1", "%conn", CONNECTIONS)
    waiting = asyncio.create_task(channels.wait_empty())
    for local_channel in (first, second):
        await asyncio.sleep(0)
        assert not waiting.done()
        channels.drop(local_channel)
    async with asyncio.timeout(60):
        await waiting
        # It ends at once if nothing is held.
        await channels.wait_empty()


# -- what is due

QUEUED = [stage for stage in Stage if Stage.CLEAN < stage < Stage.SENDING]


def room(name: str, joins: int = 0) -> LocalChannel:
    local_channel = LocalChannel("7", name, PRESENCE, name.encode())
    for _ in range(joins):
        local_channel.queue(Join(None, App(id="7", name="test", keys=()), name, "u"))
    return local_channel


def queues_with(agenda, local_channel):
    return [stage for stage in Stage if (queue := agenda._queues[stage]) is not None and local_channel in queue]


def test_wherever_it_goes_a_channel_is_in_the_queue_of_its_stage_alone():
    chance, agenda = random.Random(1), Agenda()
    channels = [room(f"presence-{n}", joins=n % 2) for n in range(6)]
    for _ in range(2_000):
        local_channel = chance.choice(channels)
        step = chance.choice(("move", "joins", "change", "forget", "back"))
        if step == "move":
            agenda.move(local_channel, chance.choice(list(Stage)[:-1]))
        elif step == "joins" and not local_channel.busy:
            agenda.queue_joins(local_channel)
        elif step == "change" and not local_channel.busy:
            agenda.queue_change(local_channel)
        elif step == "forget":
            agenda.forget(local_channel)
        elif step == "back":
            agenda.shards_are_back()
            assert not agenda.lost
        for one in channels:
            assert queues_with(agenda, one) == ([one.stage] if one.stage in QUEUED else [])


def test_a_channel_keeps_its_turn_when_more_joins_come():
    agenda = Agenda()
    first, second = room("presence-1", joins=1), room("presence-2", joins=1)
    for one in (first, second, first):
        agenda.queue_joins(one)
    assert [agenda.take(agenda.subscribing) for _ in range(2)] == [first, second]
    agenda.move(first, Stage.ROSTER_FOR_JOINS)
    agenda.queue_joins(first)
    assert first.stage is Stage.ROSTER_FOR_JOINS


def test_a_channel_that_waits_to_read_its_roster_keeps_its_turn_when_it_changes():
    agenda, waits, dirty = Agenda(), room("presence-1"), room("presence-2")
    agenda.move(waits, Stage.ROSTER)
    for one in (waits, dirty):
        agenda.queue_change(one)
    assert (waits.stage, dirty.stage) == (Stage.ROSTER, Stage.DIRTY)


def test_big_replies_are_awaited_by_turns_those_with_joins_first():
    agenda = Agenda()
    held, joined = room("presence-held"), room("presence-joined", joins=1)
    held.members.recheck = True
    assert not agenda.wait_for_reply(held)
    agenda.awaited[Flag.ROSTER] = 32
    assert agenda.wait_for_reply(held)
    assert agenda.wait_for_reply(joined)
    assert agenda.next_for_reply(Flag.ROSTER) is None
    agenda.awaited[Flag.ROSTER] = 31
    assert [agenda.next_for_reply(Flag.ROSTER) for _ in range(3)] == [joined, held, None]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Stage.LOST, Stage.LOST),
        (Stage.CALLING, Stage.SUBSCRIBING),
        (Stage.CACHED_FOR_JOINS, Stage.SUBSCRIBING),
        (Stage.DIRTY, Stage.CLEAN),
        (Stage.ROSTER, Stage.CLEAN),
        (Stage.SCAN, Stage.SCAN),
        (Stage.DROPPED, Stage.DROPPED),
    ],
)
def test_when_a_shard_is_lost_only_joins_stay_queued(before, after):
    agenda, local_channel = Agenda(), room("presence-1")
    agenda.move(local_channel, before)
    agenda.forget(local_channel)
    assert local_channel.stage is after
