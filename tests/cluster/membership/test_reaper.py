import asyncio

import pytest
from msgspec import structs
from msgspec.structs import replace
from structlog.testing import capture_logs

from helpers.known_nodes import known
from helpers.unkeyed import shard
from redpoll.cluster.membership.hold_call import hold_keys
from redpoll.cluster.membership.reaper import Beats, Reaper
from redpoll.cluster.outbox import Outbox
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.redis.scripts import BURY, HOLD

RUN = "0123456789ab"
ROOM = "presence-room"


@pytest.fixture
async def reaper(link, keys):
    """Control's reaper, which looks twenty times as often."""
    reaper = Reaper(link, keys, RUN, read_s=0.05)
    task = asyncio.ensure_future(reaper.run())
    yield reaper
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# Which workers count as dead


def look(beats: Beats, now: float, **table: int) -> list[str]:
    beats.read({w.replace("_", "."): b"%d" % beat for w, beat in table.items()}, now)
    return beats.dead()


def test_beat_that_stayed_the_same_over_four_further_looks_is_a_dead_worker():
    beats = Beats("r")
    dead = [look(beats, float(now), x_1_0=7, x_2_0=now) for now in range(5)]
    assert dead == [[], [], [], [], ["x.1.0"]]


def test_changed_beat_restarts_the_count():
    beats = Beats("r")
    for now in range(4):
        assert look(beats, float(now), x_1_0=7) == []
    assert look(beats, 4.0, x_1_0=8) == []
    for now in range(5, 8):
        assert look(beats, float(now), x_1_0=8) == []
    assert look(beats, 8.0, x_1_0=8) == ["x.1.0"]


def test_stall_of_more_than_two_seconds_restarts_the_count():
    beats = Beats("r")
    for now in range(4):
        look(beats, float(now), x_1_0=7)
    assert look(beats, 5.5, x_1_0=7) == []
    for now in range(3):
        assert look(beats, 6.5 + now, x_1_0=7) == []
    assert look(beats, 9.5, x_1_0=7) == ["x.1.0"]


def test_given_up_beat_is_dead_at_once():
    assert look(Beats("r"), 0.0, x_1_0=-1) == ["x.1.0"]


def test_supervisors_list_decides_only_about_its_own_processes():
    beats = Beats("aa")
    beats.set_alive({2, 4}, 4)
    dead = look(beats, 0.0, aa_1_0=3, aa_2_0=3, aa_3_1=3, aa_4_0=3, aa_5_0=3, bb_1_0=3)
    assert dead == ["aa.1.0", "aa.3.1"]


def test_missing_beats_do_not_make_a_process_dead_that_the_supervisor_lists():
    beats = Beats("aa")
    beats.set_alive({1, 2}, 2)
    # A listed one, one that started after the list was made, and one of a supervisor that is gone.
    for now in range(5):
        dead = look(beats, float(now), aa_1_0=7, aa_3_0=7, bb_1_0=7)
    assert dead == ["bb.1.0"]
    beats.set_alive({2}, 2)
    assert look(beats, 5.0, aa_1_0=7, aa_3_0=7) == ["aa.1.0"]


def test_earlier_name_of_a_living_process_is_dead_by_its_beats():
    beats = Beats("aa")
    beats.set_alive({1}, 1)
    dead = [look(beats, float(now), aa_1_0=7, aa_1_2=7, aa_1_10=7) for now in range(5)]
    assert dead == [[], [], [], [], ["aa.1.0", "aa.1.2"]]


