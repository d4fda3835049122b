"""The data of charts: rates from counters of each worker."""

from redpoll.control.dashboard import series
from redpoll.control.dashboard.series import Sampler, Series
from redpoll.control.http.router import Route, no_times
from redpoll.control.observe.usage import Usage


class Server:
    """Counters as the sampler finds them, and clocks that move five seconds a sample. `now` is Unix time."""

    def __init__(self, usage=None, **options):
        self.now = 1000.0
        self.steady = 0.0
        self.workers = {}
        self.ended = {}
        self.webhooks = {}
        self.published = {}
        self.attempts = {}
        self.route = Route("POST", "/x", "x", None)
        self.sampler = Sampler(
            self.read,
            lambda: self.webhooks,
            lambda: self.published,
            lambda: self.attempts,
            clock=lambda: self.now,
            steady=lambda: self.steady,
            usage=usage,
            **options,
        )
        self.sampler.timed = (self.route,)

    async def read(self, ended=()):
        return self.workers | {f"{process}.0": self.ended[process] for process in ended}

    async def sample(self):
        self.now += 5
        self.steady += 5
        await self.sampler.sample()
        return self.sampler.whole.last()


class Noted(Usage):
    """`used` are the calls of `count`."""

    def __init__(self):
        super().__init__(None)
        self.used = []

    def count(self, *counts):
        self.used.append(counts)


def worker(received=0, sent=0, connections=0, **by_app):
    return {
        "connections": connections,
        "messages_received_total": received,
        "frames_posted_total": sent,
        "by_app": by_app,
    }


async def test_rates_are_growth_per_second_of_all_workers():
    server = Server()
    server.workers = {"a.1.0": worker(100, 1_000, 3), "b.1.0": worker(50, 0, 2)}
    assert (await server.sample())["received"] is None
    server.workers = {"a.1.0": worker(110, 1_500, 4), "b.1.0": worker(65, 0, 2)}
    last = await server.sample()
    assert (last["connections"], last["received"], last["sent"]) == (6, 5.0, 100.0)


async def test_clock_change_makes_no_peak_and_no_dip():
    server = Server()
    server.workers = {"a.1.0": worker(100)}
    await server.sample()
    for number, step in enumerate((-3_600, 3_600), 1):
        server.now += step
        server.workers = {"a.1.0": worker(100 + 50 * number)}
        assert (await server.sample())["received"] == 10
    assert server.sampler.whole.columns()["time"] == [1_005, -2_590, 1_015]


async def test_restarted_worker_makes_no_dip_and_no_peak():
    server = Server()
    server.workers = {"a.1.0": worker(1_000_000)}
    await server.sample()
    await server.sample()
    server.workers = {"a.2.0": worker(500)}
    assert (await server.sample())["received"] == 0
    server.workers = {"a.2.0": worker(510)}
    assert (await server.sample())["received"] == 2
    server.workers = {"a.2.0": worker(0)}
    assert (await server.sample())["received"] == 0


async def test_webhooks_are_counted_by_result_and_publishes_by_app():
    server = Server()
    server.webhooks = {"webhook_attempts_delivered_total": 10, "webhook_attempts_status_total": 5}
    server.published = {"3": 100}
    await server.sample()
    server.webhooks = {"webhook_attempts_delivered_total": 20, "webhook_attempts_status_total": 10}
    server.published = {"3": 150, "4": 0}
    server.workers = {"a.1.0": worker(**{"3": [7, 40, 90]})}
    last = await server.sample()
    assert (last["delivered"], last["failed"], last["published"]) == (2, 1, 10)
    server.workers = {"a.1.0": worker(**{"3": [8, 45, 190]})}
    server.attempts = {"3": (10, 5)}
    await server.sample()
    columns = server.sampler.of_app("3").last()
    assert (columns["connections"], columns["received"], columns["sent"], columns["published"]) == (8, 1, 20, 0)
    assert (columns["delivered"], columns["failed"]) == (2, 1)
    assert server.sampler.of_app("none").columns() == {"time": [], **{name: [] for name in series.NAMES}}


