"""How a path finds its route."""

import pytest

from redpoll.control.http.router import Route, Routes, slot_bound_s


async def handler(call):
    raise AssertionError("never called here")


@pytest.fixture
def routes():
    return Routes(
        [
            Route("GET", "/", "root", handler),
            Route("POST", "/apps/{app_id}/events", "events", handler),
            Route("GET", "/apps/{app_id}/channels/{channel}/users", "users", handler),
            Route("GET", "/apps/{app_id}/channels/{channel}", "channel", handler),
            Route("DELETE", "/apps/{app_id}/channels/{channel}", "forget", handler),
            Route("GET", "/healthz", "healthz", handler),
        ]
    )


def found(routes, path, method="GET"):
    by_method, parameters = routes.find(path)
    return by_method[method].name, parameters


def test_the_api_has_the_same_routes_under_both_prefixes(routes):
    assert found(routes, "/apps/7/events", "POST") == ("events", ("7",))
    assert found(routes, "/api/v1/apps/7/events", "POST") == ("events", ("7",))
    assert routes.find("/apps/7/events")[0]["POST"] is routes.find("/api/v1/apps/7/events")[0]["POST"]


def test_other_routes_exist_at_the_root_only(routes):
    assert found(routes, "/healthz") == ("healthz", ())
    assert not routes.find("/api/v1/healthz")[0]
    assert found(routes, "/") == ("root", ())


def test_parameters_are_percent_decoded_segment_by_segment(routes):
    assert found(routes, "/apps/7/channels/presence%2Da%40b/users") == ("users", ("7", "presence-a@b"))
    assert found(routes, "/apps/7/channels/a%2Fusers") == ("channel", ("7", "a/users"))


def test_a_parameter_that_is_not_utf8_is_an_error(routes):
    with pytest.raises(UnicodeDecodeError):
        routes.find("/apps/7/channels/%ff")


@pytest.mark.parametrize("path", ["/apps", "/apps/7", "/apps//events", "/apps/7/events/", "/apps/7/channels/a/b", "/x"])
def test_other_paths_have_no_route(routes, path):
    assert not routes.find(path)[0]


def test_a_path_is_found_with_all_its_methods(routes):
    assert set(routes.find("/apps/7/channels/c")[0]) == {"GET", "DELETE"}


def test_two_routes_with_the_same_method_and_path_are_refused():
    with pytest.raises(ValueError, match="two routes"):
        Routes([Route("GET", "/a/{b}", "one", handler), Route("GET", "/a/{c}", "two", handler)])


def test_responses_are_counted_by_status_and_by_powers_of_two_of_microseconds():
    route = Route("GET", "/", "root", handler)
    for seconds in (0.000_001, 0.000_003, 0.000_004, 3600.0):
        route.count(200, seconds)
    route.count(503, 0.000_003)
    assert route.answers == {200: 4, 503: 1}
    assert (route.times[1], route.times[2], route.times[3], route.times[-1]) == (1, 2, 1, 1)
    assert slot_bound_s(2) == 0.000_004
    assert slot_bound_s(len(route.times) - 1) == float("inf")
    assert sum(route.times) == 5
