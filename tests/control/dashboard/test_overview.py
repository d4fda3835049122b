"""The first page and the data of its charts."""

import json


async def test_it_says_whether_the_server_is_well(plane, browser):
    assert "The server is ready." in (await browser.get("/dashboard")).body.decode()
    plane.plane.health.workers_ready = False
    page = (await browser.get("/dashboard")).body.decode()
    assert "not every worker is ready yet" in page
    part = (await browser.get("/dashboard/figures")).body.decode()
    assert part.startswith('<div id="figures"')


async def test_charts_get_columns_of_one_length(plane, browser):
    await plane.plane.dashboard.sampler.look()
    await plane.trigger()
    await plane.plane.dashboard.sampler.look()
    told = (await browser.get("/dashboard/series")).json()
    assert len({len(column) for column in told.values()}) == 1
    assert told["published"][-1] > 0
    of_app = json.loads((await browser.get("/dashboard/series?app=3")).body)
    assert set(of_app) == set(told)
    assert of_app["published"][-1] > 0
    assert of_app["p50_ms"][-1] > 0


async def test_each_chart_is_there_for_one_app_as_for_all(browser):
    for path in ("/dashboard", "/dashboard?app=3"):
        page = (await browser.get(path)).body.decode()
        for title in ("Connections", "out to clients", "in from clients", "Publish latency", "Webhook attempts"):
            assert title in page, (path, title)
