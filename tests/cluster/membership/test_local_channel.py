import pytest

from redpoll.cluster.history import HistoryPosition
from redpoll.cluster.membership.channel_settings import ChannelSettings
from redpoll.cluster.membership.hold_call import HoldCall
from redpoll.cluster.membership.join import Join, JoinState, Stage
from redpoll.cluster.membership.local_channel import UNKNOWN, LocalChannel, TopicSubscription
from redpoll.cluster.membership.tally import Tally
from redpoll.cluster.redis.keys import cap_of_shard
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.presence import Roster

# The calls in flight.
calls: dict[LocalChannel, HoldCall] = {}


def room(presence: bool = True) -> LocalChannel:
    return LocalChannel("7", "presence-room" if presence else "news", "p" if presence else "c", b"topic")


def queue(local_channel: LocalChannel, user: str | None = None, info: bytes = b"") -> Join:
    join = Join(None, app(), local_channel.channel, user, info)
    local_channel.queue(join)
    return join


def send(local_channel: LocalChannel):
    call = local_channel.plan()
    if call is not None:
        calls[local_channel] = call
        local_channel.stage = Stage.SENDING
    return call


def ended(local_channel: LocalChannel):
    local_channel.stage = Stage.CLEAN
    return calls.pop(local_channel)


def answer(local_channel: LocalChannel, accepted: bytes | None = None):
    call = ended(local_channel)
    return local_channel.accept(call, b"1" * call.joining if accepted is None else accepted)


def attach(local_channel: LocalChannel, *users: str) -> None:
    for user in users:
        queue(local_channel, user)
    while send(local_channel):
        answer(local_channel)


def test_without_a_change_there_is_no_call():
    local_channel = room()
    assert local_channel.plan() is None
    attach(local_channel, "a")
    assert local_channel.plan() is None
    assert not local_channel.idle


def test_base_is_the_number_of_attached_sockets():
    local_channel = room()
    attach(local_channel, "a", "a", "b")
    assert (local_channel.attached, local_channel.members.sockets) == (3, {"a": 2, "b": 1})
    queue(local_channel, "c", b"1")
    call = send(local_channel)
    assert (call.base, call.users, call.gone) == (3, [("c", b"1")], [])


def test_only_the_first_join_of_a_presence_channel_asks_for_the_roster():
    local_channel = room()
    queue(local_channel, "a")
    assert local_channel.needs_roster
    assert send(local_channel).flags == "r"
    assert room(presence=False).needs_roster is False


def test_public_joins_carry_no_users():
    local_channel = room(presence=False)
    queue(local_channel)
    queue(local_channel)
    call = send(local_channel)
    assert (call.base, call.users, call.joining, call.flags) == (0, (), 2, "")
    joined, refused = answer(local_channel)
    assert (len(joined), refused, local_channel.attached, local_channel.confirmed) == (2, [], 2, 2)


def test_user_is_removed_with_its_last_socket():
    local_channel = room()
    attach(local_channel, "a", "a")
    local_channel.detach("a")
    assert send(local_channel).gone == []
    answer(local_channel)
    local_channel.detach("a")
    call = send(local_channel)
    assert (call.base, call.gone, call.flags) == (0, ["a"], "")
    answer(local_channel)
    assert local_channel.idle


def test_user_who_joins_in_the_same_call_is_not_removed():
    local_channel = room()
    attach(local_channel, "a")
    local_channel.detach("a")
    queue(local_channel, "a")
    call = send(local_channel)
    assert (call.base, call.gone, call.users) == (0, [], [("a", b"")])
    answer(local_channel)
    assert local_channel.plan() is None
    assert not local_channel.members.gone


def test_user_who_returns_during_a_call_is_not_removed():
    local_channel = room()
    queue(local_channel, "a")
    send(local_channel)
    late = queue(local_channel, "a")
    answer(local_channel)
    local_channel.detach("a")
    assert send(local_channel).gone == []
    assert answer(local_channel)[0] == [late]
    assert send(local_channel) is None


def test_at_most_256_joins_and_256_removals_go_into_a_call():
    local_channel = room()
    for n in range(300):
        queue(local_channel, f"a{n}")
    assert len(send(local_channel).users) == 256
    answer(local_channel)
    assert len(send(local_channel).users) == 44
    answer(local_channel)
    for n in range(300):
        local_channel.detach(f"a{n}")
    call = send(local_channel)
    assert (len(call.gone), call.base, call.flags) == (256, 0, "u")
    answer(local_channel)
    call = send(local_channel)
    assert (len(call.gone), call.base, call.flags) == (44, 0, "")


