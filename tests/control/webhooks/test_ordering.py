"""The order in which the deliveries of one endpoint may be sent."""

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
    ready = ReadyDeliveries()
    for item in items:
        ready.add(item)
    return ready


def take_all(ready):
    taken = []
    while (item := ready.take()) is not None:
        taken.append(item)
    return taken


def test_member_added_waits_for_channel_occupied():
    new = Items()
    occupied, ann, bob = new("channel.occupied"), new("member.added", user="a"), new("member.added", user="b")
    ready = ready_of(occupied, ann, bob)
    assert take_all(ready) == [occupied]
    ready.done(occupied)
    assert take_all(ready) == [ann, bob]
    assert len(ready) == 0


def test_channel_vacated_waits_for_all_earlier_deliveries_of_the_channel():
    new = Items()
    removed, event, vacated, occupied = (
        new("member.removed", user="a"),
        new("client_event"),
        new("channel.vacated"),
        new("channel.occupied"),
    )
    ready = ready_of(removed, event, vacated, occupied)
    assert take_all(ready) == [removed, event]
    ready.done(removed)
    assert take_all(ready) == []
    ready.done(event)
    assert take_all(ready) == [vacated]
    ready.done(vacated)
    assert take_all(ready) == [occupied]


def test_member_events_of_one_user_are_sent_in_order():
    new = Items()
    added, other, removed = (
        new("member.added", user="a"),
        new("member.added", user="b"),
        new("member.removed", user="a"),
    )
    ready = ready_of(added, other, removed)
    assert take_all(ready) == [added, other]
    ready.done(other)
    assert take_all(ready) == []
    ready.done(added)
    assert take_all(ready) == [removed]


def test_channels_take_turns_and_do_not_wait_for_each_other():
    new = Items()
    items = [new("client_event", channel) for channel in ("a", "a", "a", "b", "c")]
    assert [item.channel for item in take_all(ready_of(*items))] == ["a", "b", "c", "a", "a"]


def test_client_events_do_not_wait_for_each_other():
    new = Items()
    items = [new("client_event", user="a") for _ in range(5)]
    assert take_all(ready_of(*items)) == items


def test_clear_returns_the_queued_deliveries_and_keeps_the_ones_under_way():
    new = Items()
    under_way, waits, other = new("channel.occupied"), new("channel.vacated"), new("channel.occupied", "d")
    ready = ready_of(under_way, waits)
    assert ready.take() == under_way
    ready.add(other)
    assert ready.clear() == [waits, other]
    assert len(ready) == 0
    assert take_all(ready) == []
    ready.add(waits)
    assert take_all(ready) == []
    ready.done(under_way)
    assert take_all(ready) == [waits]


def test_deliveries_that_run_together_are_taken_in_the_order_in_which_they_were_stored():
    new = Items()
    items = [
        new("channel.occupied", "a"),
        new("member.added", "b", "x"),
        new("channel.vacated", "a"),
        new("cache.miss"),
    ]
    ready = ready_of(items[3], items[1], items[0], items[2])
    assert ready.in_order() == items
    ready.take_these(items[:3])
    assert (ready.in_order(), len(ready)) == ([items[3]], 1)
    # What runs alone for itself, or comes later in the same channels, waits for all of them.
    more = [new("channel.occupied", "a"), new("member.removed", "b", "x")]
    for item in more:
        ready.add(item)
    assert take_all(ready) == [items[3]]
    ready.done(*items[:3])
    assert take_all(ready) == more


def test_taking_together_leaves_nothing_of_channels_that_are_empty():
    new, ready = Items(), ReadyDeliveries()
    for number in range(1_000):
        item = new("channel.occupied", f"c{number}")
        ready.add(item)
        ready.take_these([item])
        ready.done(item)
    assert (len(ready._channels), len(ready._turns)) == (0, 0)


def test_removed_deliveries_are_gone_and_hold_back_no_other():
    new = Items()
    occupied, added, vacated = new("channel.occupied"), new("member.added", user="x"), new("channel.vacated")
    ready = ready_of(occupied, added, vacated)
    assert ready.remove({occupied.number, added.number, 77}) == [occupied, added]
    assert (ready.remove({77}), take_all(ready)) == ([], [vacated])


def test_random_deliveries_are_neither_lost_nor_reordered():
    chance = random.Random(7)
    new, ready = Items(), ReadyDeliveries()
    added, under_way, ended = [], [], []
    kinds = ("channel.occupied", "channel.vacated", "member.added", "member.removed", "client_event", "cache.miss")
    for _ in range(4_000):
        what = chance.random()
        if what < 0.4:
            event = chance.choice(kinds)
            user = chance.choice("xyz") if event.startswith("member") else None
            added.append(new(event, chance.choice("ab"), user))
            ready.add(added[-1])
        elif what < 0.7 and (item := ready.take()) is not None:
            for other in under_way:
                if other.channel == item.channel:
                    assert not {item.event, other.event} & {"channel.occupied", "channel.vacated"}
                    assert item.user is None or item.user != other.user
            under_way.append(item)
        elif under_way:
            ended.append(under_way.pop(chance.randrange(len(under_way))))
            ready.done(ended[-1])
    while under_way or len(ready):
        if (item := ready.take()) is not None:
            under_way.append(item)
        else:
            ended.append(under_way.pop())
            ready.done(ended[-1])
    assert sorted(ended) == sorted(added)
    for channel in "ab":
        for user in "xyz":
            of_user = [item.number for item in ended if (item.channel, item.user) == (channel, user)]
            assert of_user == sorted(of_user)
