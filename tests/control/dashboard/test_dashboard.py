"""The dashboard as a whole: its routes and its error pages."""

from redpoll.protocol.errors import ApiError


async def test_route_names_are_unique(plane):
    names = [route.name for route in plane.plane.routes.all]
    assert len(names) == len(set(names))


async def test_every_page_is_counted_in_the_metrics(plane, browser):
    metrics = (await plane.ask("GET", "/metrics")).body.decode()
    assert 'redpoll_http_requests_total{route="dashboard_apps",status="200"}' in metrics


async def test_internal_error_is_a_page_with_the_trace_id_and_no_detail(plane, browser):
    async def fails(call):
        raise RuntimeError("the password is hunter2")

    plane.plane.routes.find("/dashboard/apps")[0]["GET"].handler = fails
    reply = await browser.get("/dashboard/apps")
    assert reply.status == 500
    assert b"Internal error" in reply.body
    assert b"trace id" in reply.body
    # Not only digits: the trace id and the form's token are random hex.
    assert b"hunter2" not in reply.body


async def test_without_redis_record_pages_work_and_others_say_that_it_is_missing(make_plane, own_redis, log_in_to):
    plane = await make_plane(own_redis.url)
    browser = await log_in_to(plane)
    own_redis.kill()
    assert (await browser.get("/dashboard/apps/3/settings")).status == 200
    page = await browser.get("/dashboard/apps/3/channels")
    assert page.status == 200
    assert "Redis is not available" in page.body.decode()


async def test_api_errors_are_not_pages(plane):
    class Request:
        path = "/apps/3/events"

    assert plane.plane.dashboard.fault(Request(), ApiError("not_found", "x")) is None