def test_count_stays_above_zero_while_a_queued_join_delays_a_removal():
    local_channel = room()
    attach(local_channel, "z")
    local_channel.detach("z")
    for n in range(256):
        queue(local_channel, f"a{n}")
    last = queue(local_channel, "z")
    call = send(local_channel)
    assert ("z", b"") not in call.users
    assert (call.gone, call.flags) == ([], "ur")
    answer(local_channel)
    local_channel.withdraw(last)
    assert send(local_channel).gone == ["z"]


def test_subscribe_withdrawn_while_waiting_leaves_no_trace():
    local_channel = room()
    join = queue(local_channel, "a")
    local_channel.withdraw(join)
    assert local_channel.plan() is None
    assert local_channel.idle
    assert join.state is JoinState.WITHDRAWN


def test_withdrawn_in_flight_leaves_in_the_next_call():
    local_channel = room()
    join = queue(local_channel, "a")
    send(local_channel)
    local_channel.withdraw(join)
    assert answer(local_channel) == ([], [])
    assert local_channel.confirmed == 1
    call = send(local_channel)
    assert (call.base, call.gone) == (0, ["a"])
    answer(local_channel)
    assert local_channel.idle


def test_withdrawn_in_flight_does_not_take_the_user_from_its_other_socket():
    local_channel = room()
    first, second = queue(local_channel, "a"), queue(local_channel, "a")
    send(local_channel)
    local_channel.withdraw(first)
    assert answer(local_channel) == ([second], [])
    call = send(local_channel)
    assert (call.base, call.gone) == (1, [])


def test_refused_join_is_queued_no_longer():
    local_channel = room()
    first, second = queue(local_channel, "a"), queue(local_channel, "b")
    send(local_channel)
    assert answer(local_channel, b"01") == ([second], [first])
    assert local_channel.members.sockets == {"b": 1}


def test_call_with_an_unknown_outcome_is_repeated_with_its_joins_first():
    local_channel = room()
    first = queue(local_channel, "a")
    send(local_channel)
    second = queue(local_channel, "b")
    local_channel.fail(ended(local_channel))
    assert local_channel.confirmed == UNKNOWN
    assert list(local_channel.queued) == [first, second]
    assert not local_channel.idle
    assert send(local_channel).joins == [first, second]


@pytest.mark.parametrize("withdrawn", ["before", "after"])
def test_withdrawn_join_with_an_unknown_outcome_removes_its_user(withdrawn):
    local_channel = room()
    join = queue(local_channel, "a")
    send(local_channel)
    if withdrawn == "before":
        local_channel.withdraw(join)
    local_channel.fail(ended(local_channel))
    if withdrawn == "after":
        local_channel.withdraw(join)
    call = send(local_channel)
    assert (call.base, call.gone, call.joins) == (0, ["a"], [])


def test_after_a_break_every_user_is_asserted_once_and_the_first_call_has_the_whole_count():
    local_channel = room()
    users = [f"u{n}" for n in range(300)]
    attach(local_channel, *users, "u0", "u1")
    local_channel.members.infos["u0"] = b"0"
    queue(local_channel, "late")
    local_channel.connection_lost()
    call = send(local_channel)
    assert (call.base + call.joining, len(call.users), call.flags, call.last) == (302, 256, "k", False)
    assert call.users[0] == ("u0", b"0")
    answer(local_channel)
    local_channel.detach("u299")
    call = send(local_channel)
    assert (call.base + call.joining, len(call.users), call.flags, call.last) == (301, 43, "kr", True)
    answer(local_channel)
    assert local_channel.asserted
    call = send(local_channel)
    assert (call.base, call.users, call.gone) == (301, [("late", b"")], ["u299"])


def test_after_a_break_a_channel_without_sockets_is_emptied():
    local_channel = room()
    attach(local_channel, "a")
    local_channel.detach("a")
    local_channel.connection_lost()
    # Redis may have lost writes, and lists others under our name. Until they are known, our count stays above 0.
    call = send(local_channel)
    assert (call.base, call.gone, call.flags, call.last) == (0, (), "kru", True)
    answer(local_channel)
    assert (local_channel.asserted, local_channel.confirmed, local_channel.idle) == (True, UNKNOWN, False)
    local_channel.members.mark_gone(["a", "undone"])
    call = send(local_channel)
    assert (call.base, call.gone, call.flags) == (0, ["a", "undone"], "")
    answer(local_channel)
    assert local_channel.idle


