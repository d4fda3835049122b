"""The last announcements to endpoints, and where Redis disagrees. test_intake.py has the rest of the way."""

import pytest
from structlog.testing import capture_logs

from control.webhooks.transitions import APP, NOW_S, Box, transition
from redpoll.cluster.outbox import Subject
from redpoll.control.webhooks.announced import Announced
from redpoll.store.deliveries import Announcement
from redpoll.store.webhooks import Endpoint

ROOM = Subject(APP, "room", None)


def endpoint(name, events=("all",), **more):
    fields = {"url": "https://e.com", "secret": "s", "channels": (), "format": "service", "created_at": NOW_S, **more}
    return Endpoint(id=name, app_id=APP, events=events, **fields)


ENDPOINTS = {
    "both": endpoint("both"),
    "one": endpoint("one", ("channel.occupied",)),
    "disabled": endpoint("disabled", disabled_at=NOW_S),
}


@pytest.fixture
def box():
    return Box()


def begun(box, *last, **times):
    announced = Announced(box, ENDPOINTS.get, **times)
    begin(announced, box, *last)
    return announced


def begin(announced, box, *last):
    states = {}
    for name, event in last:
        announced.take([Announcement(name, event, "room", None)], states)
    announced.begin(box.connects, states)


def kept(announced, event, *names, known=()):
    new = [(transition(event), {"id": name, "endpoint_id": name}) for name in names]
    of_new, states = announced.without_repeats(new, known)
    announced.stored(states)
    return [delivery["endpoint_id"] for _, delivery in of_new]


async def test_newest_delivery_counts(box):
    announced = begun(box, ("both", "channel.vacated"), ("both", "channel.occupied"))
    assert kept(announced, "channel.vacated", "both") == []
    assert kept(announced, "channel.occupied", "both") == ["both"]
    assert kept(announced, "channel.occupied", "both") == []


async def test_what_was_known_counts_until_it_is_compared(box):
    """A transaction failed long after Redis had lost writes: the deliveries that are read then may be later ones."""
    announced = begun(box, ("both", "channel.occupied"))
    announced.begin_again()
    begin(announced, box)
    assert kept(announced, "channel.occupied", "both") == []
    begin(announced, box, ("both", "channel.vacated"))
    assert kept(announced, "channel.occupied", "both") == ["both"]


async def test_what_was_compared_is_forgotten_at_the_next_beginning(box):
    """With a Redis that comes and goes, all that ever was announced would stay."""
    announced = begun(box, ("both", "channel.occupied"), compare_after_s=(0.0,))
    box.is_present = {ROOM: True}
    await announced.compare()
    assert kept(announced, "channel.occupied", "both") == []
    begin(announced, box)
    assert kept(announced, "channel.occupied", "both") == ["both"]


async def test_each_endpoint_has_its_own_last_delivery(box):
    announced = begun(box, ("both", "channel.occupied"), ("one", "channel.occupied"))
    assert kept(announced, "channel.occupied", "both", "one", "new") == ["one", "new"]


async def test_delivery_that_the_store_has_says_nothing_new(box):
    announced = begun(box, ("both", "channel.occupied"))
    assert kept(announced, "channel.vacated", "both", known={"both"}) == []
    assert kept(announced, "channel.occupied", "both") == []


async def test_it_begins_at_each_connection(box):
    announced = Announced(box, ENDPOINTS.get)
    assert announced.is_due()
    begin(announced, box)
    assert not announced.is_due()
    box.connects += 1
    assert announced.is_due()


@pytest.mark.parametrize(
    ("name", "event", "is_present", "restated"),
    [
        ("both", "channel.occupied", False, [ROOM]),
        ("both", "channel.occupied", True, []),
        ("both", "channel.vacated", True, [ROOM]),
        ("one", "channel.occupied", False, []),
        ("disabled", "channel.occupied", False, []),
        ("both", "client_event", False, []),
    ],
)
async def test_redis_is_compared_once_for_endpoints_that_get_both(box, name, event, is_present, restated):
    announced = begun(box, (name, event), compare_after_s=(0.0,))
    box.is_present = {ROOM: is_present}
    await announced.compare()
    await announced.compare()
    assert box.restated == restated


@pytest.mark.parametrize(("held_back", "logged"), [((), [1]), ((ROOM,), [])])
async def test_leave_that_is_held_back_is_no_loss(box, held_back, logged):
    """After each start, the log told of a fail-over that lost writes."""
    box.held_back.update(held_back)
    announced = begun(box, ("both", "channel.occupied"), compare_after_s=(0.0,))
    with capture_logs() as lines:
        await announced.compare()
    assert [line["subjects"] for line in lines] == logged


async def test_nothing_is_compared_before_its_time(box):
    announced = begun(box, ("both", "channel.occupied"), compare_after_s=(3_600.0,))
    await announced.compare()
    assert box.restated == []
    assert announced.active