def test_workers_of_a_dead_node_are_dead_at_once_but_not_those_that_return_before_its_supervisor():
    """A node that was cut off from Redis returned, and its members left and came back three times."""
    beats = Beats("aa")
    alive = known("bb", workers=(1,), greatest=1)
    beats.set_nodes({"bb": alive})
    assert look(beats, 0.0, bb_1_0=7) == []
    beats.set_nodes({"bb": replace(alive, alive=False)})
    assert look(beats, 1.0, bb_1_0=7) == ["bb.1.0"]
    # Its worker was fenced and took its next name.
    for second in range(4):
        assert look(beats, 2.0 + second, bb_1_1=second) == []
        assert not beats.is_reported_dead("bb.1.1")
    beats.set_nodes({"bb": alive})
    assert look(beats, 6.0, bb_1_1=4) == []
    # Dead again, together with its node.
    beats.set_nodes({"bb": replace(alive, alive=False)})
    assert look(beats, 7.0, bb_1_1=4) == ["bb.1.1"]


def test_worker_that_returned_without_its_supervisor_is_dead_by_its_beats():
    beats = Beats("aa")
    beats.set_nodes({"bb": known("bb", alive=False, workers=(1,), greatest=1)})
    assert look(beats, 0.0) == []
    for second in range(4):
        assert look(beats, 1.0 + second, bb_1_1=7) == []
    assert look(beats, 5.0, bb_1_1=7) == ["bb.1.1"]


def test_without_a_list_of_the_supervisor_no_worker_is_dead():
    assert look(Beats("aa"), 0.0, aa_0_0=1) == []


# Reaping


async def test_killed_worker_is_reaped_when_the_supervisor_reports_it(reaper, start_worker, truth, wait_until, link):
    reaper.set_alive({1, 2}, 2)
    a, b = await start_worker(1), await start_worker(2)
    watcher = a.join(ROOM, "watcher")
    users = [b.join(ROOM, f"u{n}") for n in range(250)]
    shared = [a.join(ROOM, "both"), b.join(ROOM, "both"), a.join("news"), b.join("news"), b.join("only")]
    await wait_until(lambda: all(socket.state == "attached" for socket in [watcher, *users, *shared]))
    await wait_until(lambda: len(watcher.users) == 252)
    await b.kill()
    reaper.set_alive({1}, 2)
    await wait_until(lambda: reaper.reaped == 1)
    await truth.settled([a])
    removed = [user for what, user in watcher.frames if what == "removed"]
    assert sorted(removed) == sorted(f"u{n}" for n in range(250))
    assert await link.ask(b"KEYS", f"*{b.registry.worker_id}*".encode()) == []
    await wait_until(lambda: reaper.workers() == [a.registry.worker_id])