def test_after_a_break_the_roster_of_a_channel_without_sockets_is_read_again():
    local_channel = room()
    attach(local_channel, "a")
    local_channel.roster = Roster()
    local_channel.detach("a")
    local_channel.connection_lost()
    queue(local_channel, "b")
    assert local_channel.needs_roster
    assert send(local_channel).flags == "kru"
    assert local_channel.roster is None
    answer(local_channel)
    call = send(local_channel)
    assert (call.flags, call.gone, call.users) == ("r", ["a"], [("b", b"")])


def test_channel_that_was_opened_before_redis_listed_it_is_asserted():
    local_channel = room()
    join = queue(local_channel, "a")
    local_channel.listed()
    local_channel.withdraw(join)
    assert (send(local_channel).flags, local_channel.confirmed) == ("kru", UNKNOWN)


def test_under_a_new_name_a_channel_without_sockets_needs_no_call():
    local_channel = room()
    attach(local_channel, "a")
    local_channel.detach("a")
    local_channel.connection_lost()
    local_channel.renamed()
    assert local_channel.plan() is None
    assert local_channel.idle


def test_second_look_is_a_call_that_changes_nothing():
    local_channel = room()
    attach(local_channel, "a")
    local_channel.roster = Roster()
    assert local_channel.plan() is None
    local_channel.members.recheck = True
    call = send(local_channel)
    assert (call.flags, call.final, call.base) == ("r", True, 1)
    answer(local_channel)
    assert not local_channel.members.recheck


def test_users_listed_for_us_without_a_socket_are_removed():
    local_channel = room()
    attach(local_channel, "a")
    local_channel.members.mark_gone(["a", "b"])
    assert send(local_channel).gone == ["b"]


def test_cached_event_is_asked_for_with_joins_only():
    local_channel = room(presence=False)
    local_channel.settings = ChannelSettings(caches=True)
    queue(local_channel)
    assert send(local_channel).flags == "c"
    answer(local_channel)
    local_channel.detach(None)
    assert send(local_channel).flags == ""


def test_every_change_and_a_due_count_ask_for_the_count():
    local_channel = room(presence=False)
    local_channel.tally = Tally()
    queue(local_channel)
    assert send(local_channel).flags == "s"
    answer(local_channel)
    assert local_channel.plan() is None
    local_channel.tally.make_due()
    assert not local_channel.idle
    assert send(local_channel).flags == "s"
    answer(local_channel)
    assert local_channel.plan() is None


def test_channel_with_a_due_count_is_not_dropped():
    local_channel = room(presence=False)
    local_channel.tally = Tally()
    local_channel.tally.make_due()
    assert not local_channel.idle
    send(local_channel)
    answer(local_channel)
    assert local_channel.idle


def test_after_a_break_the_assertion_announces_the_count():
    local_channel = room(presence=False)
    local_channel.tally = Tally()
    queue(local_channel)
    send(local_channel)
    answer(local_channel)
    local_channel.connection_lost()
    # A call without the flag would remove the sum, so the next one would announce a number that is unchanged.
    assert send(local_channel).flags == "s"
    answer(local_channel)
    assert local_channel.plan() is None


def test_server_to_user_channel_makes_no_call():
    local_channel = LocalChannel("7", "#server-to-user-1", "t", b"topic")
    join = queue(local_channel)
    assert local_channel.attach_queued() == [join]
    assert local_channel.attached == 1
    local_channel.subscription = TopicSubscription.CONFIRMED
    local_channel.connection_lost()
    local_channel.renamed()
    assert (local_channel.asserted, local_channel.subscription) == (True, TopicSubscription.NONE)
    local_channel.detach(None)
    assert local_channel.idle


# Settings from the app's record

RULE = HistoryRule(id="0a0a0a", name="", prefix=True, keep=10, seconds=60)


def app(**settings) -> App:
    return App(id="7", name="test", keys=(), **settings)


def test_record_sets_the_cap_and_whether_events_are_cached():
    local_channel, news = LocalChannel("7", "presence-cache-room", "p", b"topic"), room(presence=False)
    for channel in (local_channel, news):
        channel.apply_settings(app(max_presence_members=3))
    assert (local_channel.settings.cap, local_channel.settings.caches) == (3, True)
    assert (news.settings.cap, news.settings.caches) == (0, False)
    local_channel.apply_settings(app(max_presence_members=5))
    assert local_channel.settings.cap == 5


