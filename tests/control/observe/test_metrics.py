"""/metrics, parsed with Prometheus' own parser."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.stats import Stats
from redpoll.control.http.router import Route, Routes
from redpoll.control.observe.metrics import FAMILIES, Metrics, catalog
from redpoll.control.tracing.latency import PublishLatency
from redpoll.ipc.messages import LivingWorkers


async def handler(call):
    raise AssertionError("never called here")


@pytest.fixture
def routes():
    return Routes([Route("GET", "/a", "a", handler), Route("GET", "/b", "b", handler)])


def samples(body):
    """(name, labels) → value."""
    families = text_string_to_metric_families(body.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def scraped(routes, workers, own=None):
    async def read():
        return workers

    answer = await Metrics(lambda: routes, read, lambda: own or {}).metrics(None)
    assert answer.headers.startswith(b"Content-Type: text/plain")
    return samples(answer.body)


async def test_every_known_counter_is_shown_per_worker(routes):
    counters = {name: float(number) for number, name in enumerate(FAMILIES, 1)}
    found = await scraped(routes, {"run.1.1": counters, "run.2.1": counters})
    for name, family in FAMILIES.items():
        labels = {"worker": "run.1.1"} | ({family.label: family.reason} if family.reason else {})
        assert found[family.name, tuple(sorted(labels.items()))] == counters[name]
    assert found["redpoll_connections", (("worker", "run.2.1"),)] == counters["connections"]


async def test_no_metric_is_declared_twice(routes):
    routes.all[0].count(200, 0.001)
    counters = dict.fromkeys(FAMILIES, 1.0)

    async def read():
        return {"w": counters}

    answer = await Metrics(lambda: routes, read, lambda: counters).metrics(None)
    declared = [line.split()[2] for line in answer.body.decode().splitlines() if line.startswith("# TYPE ")]
    assert sorted(declared) == sorted(set(declared))


async def test_drops_are_one_family_with_a_reason_label(routes):
    found = await scraped(routes, {"w": {"slow_consumers_closed_total": 3, "send_errors_total": 4}})
    assert found["redpoll_dropped_total", (("reason", "slow_consumer"), ("worker", "w"))] == 3
    assert found["redpoll_dropped_total", (("reason", "send_error"), ("worker", "w"))] == 4


async def test_unknown_counters_are_left_out(routes):
    found = await scraped(routes, {"w": {"of_another_version": 1, "connections": 2}})
    assert found["redpoll_connections", (("worker", "w"),)] == 2
    assert not any("another_version" in name for name, _ in found)


async def test_redis_connection_state_is_1_for_the_current_state_and_0_for_others(routes):
    found = await scraped(routes, {"w": {"redis_connection_state": "reasserting"}, "of_another_version": {}})
    states = {labels: value for (name, labels), value in found.items() if name == "redpoll_redis_connection_state"}
    assert {dict(labels)["state"]: value for labels, value in states.items()} == {
        "down": 0,
        "registering": 0,
        "reasserting": 1,
        "open": 0,
        "partly": 0,
        "fenced": 0,
    }
    assert {dict(labels)["worker"] for labels in states} == {"w"}


async def test_requests_are_counted_by_route_and_status_and_timed(routes):
    route = routes.all[0]
    for seconds in (0.000_003, 0.000_9, 30.0):
        route.count(200, seconds)
    route.count(404, 0.000_003)
    found = await scraped(routes, {})
    assert found["redpoll_http_requests_total", (("route", "a"), ("status", "200"))] == 3
    assert found["redpoll_http_requests_total", (("route", "a"), ("status", "404"))] == 1

    def at_most(bound):
        return found["redpoll_http_request_seconds_bucket", (("le", bound), ("route", "a"))]

    assert (at_most("4e-06"), at_most("0.000512"), at_most("0.001024"), at_most("+Inf")) == (2, 2, 3, 4)
    assert found["redpoll_http_request_seconds_count", (("route", "a"),)] == 4
    assert found["redpoll_http_request_seconds_sum", (("route", "a"),)] == pytest.approx(30.000_906)
    assert not any(("route", "b") in labels for _, labels in found)


async def test_metrics_over_http_include_workers_and_the_control_plane(plane):
    link = plane.plane.link
    await link.ask(b"HSET", Keys("rp").beat, "0123456789ab.1.1", 1)
    Stats(link, Keys("rp")).write("0123456789ab.1.1", {"connections": 7}, {})
    plane.plane.receive(LivingWorkers([1], 1))
    await plane.trigger()
    reply = await plane.ask("GET", "/metrics")
    assert reply.status == 200
    found = samples(reply.body)
    assert found["redpoll_connections", (("worker", "0123456789ab.1.1"),)] == 7
    assert found["redpoll_events_published_total", (("worker", "control"),)] == 1
    assert found["redpoll_apps", (("worker", "control"),)] == 2
    assert found["redpoll_loop_exceptions_total", (("worker", "control"),)] == 0


async def test_metrics_per_app_are_limited_to_100_apps(routes):
    by_app = {str(app_id): [app_id, 2 * app_id, 3 * app_id] for app_id in range(150)}

    async def workers():
        return {"w.1": {"by_app": by_app}, "w.2": {"by_app": {"149": [1, 1, 1]}}}

    metrics = Metrics(lambda: routes, workers, dict, lambda: {"149": 7, "quiet": 5})
    text = (await metrics.metrics(None)).body.decode()
    assert 'redpoll_app_connections{app="149"} 150.0' in text
    assert 'redpoll_app_client_events_total{app="149"} 299.0' in text
    assert 'redpoll_app_events_sent_total{app="149"} 448.0' in text
    assert 'redpoll_app_events_published_total{app="149"} 7.0' in text
    assert text.count("redpoll_app_connections{") == 100
    assert "quiet" not in text


async def test_apps_are_added_up_in_slices(routes, monkeypatch):
    monkeypatch.setattr("redpoll.loop.slices.SLICE_S", -1)
    by_app = {str(app_id): [1, 1, 1] for app_id in range(1_000)}
    passes = 0

    async def others():
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await scraped(routes, {"w.1": {"by_app": by_app}, "w.2": {"by_app": by_app}})
    running.cancel()
    assert passes >= 100


async def test_latency_of_events_is_a_histogram_by_source(routes):
    latency = PublishLatency()
    latency.began("a", 1_000_000, "http")
    latency.written("a", 1_003_000)
    latency.written("a", 1_030_000)

    async def workers():
        return {}

    found = samples((await Metrics(lambda: routes, workers, dict, dict, latency).metrics(None)).body)

    def at_most(bound, source="http"):
        return found["redpoll_publish_to_socket_seconds_bucket", (("le", bound), ("source", source))]

    assert (at_most("0.002048"), at_most("0.004096"), at_most("0.032768"), at_most("+Inf")) == (0, 1, 2, 2)
    assert at_most("+Inf", "client") == 0
    assert found["redpoll_publish_to_socket_seconds_sum", (("source", "http"),)] == pytest.approx(0.033)


async def test_catalog_has_every_metric_of_a_running_server(plane):
    await plane.trigger()
    shown = text_string_to_metric_families((await plane.ask("GET", "/metrics")).body.decode())
    known = {(metric.name, metric.type, metric.documentation) for metric in catalog()}
    assert {(metric.name, metric.type, metric.documentation) for metric in shown} <= known
