from redpoll.cluster.membership.hold_call import HoldCall
from redpoll.cluster.membership.rosters import Changes, apply_reply, read_first, reread
from redpoll.protocol.presence import Roster

W = b"0123456789ab.1.0"


def roster_of(*users: str) -> Roster:
    roster = Roster()
    for user in users:
        roster.add(user, b"")
    return roster


def test_first_roster_is_what_redis_lists_and_reports_no_change():
    roster, changes = read_first([b"a", W + b" x.1.0\n{}", b"b", b"x.1.0\n"], W)
    assert dict(roster) == {"a": b"{}", "b": b""}
    assert changes == Changes(ours=["a"])


def test_longer_name_with_our_prefix_is_another_worker():
    assert read_first([b"a", W + b"0\n"], W)[1].ours == []


def test_second_reading_adds_at_once_and_removes_only_when_final():
    roster = roster_of("a", "b")
    flat = [b"b", b"x.1.0\n", b"c", b"x.1.0\n1"]
    assert reread(roster, flat, W, final=False) == Changes([("c", b"1")], (), [], ["a"])
    assert set(roster) == {"a", "b", "c"}
    assert reread(roster, flat, W, final=True) == Changes([], ["a"], [])
    assert set(roster) == {"b", "c"}


def test_reading_corrects_infos_without_a_frame():
    roster = roster_of("a")
    roster.add("a", b"old")
    assert reread(roster, [b"a", b"x.1.0\n"], W, final=True) == Changes([], [], [])
    assert roster["a"] == b""


def test_reply_reports_only_what_really_changed():
    roster = roster_of("a", "b")
    call = HoldCall(0, 0, "", ("a", "x"), (("b", b"1"), ("c", b"2")), (), True, False)
    assert apply_reply(roster, call, [0, 1], [0, 1]) == Changes([("c", b"2")], ["a"])
    assert dict(roster) == {"b": b"1", "c": b"2"}
