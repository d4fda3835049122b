"""What is held, and under which names it is found."""

import asyncio

import pytest

from redpoll.cluster.membership.hold_call import CHANNEL, CONNECTIONS, PRESENCE, SIGNED_IN, TOPIC
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.protocol.channels import CONSOLE


class Told:
    """The two words of a listener that are said here."""

    def __init__(self) -> None:
        self.opened_channels = []
        self.dropped_channels = []

    def opened(self, local_channel):
        self.opened_channels.append(local_channel.channel)

    def dropped(self, local_channel):
        self.dropped_channels.append(local_channel.channel)


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def holdings(keys, told):
    return LocalChannels(keys, told)


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
def test_name_of_a_channel_says_its_kind(holdings, channel, kind):
    assert holdings.channel("1", channel).kind == kind


def test_channel_is_opened_once_and_found_by_name_and_topic(holdings, told):
    local_channel = holdings.channel("1", "news")
    assert holdings.channel("1", "news") is local_channel
    assert holdings.hold("1", "news", CHANNEL) is local_channel
    assert holdings.channel("2", "news") is not local_channel
    assert holdings.by_name["1", "news"] is holdings.by_topic[local_channel.topic] is local_channel
    assert told.opened_channels == ["news", "news"]


def test_pseudo_channel_has_no_topic_and_no_listener_hears_of_it(holdings, told):
    for pseudo, kind in (("%u:7", SIGNED_IN), ("%conn", CONNECTIONS)):
        local_channel = holdings.hold("1", pseudo, kind)
        assert holdings.by_name["1", pseudo] is local_channel
        holdings.drop(local_channel)
    assert (told.opened_channels, told.dropped_channels) == ([], [])
    assert (holdings.by_name, holdings.by_topic) == ({}, {})


def test_what_was_dropped_is_opened_anew(holdings, told):
    local_channel = holdings.channel("1", "news")
    holdings.drop(local_channel)
    assert local_channel.dropped
    assert told.dropped_channels == ["news"]
    assert holdings.channel("1", "news") is not local_channel


async def test_waiting_ends_with_the_last_that_is_dropped(holdings):
    first, second = holdings.channel("1", "a"), holdings.hold("1", "%conn", CONNECTIONS)
    waiting = asyncio.create_task(holdings.wait_empty())
    for local_channel in (first, second):
        await asyncio.sleep(0)
        assert not waiting.done()
        holdings.drop(local_channel)
    async with asyncio.timeout(1):
        await waiting
        # And at once, where nothing is held.
        await holdings.wait_empty()
