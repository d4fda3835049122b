import pytest

from redpoll.cluster.held import UNKNOWN, Held, Kept, Ticket
from redpoll.cluster.keys import cap_of_shard
from redpoll.cluster.tally import Tally
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.presence import Roster


def room(presence: bool = True) -> Held:
    return Held("7", "presence-room" if presence else "news", "p" if presence else "c", b"topic")


def wait(held: Held, user: str | None = None, info: bytes = b"") -> Ticket:
    ticket = Ticket(None, user, info)
    held.wait(ticket)
    return ticket


def send(held: Held):
    held.call = held.plan()
    return held.call


def answer(held: Held, accepted: bytes | None = None):
    call, held.call = held.call, None
    return held.accept(call, b"1" * call.joining if accepted is None else accepted)


def attach(held: Held, *users: str) -> None:
    for user in users:
        wait(held, user)
    while send(held):
        answer(held)


def test_nothing_to_tell_makes_no_call():
    held = room()
    assert held.plan() is None
    attach(held, "a")
    assert held.plan() is None
    assert not held.idle


def test_joins_are_told_with_those_attached_as_base():
    held = room()
    attach(held, "a", "a", "b")
    assert (held.attached, held.sockets) == (3, {"a": 2, "b": 1})
    wait(held, "c", b"1")
    call = send(held)
    assert (call.base, call.joins, call.gone) == (3, [("c", b"1")], [])


def test_only_the_first_join_of_a_presence_channel_asks_for_the_roster():
    held = room()
    wait(held, "a")
    assert held.wants_roster
    assert send(held).flags == "r"
    assert room(presence=False).wants_roster is False


def test_public_joins_name_nobody():
    held = room(presence=False)
    wait(held)
    wait(held)
    call = send(held)
    assert (call.base, call.joins, call.joining, call.flags) == (0, (), 2, "")
    joined, refused = answer(held)
    assert (len(joined), refused, held.attached, held.confirmed) == (2, [], 2, 2)


def test_user_is_gone_with_its_last_socket():
    held = room()
    attach(held, "a", "a")
    held.detach("a")
    assert send(held).gone == []
    answer(held)
    held.detach("a")
    call = send(held)
    assert (call.base, call.gone, call.flags) == (0, ["a"], "")
    answer(held)
    assert held.idle


def test_user_whom_a_join_of_the_same_call_brings_is_not_gone():
    held = room()
    attach(held, "a")
    held.detach("a")
    wait(held, "a")
    call = send(held)
    assert (call.base, call.gone, call.joins) == (0, [], [("a", b"")])
    answer(held)
    assert held.plan() is None
    assert not held.gone


def test_user_who_comes_back_while_a_call_is_under_way_is_not_told_gone():
    held = room()
    wait(held, "a")
    send(held)
    late = wait(held, "a")
    answer(held)
    held.detach("a")
    assert send(held).gone == []
    assert answer(held)[0] == [late]
    assert send(held) is None


def test_at_most_256_joins_and_256_gone_users_go_into_a_call():
    held = room()
    for n in range(300):
        wait(held, f"a{n}")
    assert len(send(held).joins) == 256
    answer(held)
    assert len(send(held).joins) == 44
    answer(held)
    for n in range(300):
        held.detach(f"a{n}")
    call = send(held)
    assert (len(call.gone), call.base, call.flags) == (256, 0, "u")
    answer(held)
    call = send(held)
    assert (len(call.gone), call.base, call.flags) == (44, 0, "")


def test_floor_holds_while_a_queued_join_keeps_a_gone_user():
    held = room()
    attach(held, "z")
    held.detach("z")
    for n in range(256):
        wait(held, f"a{n}")
    last = wait(held, "z")
    call = send(held)
    assert ("z", b"") not in call.joins
    assert (call.gone, call.flags) == ([], "ur")
    answer(held)
    held.withdraw(last)
    assert send(held).gone == ["z"]


def test_withdrawn_while_waiting_is_as_if_it_had_never_been():
    held = room()
    ticket = wait(held, "a")
    held.withdraw(ticket)
    assert held.plan() is None
    assert held.idle
    assert ticket.held is None


