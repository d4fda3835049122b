"""The table of held channels."""

import asyncio

import pytest

from redpoll.cluster.membership.hold_call import CHANNEL, CONNECTIONS, PRESENCE, SIGNED_IN, TOPIC
from redpoll.cluster.membership.local_channels import LocalChannels
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
