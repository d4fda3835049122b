"""Channels follow their app's record, a slice in each pass of the loop."""

from itertools import pairwise

from cluster.links import note_holds


async def test_setting_that_all_channels_follow_takes_one_slice_in_each_pass(start_worker, wait_until, make_app):
    worker = await start_worker()
    worker.app = make_app()
    sockets = [worker.join(f"news-{n}") for n in range(700)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    clock = iter(range(1_000_000))
    following, sync = worker.registry.following, worker.registry.sync
    sync.slices.clock = following.slices.clock = lambda: next(clock)
    calls = []
    note_holds(worker.registry, calls.append)
    followed = []
    follow = following.slices.step

    def note_followed():
        more = follow()
        followed.append(sum(local_channel.tally is not None for local_channel in worker.registry.local_channels()))
        return more

    following.slices.step = note_followed
    counting = make_app(subscription_count=True)
    worker.registry.app_changed(worker.app, counting)
    assert all(local_channel.tally is None for local_channel in worker.registry.local_channels())
    worker.app = counting
    late = worker.join("late")
    await wait_until(lambda: all(socket.counts == [1] for socket in [*sockets, late]))
    # "late" is counted before the first step, and then lies at some place of the walk.
    assert all(after - before in (99, 100) for before, after in pairwise([1, *followed[:6]]))
    assert followed[-1] == 701
    # The subscribe went out before them.
    assert calls[0] == "late"


async def test_app_that_is_gone_is_followed_no_longer(start_worker, make_app):
    worker = await start_worker()
    worker.app = make_app()
    await worker.attach("news")
    worker.registry.app_changed(worker.app, make_app(subscription_count=True))
    worker.registry.app_changed(worker.app, None)
    assert not worker.registry.following._step()
    assert worker.registry.local_channel("7", "news").tally is None