def test_withdrawn_in_flight_leaves_in_the_next_call():
    held = room()
    ticket = wait(held, "a")
    send(held)
    held.withdraw(ticket)
    assert answer(held) == ([], [])
    assert held.confirmed == 1
    call = send(held)
    assert (call.base, call.gone) == (0, ["a"])
    answer(held)
    assert held.idle


def test_withdrawn_in_flight_does_not_take_the_user_from_its_other_socket():
    held = room()
    first, second = wait(held, "a"), wait(held, "a")
    send(held)
    held.withdraw(first)
    assert answer(held) == ([second], [])
    call = send(held)
    assert (call.base, call.gone) == (1, [])


def test_refused_ticket_waits_no_longer():
    held = room()
    first, second = wait(held, "a"), wait(held, "b")
    send(held)
    assert answer(held, b"01") == ([second], [first])
    assert held.sockets == {"b": 1}


def test_call_of_unknown_fate_is_made_again_with_its_joins_first():
    held = room()
    first = wait(held, "a")
    call = send(held)
    second = wait(held, "b")
    held.call = None
    held.take_back(call)
    assert held.confirmed == UNKNOWN
    assert list(held.waiting) == [first, second]
    assert not held.idle
    assert send(held).tickets == [first, second]


@pytest.mark.parametrize("withdrawn", ["before", "after"])
def test_join_of_unknown_fate_that_nobody_wants_any_more_is_told_gone(withdrawn):
    held = room()
    ticket = wait(held, "a")
    call = send(held)
    if withdrawn == "before":
        held.withdraw(ticket)
    held.call = None
    held.take_back(call)
    if withdrawn == "after":
        held.withdraw(ticket)
    call = send(held)
    assert (call.base, call.gone, call.tickets) == (0, ["a"], [])


def test_after_a_break_every_user_is_told_once_and_the_count_is_whole_from_the_first_call():
    held = room()
    users = [f"u{n}" for n in range(300)]
    attach(held, *users, "u0", "u1")
    held.infos["u0"] = b"0"
    wait(held, "late")
    held.lose()
    call = send(held)
    assert (call.base + call.joining, len(call.joins), call.flags, call.last) == (302, 256, "k", False)
    assert call.joins[0] == ("u0", b"0")
    answer(held)
    held.detach("u299")
    call = send(held)
    assert (call.base + call.joining, len(call.joins), call.flags, call.last) == (301, 43, "kr", True)
    answer(held)
    assert held.asserted
    call = send(held)
    assert (call.base, call.joins, call.gone) == (301, [("late", b"")], ["u299"])


def test_after_a_break_a_channel_without_sockets_is_told_as_empty():
    held = room()
    attach(held, "a")
    held.detach("a")
    held.lose()
    call = send(held)
    assert (call.base, call.gone, held.asserted) == (0, ["a"], True)


def test_after_a_break_a_roster_that_nobody_looked_at_is_read_anew():
    held = room()
    attach(held, "a")
    held.roster = Roster()
    held.detach("a")
    held.lose()
    wait(held, "b")
    assert held.wants_roster
    call = send(held)
    assert (call.flags, call.gone, held.roster) == ("r", ["a"], None)


def test_under_a_new_name_a_channel_without_sockets_needs_no_call():
    held = room()
    attach(held, "a")
    held.detach("a")
    held.lose()
    held.renew()
    assert held.plan() is None
    assert held.idle


def test_second_look_is_a_call_that_changes_nothing():
    held = room()
    attach(held, "a")
    held.roster = Roster()
    assert held.plan() is None
    held.look = True
    call = send(held)
    assert (call.flags, call.look, call.base) == ("r", True, 1)
    answer(held)
    assert not held.look


def test_users_that_redis_lists_for_us_are_gone_unless_a_socket_is_theirs():
    held = room()
    attach(held, "a")
    held.forsake(["a", "b"])
    assert send(held).gone == ["b"]


def test_cached_event_is_asked_for_with_joins_only():
    held = room(presence=False)
    held.caches = True
    wait(held)
    assert send(held).flags == "c"
    answer(held)
    held.detach(None)
    assert send(held).flags == ""


def test_count_is_told_with_every_change_and_when_it_is_due():
    held = room(presence=False)
    held.tally = Tally()
    wait(held)
    assert send(held).flags == "s"
    answer(held)
    assert held.plan() is None
    held.tally.hurry()
    assert not held.idle
    assert send(held).flags == "s"
    answer(held)
    assert held.plan() is None


