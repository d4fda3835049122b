"""In what order deliveries of one endpoint may go."""

import random

from redpoll.control.webhooks.ordering import ReadyDeliveries
from redpoll.store.deliveries import Waiting


class Items:
    """Makes deliveries, numbered from 1."""

    def __init__(self):
        self.number = 0

    def __call__(self, event, channel="c", user=None):
        self.number += 1
        return Waiting(self.number, str(self.number), "e", event, channel, user, b"", 0, 0)


def ready_of(*items):
    line = ReadyDeliveries()
    for item in items:
        line.add(item)
    return line


def take_all(line):
    taken = []
    while (item := line.take()) is not None:
        taken.append(item)
    return taken


def test_a_member_who_comes_waits_for_the_channel_to_be_occupied():
    new = Items()
    occupied, ann, bob = new("channel.occupied"), new("member.added", user="a"), new("member.added", user="b")
    line = ready_of(occupied, ann, bob)
    assert take_all(line) == [occupied]
    line.done(occupied)
    assert take_all(line) == [ann, bob]
    assert len(line) == 0


def test_a_channel_is_vacated_when_everything_before_has_arrived():
    new = Items()
    gone, event, vacated, occupied = (
        new("member.removed", user="a"),
        new("client_event"),
        new("channel.vacated"),
        new("channel.occupied"),
    )
    line = ready_of(gone, event, vacated, occupied)
    assert take_all(line) == [gone, event]
    line.done(gone)
    assert take_all(line) == []
    line.done(event)
    assert take_all(line) == [vacated]
    line.done(vacated)
    assert take_all(line) == [occupied]


def test_one_members_comings_and_goings_wait_for_each_other():
    new = Items()
    came, other, went = new("member.added", user="a"), new("member.added", user="b"), new("member.removed", user="a")
    line = ready_of(came, other, went)
    assert take_all(line) == [came, other]
    line.done(other)
    assert take_all(line) == []
    line.done(came)
    assert take_all(line) == [went]


def test_channels_do_not_wait_for_each_other_and_take_turns():
    new = Items()
    items = [new("client_event", channel) for channel in ("a", "a", "a", "b", "c")]
    assert [item.channel for item in take_all(ready_of(*items))] == ["a", "b", "c", "a", "a"]


def test_client_events_do_not_wait_for_each_other():
    new = Items()
    items = [new("client_event", user="a") for _ in range(5)]
    assert take_all(ready_of(*items)) == items


def test_a_line_that_is_cleared_gives_back_what_stood_there_and_goes_on_with_the_rest():
    new = Items()
    under_way, waits, other = new("channel.occupied"), new("channel.vacated"), new("channel.occupied", "d")
    line = ready_of(under_way, waits)
    assert line.take() == under_way
    line.add(other)
    assert line.clear() == [waits, other]
    assert len(line) == 0
    assert take_all(line) == []
    line.add(waits)
    assert take_all(line) == []
    line.done(under_way)
    assert take_all(line) == [waits]


def test_at_random_nothing_is_lost_or_overtaken():
    chance = random.Random(7)
    new, line = Items(), ReadyDeliveries()
    added, under_way, ended = [], [], []
    kinds = ("channel.occupied", "channel.vacated", "member.added", "member.removed", "client_event", "cache.miss")
    for _ in range(4_000):
        what = chance.random()
        if what < 0.4:
            event = chance.choice(kinds)
            user = chance.choice("xyz") if event.startswith("member") else None
            added.append(new(event, chance.choice("ab"), user))
            line.add(added[-1])
        elif what < 0.7 and (item := line.take()) is not None:
            for other in under_way:
                if other.channel == item.channel:
                    assert not {item.event, other.event} & {"channel.occupied", "channel.vacated"}
                    assert item.user is None or item.user != other.user
            under_way.append(item)
        elif under_way:
            ended.append(under_way.pop(chance.randrange(len(under_way))))
            line.done(ended[-1])
    while under_way or len(line):
        if (item := line.take()) is not None:
            under_way.append(item)
        else:
            ended.append(under_way.pop())
            line.done(ended[-1])
    assert sorted(ended) == sorted(added)
    for channel in "ab":
        for user in "xyz":
            of_user = [item.number for item in ended if (item.channel, item.user) == (channel, user)]
            assert of_user == sorted(of_user)
