"""Channels follow their app's record, a slice in each pass of the loop."""

from itertools import pairwise
from types import SimpleNamespace

from cluster.links import note_holds
from redpoll.cluster.membership.following import Following


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


class Walked:
    """1,000 channels of 100 apps, which note the records that they follow; `walked` is how many were looked at."""

    def __init__(self, make_app) -> None:
        self.walked = 0
        self.channels = [self.channel(str(n % 100)) for n in range(1_000)]
        self.apps = [make_app(id=str(n)) for n in range(100)]
        events = SimpleNamespace(settings_changed=lambda local_channel: None)
        self.following = Following(SimpleNamespace(slice_by_slice=self.slice_by_slice), None, None, events)

    def channel(self, app_id):
        made = SimpleNamespace(app_id=app_id, dropped=False, needs_position=False, records=[])
        made.apply_settings = made.records.append
        return made

    def slice_by_slice(self):
        for channel in self.channels:
            self.walked += 1
            yield channel

    def change_all(self, make_app):
        changed = [make_app(id=app.id, max_data_bytes=1_000) for app in self.apps]
        for before, after in zip(self.apps, changed, strict=True):
            self.following.changed(before, after)
        return changed


async def test_many_changed_apps_take_one_walk(make_app):
    """`redpoll apply` with 1,000 apps took a walk over all channels of the worker for each."""
    some = Walked(make_app)
    changed = some.change_all(make_app)
    while some.following.slices.step():
        pass
    assert some.walked == 1_000
    assert all(channel.records == [changed[int(channel.app_id)]] for channel in some.channels)


async def test_app_that_changes_during_the_walk_is_followed_in_another_one_with_its_last_record(make_app):
    some = Walked(make_app)
    changed = some.change_all(make_app)
    some.following.slices.step()
    last = make_app(id="3", max_data_bytes=2_000)
    some.following.changed(changed[3], last)
    some.following.stop("4")
    while some.following.slices.step():
        pass
    assert some.walked == 2_000
    by_app = {app_id: [c.records for c in some.channels if c.app_id == app_id] for app_id in ("3", "4", "5")}
    assert by_app["3"] == [[changed[3], last], *[[last]] * 9]
    assert by_app["4"] == [[changed[4]], *[[]] * 9]
    assert by_app["5"] == [[changed[5]]] * 10