def test_channel_whose_count_is_still_to_be_told_is_not_forgotten():
    held = room(presence=False)
    held.tally = Tally()
    held.tally.hurry()
    assert not held.idle
    send(held)
    answer(held)
    assert held.idle


def test_after_a_break_counts_are_told_behind_what_is_held():
    held = room(presence=False)
    held.tally = Tally()
    wait(held)
    send(held)
    answer(held)
    held.lose()
    assert send(held).flags == "k"
    answer(held)
    assert send(held).flags == "s"
    answer(held)
    assert held.plan() is None


def test_topic_alone_is_never_told_to_redis():
    held = Held("7", "#server-to-user-1", "t", b"topic")
    ticket = wait(held)
    assert held.listen() == [ticket]
    assert held.attached == 1
    held.subscribed = held.listening = True
    held.lose()
    held.renew()
    assert (held.asserted, held.subscribed, held.listening) == (True, False, False)
    held.detach(None)
    assert held.idle


# What the app's record says

RULE = HistoryRule(id="0a0a0a", name="", prefix=True, keep=10, seconds=60)


def app(**settings) -> App:
    return App(id="7", name="test", keys=(), **settings)


def test_record_says_the_cap_and_whether_events_are_cached():
    held, news = Held("7", "presence-cache-room", "p", b"topic"), room(presence=False)
    for each in (held, news):
        each.follow(app(max_presence_members=3))
    assert (held.cap, held.caches) == (3, True)
    assert (news.cap, news.caches) == (0, False)
    held.follow(app(max_presence_members=5))
    assert held.cap == 5


def test_every_call_says_what_webhooks_want():
    held = room()
    held.follow(app(hooks="om"))
    wait(held, "a")
    assert send(held).flags == "rom"
    answer(held)
    held.detach("a")
    assert send(held).flags == "om"
    answer(held)
    attach(held, "a")
    held.lose()
    assert send(held).flags == "krom"
    answer(held)
    held.follow(app())
    held.detach("a")
    assert send(held).flags == ""


def test_joiners_of_a_channel_with_history_ask_where_it_stands():
    held = room(presence=False)
    held.follow(app(history=(RULE,), max_history_channels=6_400))
    wait(held)
    assert (held.rule, held.most_histories) == (RULE, cap_of_shard(6_400))
    assert send(held).flags == "h"
    answer(held)
    held.history = Kept("e", 5, True)
    held.follow(app(history=(RULE,)))
    assert held.plan() is None
    wait(held)
    assert send(held).flags == "h"
    answer(held)
    held.detach(None)
    assert send(held).flags == ""


def test_history_that_is_turned_on_is_asked_for_once_and_turned_off_forgotten():
    held = room(presence=False)
    held.follow(app())
    attach(held, None)
    held.follow(app(history=(RULE,)))
    call = send(held)
    assert (call.flags, call.tickets, call.base) == ("h", [], 1)
    answer(held)
    # The app has no history left to give: it isn't asked for again until somebody joins or the record changes.
    assert held.plan() is None
    held.follow(app(history=(RULE,)))
    assert send(held).flags == "h"
    answer(held)
    held.history = Kept("e", 5, True)
    held.follow(app())
    assert (held.rule, held.history, held.plan()) == (None, None, None)


def test_history_is_asked_for_again_when_nobody_knows_what_became_of_the_question():
    held = room(presence=False)
    held.follow(app())
    attach(held, None)
    held.follow(app(history=(RULE,)))
    call = send(held)
    held.call = None
    held.lose()
    held.take_back(call)
    assert send(held).flags == "k"
    answer(held)
    assert send(held).flags == "h"


def test_history_of_a_channel_without_subscribers_is_not_asked_for():
    held = room(presence=False)
    held.follow(app(history=(RULE,)))
    assert held.plan() is None
    assert held.idle


def test_what_is_no_channel_follows_nothing():
    for kind, channel in (("u", "%u:a"), ("q", "%conn"), ("t", "#server-to-user-a")):
        held = Held("7", channel, kind, b"topic")
        held.cap = 9
        held.follow(app(history=(RULE,), hooks="omcxs"))
        assert (held.cap, held.rule, held.hooks, held.caches, held.asks) == (9, None, "", False, False)
