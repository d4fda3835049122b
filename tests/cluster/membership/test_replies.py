"""What clients get when Redis has answered a join or a leave: members, refusals, rosters that are read again."""

import asyncio

from redpoll.cluster.membership.hold_call import HoldCall
from redpoll.cluster.membership.replies import Changes, apply_reply, read_first, reread
from redpoll.protocol.presence import Roster

ROOM = "presence-room"


async def test_subscribe_gets_every_member(a, b, wait_until, truth):
    first = await a.attach(ROOM, "u1", info=b'{"n":1}')
    second = await b.attach(ROOM, "u2")
    assert first.snapshot == {"u1"}
    assert second.snapshot == {"u1", "u2"}
    await wait_until(lambda: first.frames == [("added", "u2")])
    assert second.frames == []
    await truth.settled([a, b])
    b.leave(second)
    await wait_until(lambda: first.frames[-1] == ("removed", "u2"))
    await truth.settled([a, b])


async def test_info_of_a_member_reaches_the_other_workers(a, b, wait_until):
    infos = []
    a.sockets.member_added = lambda local_channel, user, info: infos.append((user, info))
    await a.attach(ROOM, "u1", info=b'{"n":1}')
    await b.attach(ROOM, "u2", info=b'{"n":2}')
    await wait_until(lambda: infos == [("u2", b'{"n":2}')])
    assert b.registry.local_channel("7", ROOM).roster["u1"] == b'{"n":1}'
    await b.attach(ROOM, "u1", info=b'{"n":3}')
    await wait_until(lambda: a.registry.local_channel("7", ROOM).roster["u1"] == b'{"n":3}')
    assert len(infos) == 1


async def test_second_tab_does_not_announce_member_again(a, b, wait_until, truth):
    observer = await a.attach(ROOM, "watcher")
    tabs = [await worker.attach(ROOM, "u") for worker in (a, b, b)]
    for tab, worker in zip(tabs[:2], (a, b), strict=False):
        worker.leave(tab)
    await truth.settled([a, b])
    assert observer.frames == [("added", "u")]
    b.leave(tabs[2])
    await wait_until(lambda: observer.frames == [("added", "u"), ("removed", "u")])


async def test_joiners_of_one_tick_share_a_snapshot_and_get_no_frames(a, b, wait_until):
    early = await a.attach(ROOM, "early")
    together = [a.join(ROOM, f"u{n}") for n in range(5)]
    await wait_until(lambda: all(socket.state == "attached" for socket in together))
    everyone = {"early", *(f"u{n}" for n in range(5))}
    assert all(socket.snapshot == everyone and not socket.frames for socket in together)
    assert early.frames == [("added", f"u{n}") for n in range(5)]


async def test_full_channel_refuses_users_and_admits_their_tabs(a, b, wait_until, truth):
    await a.attach(ROOM, "u1", cap=2)
    await b.attach(ROOM, "u2", cap=2)
    third = b.join(ROOM, "u3", cap=2)
    other = a.join(ROOM, "u2", cap=2)
    await wait_until(lambda: "pending" not in (third.state, other.state))
    assert (third.state, third.reason, other.state) == ("refused", "members", "attached")
    await truth.settled([a, b])


async def test_user_missing_after_a_break_is_removed_at_the_second_look_only(start_worker, link, wait_until, truth):
    a = await start_worker(1, second_look_s=0.4)
    b = await start_worker(2)
    watcher = await a.attach(ROOM, "watcher")
    await b.attach(ROOM, "u")
    await wait_until(lambda: "u" in watcher.users)
    await b.kill()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await link.ask(b"FLUSHALL")
    await wait_until(lambda: ("removed", "u") in watcher.frames)
    assert loop.time() - began > 0.39
    await truth.settled([a])


async def test_user_who_is_asserted_before_the_second_look_makes_no_frame(start_worker, link, wait_until, truth):
    a, b = await start_worker(1, second_look_s=60), await start_worker(2)
    watcher = await a.attach(ROOM, "watcher")
    await b.attach(ROOM, "u")
    await wait_until(lambda: "u" in watcher.users)
    frames = list(watcher.frames)
    first_names = {a.registry.worker_id, b.registry.worker_id}
    await link.ask(b"FLUSHALL")
    # A beat that Redis answers before this line fences the worker first, and it takes one name more.
    a.link.drop("for the test")
    await wait_until(lambda: not first_names & {a.registry.worker_id, b.registry.worker_id})
    await truth.settled([a, b])
    # The second look, which comes when the test says so.
    local_channel = a.registry.local_channel("7", ROOM)
    a.registry._rosters._recheck(local_channel, a.registry._connection.breaks[local_channel.shard])
    assert local_channel.members.recheck
    await wait_until(lambda: not local_channel.members.recheck)
    await truth.settled([a, b])
    assert watcher.frames == frames


# -- rosters

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
