"""The table of routes against protocol/README.md "HTTP API"."""

from redpoll.control.http.router import Access, Place

# The scope that a token needs for each route (protocol/README.md "HTTP API").
SCOPES = {
    "events": "publish",
    "history": "read",
    "stream": "read",
    "clear_history": "publish",
    "events_log": "read",
    "trace": "read",
    "usage": "read",
    "webhooks_verify": "read",
    "batch_events": "publish",
    "channels": "read",
    "channel": "read",
    "users": "read",
    "unsubscribe": "publish",
    "revoke_grants": "publish",
    "terminate_connections": "publish",
    "terminate_connections_of_key": "publish",
    "auth": "auth",
    "pull_webhooks": "webhooks",
    "acknowledge_webhooks": "webhooks",
}


async def test_every_route_that_needs_a_credential_has_a_scope(plane):
    scopes = {route.name: route.scope for route in plane.plane.routes.all if route.scope}
    # tests/control/management/test_routes.py has the others.
    assert {name: scope for name, scope in scopes.items() if not name.startswith("manage_")} == SCOPES


async def test_only_triggers_have_a_rate_limit(plane):
    assert {route.name for route in plane.plane.routes.all if route.limited} == {"events", "batch_events"}


async def test_routes_without_a_credential_return_nothing_of_an_app(plane):
    assert {route.name for route in plane.plane.routes.all if route.access.name == "OPEN"} == {
        "auth_preflight",
        "stream_preflight",
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


async def test_routes_that_need_a_login_are_the_dashboards_and_on_the_control_port(plane):
    for route in plane.plane.routes.all:
        if route.name.startswith("dashboard_"):
            assert route.place is Place.CONTROL
        else:
            assert route.access is not Access.SESSION


async def test_names_of_routes_are_unique_because_they_are_metric_labels(plane):
    names = [route.name for route in plane.plane.routes.all]
    assert len(set(names)) == len(names)


async def test_the_users_route_without_an_app_exists_at_the_root_only(plane):
    find = plane.plane.routes.find
    assert find("/users/u/terminate_connections")[1] == ("u",)
    assert find("/apps/3/users/u/terminate_connections")[1] == ("3", "u")
    assert not find("/api/v1/users/u/terminate_connections")[0]
