"""The dashboard as a whole: its routes, and what a fault looks like."""

from redpoll.protocol.errors import ApiError


async def test_no_two_routes_have_one_name(plane):
    names = [route.name for route in plane.plane.routes.all]
    assert len(names) == len(set(names))


async def test_every_page_is_counted_in_the_metrics(plane, browser):
    metrics = (await plane.ask("GET", "/metrics")).body.decode()
    assert 'redpoll_http_requests_total{route="dashboard_apps",status="200"}' in metrics


async def test_a_mistake_of_ours_is_a_page_with_its_trace_id_and_no_detail(plane, browser):
    async def fails(call):
        raise RuntimeError("the password is 1234")

    plane.plane.routes.find("/dashboard/apps")[0]["GET"].handler = fails
    reply = await browser.get("/dashboard/apps")
    assert reply.status == 500
    assert b"Our mistake" in reply.body
    assert b"trace id" in reply.body
    assert b"1234" not in reply.body


async def test_without_redis_pages_of_records_work_and_others_say_what_is_missing(make_plane, own_redis, log_in_to):
    plane = await make_plane(own_redis.url)
    browser = await log_in_to(plane)
    own_redis.kill()
    assert (await browser.get("/dashboard/apps/3/settings")).status == 200
    page = await browser.get("/dashboard/apps/3/channels")
    assert page.status == 200
    assert "Redis doesn" in page.body.decode()


async def test_faults_of_the_api_are_no_pages(plane):
    class Request:
        path = "/apps/3/events"

    assert plane.plane.dashboard.fault(Request(), ApiError("not_found", "x")) is None