async def test_what_an_app_sent_before_it_was_first_seen_counts_and_once():
    """Its clients came and went between two samples. A worker with many apps doesn't report each of them each time."""
    usage = Noted()
    server = Server(usage)
    for by_app in ({}, {"3": [0, 4, 50]}, {}, {"3": [1, 4, 60]}):
        server.workers = {"a.1.0": worker(**by_app)}
        await server.sample()
    assert usage.used == [("3", 0, 0, 4, 50), ("3", 1, 0, 0, 10)]


async def test_usage_counts_this_nodes_workers_and_the_charts_those_of_all_nodes():
    usage = Noted()
    server = Server(usage, is_own=lambda worker: worker == "own.1.0")
    server.workers = {"own.1.0": worker(), "far.1.0": worker()}
    await server.sample()
    server.workers = {"own.1.0": worker(**{"3": [2, 5, 10]}), "far.1.0": worker(**{"3": [4, 10, 40], "4": [1, 5, 5]})}
    await server.sample()
    assert usage.used == [("3", 2, 0, 5, 10)]
    last = server.sampler.of_app("3").last()
    assert (last["connections"], last["received"], last["sent"]) == (6, 3, 10)


async def test_what_a_worker_counted_while_redis_could_not_be_read_is_used_and_is_no_peak():
    usage = Noted()
    server = Server(usage)
    workers = {
        "a.1.0": worker(10, 10, **{"3": [1, 4, 50]}),
        "b.1.0": worker(),
    }
    # None can be read; then the other one alone; then it has another name.
    for server.workers in (workers, {}, {"b.1.0": worker()}, {"a.1.1": worker(70, 70, **{"3": [1, 14, 110]})}):
        last = await server.sample()
    assert usage.used == [("3", 1, 0, 0, 0), ("3", 1, 0, 10, 60)]
    assert (last["received"], last["sent"]) == (0, 0)
    last = server.sampler.of_app("3").last()
    assert (last["received"], last["sent"]) == (0, 0)
    server.workers = {"a.1.1": worker(75, 80, **{"3": [1, 19, 130]})}
    last = await server.sample()
    assert (last["received"], last["sent"]) == (1, 2)
    assert usage.used[-1] == ("3", 1, 0, 5, 20)


async def test_last_sample_counts_what_this_nodes_workers_wrote_before_they_ended():
    usage = Noted()
    server = Server(usage, is_own=lambda worker: worker == "own.1.0")
    server.sampler.start()
    server.workers = {"own.1.0": worker(**{"3": [2, 4, 50]}), "far.1.0": worker()}
    await server.sample()
    server.workers, server.ended = {}, {"own.1": worker(**{"3": [0, 9, 80]})}
    await server.sampler.finish()
    assert [sum(counts) for counts in list(zip(*usage.used, strict=True))[2:]] == [0, 5, 30]


def has_series(server, app_id):
    return bool(server.sampler.of_app(app_id).columns()["time"])


async def test_app_with_traffic_gets_the_place_of_the_one_that_is_idle_for_the_longest_time(monkeypatch):
    monkeypatch.setattr(series, "_MAX_APPS", 2)
    server = Server()
    server.published = {"1": 1}
    await server.sample()
    server.published |= {"2": 1}
    await server.sample()
    server.published |= {"1": 2}
    await server.sample()
    server.published |= {"3": 1}
    # It has connections, but no traffic.
    server.workers = {"a.1.0": worker(**{"5": [1, 0, 0]})}
    await server.sample()
    assert [has_series(server, app_id) for app_id in "1235"] == [True, False, True, False]
    # Those that have a place keep it while they have traffic.
    server.published = {"1": 3, "2": 1, "3": 2, "4": 1}
    await server.sample()
    assert [has_series(server, app_id) for app_id in "1234"] == [True, False, True, False]


async def test_app_without_a_place_makes_no_peak_when_it_gets_one(monkeypatch):
    monkeypatch.setattr(series, "_MAX_APPS", 1)
    server = Server()
    server.attempts = {"1": (1, 0), "2": (100, 0)}
    await server.sample()
    server.attempts = {"1": (1, 0), "2": (105, 0)}
    await server.sample()
    assert server.sampler.of_app("2").last()["delivered"] == 1


