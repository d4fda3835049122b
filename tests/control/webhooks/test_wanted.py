"""What an endpoint wants: events, channels, names of client events; and which values are refused."""

import pytest

from control.webhooks.transitions import APP
from redpoll.control.records.records import RecordError
from redpoll.control.webhooks.wanted import check_pin, check_wanted, hooks_of, wants, wants_client_event
from redpoll.store.webhooks import Endpoint

URL = "https://example.com/hook"


def plain(events=("all",), channels=(), **more):
    fields = {"id": "e", "app_id": APP, "url": URL, "secret": "s", "format": "service", "created_at": 0.0, **more}
    return Endpoint(events=tuple(events), channels=tuple(channels), **fields)


def test_all_means_the_five_standard_events_and_extras_are_chosen_by_name():
    five = ("channel.occupied", "channel.vacated", "member.added", "member.removed", "client_event")
    extras = ("cache.miss", "subscription.count")
    assert all(wants(plain(), event, "c") for event in five)
    assert not any(wants(plain(), event, "c") for event in extras)
    both = plain(("all", "cache.miss"))
    assert [wants(both, event, "c") for event in (*five, *extras)] == [True] * 6 + [False]
    assert [event for event in (*five, *extras) if wants(plain(("client_event",)), event, "c")] == ["client_event"]


def test_endpoint_gets_only_channels_with_its_prefixes():
    of_rooms = plain(channels=("room-", "presence-"))
    chosen = [
        channel
        for channel in ("room-1", "presence-x", "room", "private-room-1")
        if wants(of_rooms, "client_event", channel)
    ]
    assert chosen == ["room-1", "presence-x"]


def test_hooks_of_an_app_include_only_enabled_endpoints():
    assert hooks_of([]) == ""
    assert hooks_of([plain()]) == "omc"
    assert hooks_of([plain(("subscription.count",)), plain(("cache.miss", "channel.vacated"))]) == "oxs"
    assert hooks_of([plain(disabled_at=1.0), plain(("member.added",))]) == "m"


def test_names_choose_client_events_only():
    named = plain(("all",), client_events=("client-order", "client-paid"))
    events = (b'{"event":"client-order","data":1}', b'{"event":"client-orders"}', b'{"event":"client-\\u0070aid"}')
    assert [wants_client_event(named, detail) for detail in events] == [True, False, True]
    assert all(wants_client_event(plain(), detail) for detail in events)
    assert wants(named, "member.added", "c")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"format": "service"}, "only a webhook in the format pusher can batch events: service has one in each body"),
        ({"url": ""}, "a webhook that is pulled can't batch events: each of its deliveries is acknowledged by itself"),
    ],
)
def test_events_are_batched_only_in_the_pusher_format_and_for_a_url(values, text):
    check_wanted(plain(format="pusher", batch=True))
    with pytest.raises(RecordError, match=text):
        check_wanted(plain(**{"format": "pusher", "batch": True, **values}))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"client_events": ("order",)}, "must begin with client-"),
        ({"client_events": ("client-\0",)}, "can't be the name of a client event"),
        ({"client_events": ("client-a",), "events": ("member.added",)}, "for a webhook with the event client_event"),
        ({"client_events": tuple(f"client-{n}" for n in range(51))}, "at most 50 client events"),
    ],
)
def test_names_that_no_client_event_has_are_refused(values, text):
    with pytest.raises(RecordError, match=text):
        check_wanted(plain(**values))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"url": ""}, "the webhook has no URL"),
        ({"url": "HTTP://example.com/"}, "no certificate to pin on an http:// URL"),
        ({"pin": "ab" * 31}, "64 hex digits, not 'abab"),
        ({"pin": "AB" * 32}, "64 hex digits"),
    ],
)
def test_pin_is_a_fingerprint_and_needs_a_certificate(values, text):
    check_pin(plain(pin="ab" * 32))
    check_pin(plain(**{**values, "pin": ""}))
    with pytest.raises(RecordError, match=text):
        check_pin(plain(**{"pin": "ab" * 32, **values}))
