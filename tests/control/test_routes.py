"""The table of all addresses, held against what the specification lists."""

from redpoll.control.router import Access, Place

# Which scope opens what (spec 5.2 names the scopes; the issue what they are for).
SCOPES = {
    "events": "publish",
    "history": "read",
    "clear_history": "publish",
    "events_log": "read",
    "trace": "read",
    "webhooks_verify": "read",
    "batch_events": "publish",
    "channels": "read",
    "channel": "read",
    "users": "read",
    "terminate_connections": "publish",
    "terminate_connections_of_key": "publish",
    "auth": "auth",
}


async def test_every_route_that_wants_a_credential_has_its_scope(plane):
    assert {route.name: route.scope for route in plane.plane.routes.all if route.scope} == SCOPES


async def test_the_rate_limit_holds_for_triggers_only(plane):
    assert {route.name for route in plane.plane.routes.all if route.limited} == {"events", "batch_events"}


async def test_what_can_be_called_without_a_credential_holds_nothing_of_an_app(plane):
    assert {route.name for route in plane.plane.routes.all if route.access.name == "OPEN"} == {
        "auth_preflight",
        "browser_module",
        "openapi",
        "healthz",
        "readyz",
        "root",
        "metrics",
        "dashboard_login",
        "dashboard_log_in",
        "dashboard_static",
    }


async def test_what_needs_a_login_is_the_dashboards_and_on_the_control_port(plane):
    for route in plane.plane.routes.all:
        if route.name.startswith("dashboard_"):
            assert route.place is Place.CONTROL
        else:
            assert route.access is not Access.SESSION


async def test_names_are_unique_since_metrics_tell_routes_apart_by_them(plane):
    names = [route.name for route in plane.plane.routes.all]
    assert len(set(names)) == len(names)


async def test_the_users_route_without_an_app_stands_at_the_root_only(plane):
    find = plane.plane.routes.find
    assert find("/users/u/terminate_connections")[1] == ("u",)
    assert find("/apps/3/users/u/terminate_connections")[1] == ("3", "u")
    assert not find("/api/v1/users/u/terminate_connections")[0]
