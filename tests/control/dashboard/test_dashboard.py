"""The dashboard as a whole: its routes and its error pages."""

from redpoll.protocol.errors import ApiError


async def test_route_names_are_unique(plane):
    names = [route.name for route in plane.plane.routes.all]
    assert len(names) == len(set(names))


async def test_no_name_that_others_choose_is_a_word_of_another_path(plane):
    """The path of a page that has a word there would hide the page of a channel of this name."""
    patterns = [route.pattern.split("/") for route in plane.plane.routes.all]
    words = {tuple(pattern[: at + 1]) for pattern in patterns for at in range(len(pattern))}
    hidden = {
        "/".join((*before, word))
        for *before, word in words
        for *beside, parameter in words
        # The ids of endpoints are made here, of hex digits.
        if beside == before and word[:1] != "{" and parameter[:1] == "{" and parameter != "{endpoint_id}"
    }
    assert hidden == set()


async def test_channels_with_the_names_of_actions_have_their_pages(browser):
    for path in ("channels/export", "history/export", "channels/remove", "history/remove"):
        assert (await browser.get(f"/dashboard/apps/3/{path}")).status == 200, path


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


async def test_usage_counts_this_nodes_workers_and_charts_have_only_apps_that_exist(plane):
    sampler, run = plane.plane.dashboard.sampler, plane.plane.view.run

    async def read(ended):
        # The records have the apps 3 and 4.
        return {
            f"{run}.1.0": {"by_app": {"3": [2, 0, 0], "gone": [1, 0, 0]}},
            "f" * 12 + ".1.0": {"by_app": {"4": [5, 0, 0]}},
        }

    # Otherwise its own timer could take a sample before the workers are replaced.
    await sampler.finish()
    sampler._read_workers = read
    await sampler.sample()
    usage = plane.plane.observation.usage
    assert [(day.app_id, day.peak_connections) for day in await usage.days("", 1)] == [("3", 2), ("gone", 1)]
    assert [bool(sampler.of_app(app_id).columns()["time"]) for app_id in ("3", "4", "gone")] == [True, True, False]


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
