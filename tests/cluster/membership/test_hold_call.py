import pytest

from redpoll.cluster.membership.hold_call import HoldCall, hook_flags
from redpoll.cluster.membership.local_channel import Ticket


@pytest.mark.parametrize(
    ("wanted", "channel", "kind", "flags"),
    [
        ("", "news", "c", ""),
        ("omcxs", "news", "c", "oS"),
        ("omcxs", "cache-news", "c", "oSX"),
        ("omcxs", "presence-room", "p", "om"),
        ("omcxs", "presence-cache-room", "p", "omX"),
        ("ms", "presence-room", "p", "m"),
        ("m", "news", "c", ""),
        ("c", "news", "c", ""),
        ("omcxs", "private-redpoll.console", "c", ""),
        ("omcxs", "%u:a", "u", ""),
        ("omcxs", "%conn", "q", ""),
        ("omcxs", "#server-to-user-a", "t", ""),
    ],
)
def test_hooks_become_flags_of_those_channels_where_they_mean_something(wanted, channel, kind, flags):
    assert hook_flags(wanted, channel, kind) == flags


def call(flags="", joins=(), tickets=()) -> HoldCall:
    return HoldCall(0, 0, flags, (), joins, tickets, True, False)


def test_roster_is_the_biggest_that_a_reply_may_bring():
    assert [call(flags).brings for flags in ("", "shom", "ch", "rc")] == ["", "", "c", "r"]


def test_call_asks_for_what_its_tickets_are_or_for_the_users_of_a_reassertion():
    assert call(tickets=[Ticket(None), Ticket(None)]).joining == 2
    assert call(joins=[("a", b"")], tickets=[Ticket(None, "a")]).joining == 1
    assert call(joins=[("a", b""), ("b", b"")]).joining == 2