async def test_reap_of_many_channels_sends_few_calls_at_a_time(link, keys, start_worker, wait_until, truth):
    """A reap made a task for each of 250,000 channels, all in one iteration of control's loop."""
    b = await start_worker(2)
    sockets = [b.join(f"room-{n}") for n in range(600)] + [b.join(f"presence-{n}", "u") for n in range(60)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await b.kill()
    reaper = Reaper(link, keys, "r")
    tasks, unanswered = [], []

    async def watch() -> None:
        while True:
            tasks.append(len(asyncio.all_tasks()))
            unanswered.append(link.unanswered)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    before = len(asyncio.all_tasks())
    await reaper.reap(b.registry.worker_id)
    watching.cancel()
    # The 64 shards are fenced and buried at once.
    assert max(tasks) - before <= 70
    assert max(unanswered) <= 70
    await truth.settled([])


async def test_worker_that_stops_beating_is_reaped_only_when_the_supervisor_reports_it(
    reaper, start_worker, truth, wait_until
):
    reaper.set_alive({1, 2}, 2)
    a, b = await start_worker(1, beat_s=0.01), await start_worker(2, beat_s=0.01)
    # A worker of another run that ends at the same time shows how long four reads take.
    other = await start_worker(9, run="aaaaaaaaaaaa", beat_s=0.01)
    sockets = [a.join(ROOM, "watcher"), b.join(ROOM, "u"), b.join("news")]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await b.kill()
    await other.kill()
    await wait_until(lambda: reaper.reaped == 1)
    assert sorted(reaper.workers()) == [a.registry.worker_id, b.registry.worker_id]
    assert sockets[0].users == {"watcher", "u"}
    reaper.set_alive({1}, 2)
    await wait_until(lambda: reaper.reaped == 2)
    await truth.settled([a])
    assert sockets[0].users == {"watcher"}


async def test_worker_of_an_earlier_supervisor_is_judged_by_its_beats(reaper, start_worker, truth, wait_until):
    reaper.set_alive(set(), 9)
    a = await start_worker(1, run="aaaaaaaaaaaa", beat_s=0.01)
    socket = a.join(ROOM, "u")
    await wait_until(lambda: socket.state == "attached")
    await wait_until(lambda: reaper.workers() == [a.registry.worker_id])
    assert reaper.reaped == 0
    await a.kill()
    await wait_until(lambda: reaper.reaped == 1)
    await truth.settled([])


async def test_hung_worker_comes_back_under_its_next_name(reaper, start_worker, truth, wait_until):
    a, b = [await start_worker(k, run="aaaaaaaaaaaa", beat_s=0.01) for k in (1, 2)]
    watcher, own = a.join(ROOM, "watcher"), b.join(ROOM, "u")
    await wait_until(lambda: own.state == watcher.state == "attached")
    await b.stop_beats()
    await wait_until(lambda: reaper.reaped == 1)
    await wait_until(lambda: ("removed", "u") in watcher.frames)
    b.registry.incarnation.start()
    await wait_until(lambda: b.registry.worker_id.endswith(".1"))
    await truth.settled([a, b])
    assert watcher.users == {"watcher", "u"}
    assert own.state == "attached"


async def test_reap_that_broke_off_at_any_step_is_finished_by_the_next(link, keys, start_worker, truth, wait_until):
    a, b = await start_worker(1), await start_worker(2)
    watcher = a.join(ROOM, "watcher")
    sockets = [b.join(ROOM, f"u{n}") for n in range(350)] + [b.join(f"news-{n}") for n in range(30)]
    await wait_until(lambda: all(socket.state == "attached" for socket in [watcher, *sockets]))
    await b.kill()
    calls = 0

    class Breaks:
        """Control's link, which breaks after the n-th command."""

        clock = staticmethod(link.clock)

        def __init__(self, after: int) -> None:
            self.left = after

        def count(self) -> None:
            nonlocal calls
            calls += 1
            self.left -= 1
            if self.left < 0:
                raise LinkDown(sent=True)

        async def ask(self, *command):
            self.count()
            return await link.ask(*command)

        async def execute(self, *run):
            self.count()
            return await link.execute(*run)

        def run(self, script, keys, args, done):
            try:
                self.count()
            except LinkDown as error:
                asyncio.get_running_loop().call_soon(done, error)
            else:
                link.run(script, keys, args, done)

    for after in (0, 1, 30, 65, 66, 67, 69, 72, 76, 82, 95, 110):
        with pytest.raises(LinkDown):
            await Reaper(Breaks(after), keys, RUN).reap(b.registry.worker_id)
    await Reaper(Breaks(10_000), keys, RUN).reap(b.registry.worker_id)
    await truth.settled([a])
    assert len([1 for what, _ in watcher.frames if what == "removed"]) == 350
    assert await link.ask(b"KEYS", f"*{b.registry.worker_id}*".encode()) == []


async def test_worker_that_ended_cleanly_is_not_reaped(link, keys, start_worker, wait_until):
    a = await start_worker(1)
    w = a.registry.worker_id
    assert await a.registry.finish(timeout_s=60)
    await Reaper(link, keys, RUN).reap(w)
    assert await link.ask(b"KEYS", b"*") == []


async def test_reap_fails_while_redis_is_away_and_succeeds_when_it_is_back(
    own_redis, start_worker, make_truth, keys, wait_until
):
    truth = await make_truth(own_redis)
    reaper = Reaper(truth.link, keys, RUN, read_s=0.05)
    task = asyncio.ensure_future(reaper.run())
    a, b = await start_worker(1, server=own_redis), await start_worker(2, server=own_redis)
    reaper.set_alive({1, 2}, 2)
    sockets = [a.join(ROOM, "watcher"), *(b.join(ROOM, f"u{n}") for n in range(50))]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    own_redis.kill()
    await b.kill()
    reaper.set_alive({1}, 2)
    own_redis.start()
    await wait_until(lambda: reaper.reaped == 1)
    await truth.settled([a])
    assert sockets[0].users == {"watcher"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_name_that_no_worker_has_stops_no_reap(reaper, start_worker, link, keys, wait_until):
    """Another program that uses our Redis and prefix, or a person, may write anything."""
    a = await start_worker(1)
    with capture_logs() as logs:
        await link.ask(b"HSET", keys.beat, b"foreign", b"1", b"\xff", b"1", f"{RUN}.one.0", b"1")
        await a.kill()
        reaper.set_alive(set(), 1)
        await wait_until(lambda: reaper.reaped == 1)
    assert len([line for line in logs if line["event"] == "heartbeat with an unknown name"]) == 3


async def test_own_bug_ends_no_reaping(reaper, start_worker, wait_until, monkeypatch):
    faults = [ZeroDivisionError(), ZeroDivisionError()]
    read = Beats.read

    def failing(self, *args):
        if faults:
            raise faults.pop()
        read(self, *args)

    a = await start_worker(1)
    with capture_logs() as logs:
        monkeypatch.setattr(Beats, "read", failing)
        await wait_until(lambda: not faults)
        await a.kill()
        reaper.set_alive(set(), 1)
        await wait_until(lambda: reaper.reaped == 1)
    assert [line["event"] for line in logs if "exc_info" in line] == ["heartbeats not handled"] * 2


async def test_unanswered_look_closes_the_connection(link, keys, redis, wait_until):
    reaper = Reaper(link, keys, RUN, read_s=0.05, unanswered_s=0.1)
    downs = []
    link.on_down = downs.append
    task = asyncio.ensure_future(reaper.run())
    redis.pause()
    try:
        await wait_until(lambda: downs)
    finally:
        redis.resume()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "unanswered" in downs[0]
    await wait_until(lambda: link.up)


async def test_dead_worker_is_reaped_when_redis_has_no_memory_left(link, keys, start_worker, wait_until, full):
    b = await start_worker(2)
    sockets = [b.join(ROOM, f"u{n}") for n in range(3)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await b.kill()
    async with full():
        await Reaper(link, keys, RUN).reap(b.registry.worker_id)
    assert await link.ask(b"EXISTS", keys.members("7", ROOM)) == 0
    assert await link.ask(b"HLEN", keys.beat) == 0


async def test_floor_lets_a_second_reaper_find_users_that_remain(link, keys, start_worker, wait_until):
    b = await start_worker(2)
    sockets = [b.join(ROOM, f"u{n}") for n in range(3)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await b.kill()
    w, at = b.registry.worker_id, shard("7", ROOM)
    await link.ask(b"HSET", keys.worker(at, w), "gen", -1)
    names = hold_keys(keys, w, "7", ROOM, "p", "u")
    args = [w, -1, "p", "u", "7", ROOM, 0, 0, keys.topic("7", ROOM), keys.publish, 1, 0, "u0"]
    await link.execute(HOLD, names, args)
    assert await link.execute(BURY, names[:1]) == 0
    await Reaper(link, keys, RUN).reap(w)
    assert await link.ask(b"EXISTS", keys.members("7", ROOM)) == 0


async def test_worker_of_an_earlier_record_store_is_reaped_where_its_channels_are(link, keys, start_worker, wait_until):
    """The data folder's records were deleted after a crash, but not its Redis: another shard key has other shards, and
    the reaper looked there for ever."""
    b = await start_worker(2)
    sockets = [b.join(ROOM, f"u{n}") for n in range(150)] + [b.join(f"a{n}") for n in range(50)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await b.kill()
    other = Keys(keys.prefix, shard_key=bytes(range(16)))
    assert other.shard("7", ROOM) != keys.shard("7", ROOM)
    async with asyncio.timeout(60):
        await Reaper(link, other, RUN).reap(b.registry.worker_id)
    left = [key for key in await link.ask(b"KEYS", b"*") if not key.endswith((b":clock", b":dir", b":dirver"))]
    assert left == []


# Webhook rows of dead workers


async def leave_dead(worker, wait_until, channels):
    worker.app = structs.replace(worker.app, hooks="om")
    sockets = [worker.join(channel, f"u{n}") for channel in channels for n in range(150)] + [worker.join("news")]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await worker.kill()


async def rows_of(outbox) -> list[str]:
    rows, drained = [], await outbox.take()
    while drained.rows:
        rows += drained.rows
        outbox.committed(drained.rows)
        drained = await outbox.take()
    return sorted(f"{row.event} {row.channel} {row.user or ''}".strip() for row in rows)


async def test_reaper_writes_the_rows_of_a_dead_workers_members_and_channels(link, keys, start_worker, wait_until):
    b = await start_worker(2)
    await leave_dead(b, wait_until, [ROOM])
    outbox, patient = Outbox(link, keys, 0), Outbox(link, keys, 60)
    assert len(await rows_of(outbox)) == 152
    reaper = Reaper(link, keys, RUN, hooks_of={"7": "om"}.__getitem__)
    await reaper.reap(b.registry.worker_id)
    assert await rows_of(patient) == []
    assert patient.leaves == 152
    await reaper.reap(b.registry.worker_id)
    expected = [f"channel.vacated {ROOM}", "channel.vacated news"]
    assert await rows_of(outbox) == sorted(expected + [f"member.removed {ROOM} u{n}" for n in range(150)])


async def test_reaper_without_a_debounce_writes_rows_at_once(link, keys, start_worker, wait_until):
    b = await start_worker(2)
    await leave_dead(b, wait_until, [ROOM])
    await rows_of(patient := Outbox(link, keys, 60))
    await Reaper(link, keys, RUN, hooks_of=lambda app_id: "o", debounce_s=0).reap(b.registry.worker_id)
    assert await rows_of(patient) == ["channel.vacated news", f"channel.vacated {ROOM}"]


async def test_living_worker_that_is_reaped_returns_without_a_row(link, keys, start_worker, wait_until, truth):
    a = await start_worker(1, debounce_s=60)
    a.app = structs.replace(a.app, hooks="om")
    sockets = [a.join(ROOM, "u"), a.join("news")]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    # The debounce is over when the test says so: the worker may take long to return.
    outbox = Outbox(link, keys, 60)
    assert len(await rows_of(outbox)) == 3
    await Reaper(link, keys, RUN, hooks_of=lambda app_id: "om").reap(a.registry.worker_id)
    await wait_until(lambda: a.registry.worker_id.endswith(".1"))
    await truth.settled([a])
    assert await rows_of(outbox) == []
    assert outbox.leaves == 0


async def test_living_worker_that_returns_too_late_makes_rows_for_both(link, keys, start_worker, wait_until, truth):
    a = await start_worker(1)
    a.app = structs.replace(a.app, hooks="om")
    sockets = [a.join(ROOM, "u"), a.join("news")]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    outbox = Outbox(link, keys, 0)
    before = await rows_of(outbox)
    await a.stop_beats()
    await Reaper(link, keys, RUN, hooks_of=lambda app_id: "om").reap(a.registry.worker_id)
    after = ["channel.vacated news", f"channel.vacated {ROOM}", f"member.removed {ROOM} u"]
    assert await rows_of(outbox) == after
    a.registry.incarnation.start()
    await wait_until(lambda: a.registry.worker_id.endswith(".1"))
    await truth.settled([a])
    assert await rows_of(outbox) == before
