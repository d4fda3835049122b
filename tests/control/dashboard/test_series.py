"""The data of charts: rates from counters of each worker."""

from redpoll.control.dashboard import series
from redpoll.control.dashboard.series import Sampler, Series
from redpoll.control.http.router import Route, no_times
from redpoll.control.observe.usage import Usage


class Server:
    """Counters as the sampler finds them, and a clock that moves five seconds a sample."""

    def __init__(self, usage=None, **options):
        self.now = 1000.0
        self.workers = {}
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
            usage=usage,
            **options,
        )
        self.sampler.timed = (self.route,)

    async def read(self):
        return self.workers

    async def sample(self):
        self.now += 5
        await self.sampler.sample()
        return self.sampler.whole.last()


def worker(received=0, sent=0, connections=0, **by_app):
    return {
        "connections": connections,
        "messages_received_total": received,
        "frames_posted_total": sent,
        "by_app": by_app,
    }


async def test_rates_are_growth_per_second_of_all_workers():
    server = Server()
    server.workers = {"a": worker(100, 1_000, 3), "b": worker(50, 0, 2)}
    assert (await server.sample())["received"] is None
    server.workers = {"a": worker(110, 1_500, 4), "b": worker(65, 0, 2)}
    last = await server.sample()
    assert (last["connections"], last["received"], last["sent"]) == (6, 5.0, 100.0)


async def test_restarted_worker_makes_no_dip_and_no_peak():
    server = Server()
    server.workers = {"a.1": worker(1_000_000)}
    await server.sample()
    await server.sample()
    server.workers = {"a.2": worker(500)}
    assert (await server.sample())["received"] == 0
    server.workers = {"a.2": worker(510)}
    assert (await server.sample())["received"] == 2
    server.workers = {"a.2": worker(0)}
    assert (await server.sample())["received"] == 0


async def test_webhooks_are_counted_by_result_and_publishes_by_app():
    server = Server()
    server.webhooks = {"webhook_attempts_delivered_total": 10, "webhook_attempts_status_total": 5}
    server.published = {"3": 100}
    await server.sample()
    server.webhooks = {"webhook_attempts_delivered_total": 20, "webhook_attempts_status_total": 10}
    server.published = {"3": 150, "4": 0}
    server.workers = {"a": worker(**{"3": [7, 40, 90]})}
    last = await server.sample()
    assert (last["delivered"], last["failed"], last["published"]) == (2, 1, 10)
    server.workers = {"a": worker(**{"3": [8, 45, 190]})}
    server.attempts = {"3": (10, 5)}
    await server.sample()
    columns = server.sampler.of_app("3").last()
    assert (columns["connections"], columns["received"], columns["sent"], columns["published"]) == (8, 1, 20, 0)
    assert (columns["delivered"], columns["failed"]) == (2, 1)
    assert server.sampler.of_app("none").columns() == {"time": [], **{name: [] for name in series.NAMES}}


async def test_what_an_app_sent_before_it_was_first_seen_counts_and_once():
    """Its clients came and went between two samples. A worker with many apps doesn't report each of them each time."""
    used = []

    class Noted(Usage):
        def count(self, *counts):
            used.append(counts)

    server = Server(Noted(None))
    for by_app in ({}, {"3": [0, 4, 50]}, {}, {"3": [1, 4, 60]}):
        server.workers = {"a": worker(**by_app)}
        await server.sample()
    assert used == [("3", 0, 0, 4, 50), ("3", 1, 0, 0, 10)]


async def test_usage_counts_this_nodes_workers_and_the_charts_those_of_all_nodes():
    used = []

    class Noted(Usage):
        def count(self, *counts):
            used.append(counts)

    server = Server(Noted(None), is_own=lambda worker: worker == "own")
    server.workers = {"own": worker(), "far": worker()}
    await server.sample()
    server.workers = {"own": worker(**{"3": [2, 5, 10]}), "far": worker(**{"3": [4, 10, 40], "4": [1, 5, 5]})}
    await server.sample()
    assert used == [("3", 2, 0, 5, 10)]
    last = server.sampler.of_app("3").last()
    assert (last["connections"], last["received"], last["sent"]) == (6, 3, 10)


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
    server.workers = {"a": worker(**{"5": [1, 0, 0]})}
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


async def test_counters_of_an_older_worker_are_accepted():
    server = Server()
    server.workers = {"a": worker(**{"3": [7, 40]})}
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