async def test_deleted_app_loses_its_series():
    apps = {"1", "2"}
    server = Server(apps=apps)
    server.published = {"1": 1, "2": 1, "never": 1}
    await server.sample()
    assert [has_series(server, app_id) for app_id in ("1", "2", "never")] == [True, True, False]
    apps.discard("1")
    await server.sample()
    assert [has_series(server, app_id) for app_id in ("1", "2")] == [False, True]


async def test_deleted_app_is_counted_to_the_end_and_one_with_its_id_from_the_beginning():
    apps, usage = {"1", "2"}, Noted()
    server = Server(usage, apps=apps)
    server.workers = {"a.1.0": worker(**{"1": [0, 10, 100], "2": [0, 1, 1]})}
    server.published = {"1": 20, "2": 1}
    server.sampler.times_by_app = {"1": no_times(), "2": no_times()}
    await server.sample()
    apps.discard("1")
    server.workers = {"a.1.0": worker(**{"1": [0, 11, 102], "2": [0, 1, 1]})}
    server.published["1"] = 23
    await server.sample()
    assert usage.used[-2:] == [("1", 0, 3, 1, 2), ("2", 0, 0, 0, 0)]
    assert (server.published, [*server.sampler.times_by_app]) == ({"2": 1}, ["2"])
    server.workers = {"a.1.0": worker(**{"2": [0, 1, 1]})}
    await server.sample()
    apps.add("1")
    server.workers = {"a.1.0": worker(**{"1": [0, 4, 5], "2": [0, 1, 1]})}
    server.published["1"] = 6
    await server.sample()
    assert usage.used[-2:] == [("1", 0, 6, 4, 5), ("2", 0, 0, 0, 0)]


async def test_attempts_of_a_deleted_app_are_forgotten_and_one_with_its_id_is_counted_from_the_beginning():
    apps = {"1", "2"}
    server = Server(apps=apps)
    server.attempts = {"1": (20, 10), "2": (1, 0)}
    await server.sample()
    apps.discard("1")
    await server.sample()
    assert server.attempts == {"2": (1, 0)}
    apps.add("1")
    server.attempts["1"] = (10, 5)
    await server.sample()
    last = server.sampler.of_app("1").last()
    assert (last["delivered"], last["failed"]) == (2, 1)


async def test_counters_of_an_older_worker_are_accepted():
    server = Server()
    server.workers = {"a.1.0": worker(**{"3": [7, 40]})}
    await server.sample()
    await server.sample()
    assert (server.sampler.of_app("3").last()["connections"], server.sampler.of_app("3").last()["sent"]) == (7, 0)


async def test_latency_of_an_app_is_of_its_own_publishes():
    server = Server()
    server.published = {"3": 1, "4": 1}
    slow = no_times()
    # 0.2 s are less than 2^18 µs.
    slow[18] = 5
    server.sampler.times_by_app = {"3": slow}
    await server.sample()
    assert 100 < server.sampler.of_app("3").last()["p50_ms"] < 260
    assert server.sampler.of_app("4").last()["p50_ms"] is None
    await server.sample()
    assert server.sampler.of_app("3").last()["p50_ms"] is None


async def test_latency_is_of_the_publishes_since_the_last_sample():
    server = Server()
    assert (await server.sample())["p50_ms"] is None
    for _ in range(99):
        server.route.count(200, 0.001)
    server.route.count(200, 0.5)
    last = await server.sample()
    assert 0.4 < last["p50_ms"] < 1.1
    assert 0.4 < last["p99_ms"] < 1.1
    server.route.count(200, 0.5)
    assert 250 < (await server.sample())["p99_ms"] < 600
    assert (await server.sample())["p99_ms"] is None


def test_samples_of_one_hour_are_stored():
    samples = Series(("a",))
    for at in range(series.MAX_SAMPLES + 10):
        samples.add(float(at), {"a": at})
    columns = samples.columns()
    assert len(columns["time"]) == series.MAX_SAMPLES
    assert (columns["a"][0], columns["a"][-1]) == (10, series.MAX_SAMPLES + 9)