def test_every_call_carries_the_flags_for_webhook_rows():
    local_channel = room()
    local_channel.apply_settings(app(hooks="om"))
    queue(local_channel, "a")
    assert send(local_channel).flags == "rlom"
    answer(local_channel)
    local_channel.detach("a")
    assert send(local_channel).flags == "om"
    answer(local_channel)
    attach(local_channel, "a")
    local_channel.connection_lost()
    assert send(local_channel).flags == "krom"
    answer(local_channel)
    local_channel.apply_settings(app())
    local_channel.detach("a")
    assert send(local_channel).flags == ""


def test_joins_of_a_channel_with_history_ask_for_its_position():
    local_channel = room(presence=False)
    local_channel.apply_settings(app(history=(RULE,), max_history_channels=6_400))
    queue(local_channel)
    assert (local_channel.rule, local_channel.settings.max_histories) == (RULE, cap_of_shard(6_400))
    assert send(local_channel).flags == "hl"
    answer(local_channel)
    local_channel.history = HistoryPosition("e", 5, True)
    local_channel.apply_settings(app(history=(RULE,)))
    assert local_channel.plan() is None
    queue(local_channel)
    assert send(local_channel).flags == "h"
    answer(local_channel)
    local_channel.detach(None)
    assert send(local_channel).flags == ""
    answer(local_channel)
    local_channel.detach(None)
    assert send(local_channel).flags == "z"


def test_history_position_is_asked_for_once_and_forgotten_when_the_rule_goes():
    local_channel = room(presence=False)
    local_channel.apply_settings(app())
    attach(local_channel, None)
    local_channel.apply_settings(app(history=(RULE,)))
    call = send(local_channel)
    assert (call.flags, call.joins, call.base) == ("h", [], 1)
    answer(local_channel)
    # The app may have no more histories. Redis isn't asked again until a client joins or the record changes.
    assert local_channel.plan() is None
    local_channel.apply_settings(app(history=(RULE,)))
    assert send(local_channel).flags == "h"
    answer(local_channel)
    local_channel.history = HistoryPosition("e", 5, True)
    local_channel.apply_settings(app())
    assert (local_channel.rule, local_channel.history, local_channel.plan()) == (None, None, None)


def test_history_position_is_asked_for_again_after_an_unknown_outcome():
    local_channel = room(presence=False)
    local_channel.apply_settings(app())
    attach(local_channel, None)
    local_channel.apply_settings(app(history=(RULE,)))
    send(local_channel)
    call = ended(local_channel)
    local_channel.connection_lost()
    local_channel.fail(call)
    assert send(local_channel).flags == ""
    answer(local_channel)
    assert send(local_channel).flags == "h"


def test_history_position_is_asked_for_again_after_a_break_if_there_is_none_and_under_another_name():
    local_channel = room(presence=False)
    local_channel.apply_settings(app(history=(RULE,)))
    attach(local_channel, None)
    for lose, has_history, flags in (
        (local_channel.connection_lost, False, "h"),
        (local_channel.connection_lost, True, None),
        (local_channel.renamed, True, "h"),
    ):
        local_channel.history = HistoryPosition("e", 5, True) if has_history else None
        lose()
        assert send(local_channel).flags == ""
        answer(local_channel)
        call = send(local_channel)
        assert (call and call.flags) == flags
        if call is not None:
            answer(local_channel)
        assert local_channel.plan() is None


def test_history_position_is_asked_for_under_another_name_whatever_comes_between():
    local_channel = room(presence=False)
    local_channel.apply_settings(app(history=(RULE,)))
    attach(local_channel, None)
    local_channel.history = HistoryPosition("e", 5, True)
    local_channel.renamed()
    assert send(local_channel).flags == ""
    local_channel.apply_settings(app(history=(RULE,), hooks="o"))
    answer(local_channel)
    call = send(local_channel)
    assert "h" in call.flags
    # The connection breaks meanwhile.
    local_channel.fail(call)
    local_channel.connection_lost()
    send(local_channel)
    answer(local_channel)
    assert "h" in send(local_channel).flags


def test_history_of_a_channel_without_subscribers_is_not_asked_for():
    local_channel = room(presence=False)
    local_channel.apply_settings(app(history=(RULE,)))
    assert local_channel.plan() is None
    assert local_channel.idle


def test_only_channels_follow_the_record():
    for kind, channel in (("u", "%u:a"), ("q", "%conn"), ("t", "#server-to-user-a")):
        local_channel = LocalChannel("7", channel, kind, b"topic")
        local_channel.settings = ChannelSettings(cap=9)
        local_channel.apply_settings(app(history=(RULE,), hooks="omcxs"))
        assert (local_channel.settings, local_channel.needs_position) == (ChannelSettings(cap=9), False)
