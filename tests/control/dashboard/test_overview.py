"""The first page and the data of its charts."""

import json
import re


async def test_page_says_whether_the_server_is_ready(plane, browser):
    assert "The server is ready." in (await browser.get("/dashboard")).body.decode()
    plane.plane.health.workers_ready = False
    page = (await browser.get("/dashboard")).body.decode()
    assert "not every worker is ready yet" in page
    part = (await browser.get("/dashboard/figures")).body.decode()
    assert part.startswith('<div id="figures"')


async def test_overview_shows_the_state_of_each_workers_connection_to_redis(plane, browser):
    sampler = plane.plane.dashboard.sampler
    await sampler.finish()
    sampler.workers = {
        "run.1.0": {"redis_connection_state": "reasserting"},
        "run.0.0": {"redis_connection_state": "open"},
        "of an earlier version": {},
    }
    states = re.findall(
        r'<li class="(badge[^"]*)">([^<]*)</li>', (await browser.get("/dashboard/figures")).body.decode()
    )
    assert states == [
        ("badge", "of an earlier version unknown"),
        ("badge ok", "run.0.0 open"),
        ("badge warn", "run.1.0 reasserting"),
    ]
    sampler.workers = {}
    assert "connections to Redis" not in (await browser.get("/dashboard")).body.decode()


async def test_tiles_add_up_only_what_each_worker_has_of_its_own(plane, browser):
    """Two workers that hold the same three channels have three, not six."""
    sampler = plane.plane.dashboard.sampler
    await sampler.finish()
    of_each = {"connections": 5, "channels": 3, "subscriptions": 20}
    sampler.workers = {"run.0.0": of_each, "run.1.0": of_each}
    part = (await browser.get("/dashboard/figures")).body.decode()
    tiles = dict(re.findall("<dt>([^<]*)</dt><dd>([^<]*)</dd>", part))
    assert (tiles["Connections"], tiles["Subscriptions"]) == ("10", "40")
    assert not [name for name in tiles if "Channels" in name]


async def test_a_node_that_does_not_lead_shows_no_number_of_dead_letters(plane, browser):
    """It said 0, whatever waited."""

    async def tile():
        part = (await browser.get("/dashboard/figures")).body.decode()
        return re.search('<dt>Dead letters</dt><dd>([^<]*)</dd><dd class="sub">([^<]*)</dd>', part).groups()

    assert await tile() == ("0", "0 waiting")
    await plane.plane.webhooks.stop(60)
    assert await tile() == ("–", "the node that leads counts them")


async def test_chart_columns_have_the_same_length(plane, browser):
    sampler = plane.plane.dashboard.sampler
    # Otherwise its own timer could take a sample between the publish and ours.
    await sampler.finish()
    await sampler.sample()
    await plane.trigger()
    await sampler.sample()
    data = (await browser.get("/dashboard/series")).json()
    assert len({len(column) for column in data.values()}) == 1
    assert data["published"][-1] > 0
    of_app = json.loads((await browser.get("/dashboard/series?app=3")).body)
    assert set(of_app) == set(data)
    assert of_app["published"][-1] > 0
    assert of_app["p50_ms"][-1] > 0


async def test_charts_of_a_day_and_a_week_continue_after_a_restart(plane, browser):
    sampler = plane.plane.dashboard.sampler
    await sampler.finish()
    await sampler.sample()
    for span in ("day", "week", "hour"):
        page = (await browser.get(f"/dashboard?span={span}")).body.decode()
        assert f'data-span="{span}"' in page
        assert f'<option value="{span}" selected>' in page
        data = (await browser.get(f"/dashboard/series?span={span}")).json()
        assert len({len(column) for column in data.values()}) == 1
        assert data["time"]
    assert 'data-span="hour"' in (await browser.get("/dashboard?span=<b>")).body.decode()


async def test_one_app_has_the_same_charts_as_the_server(browser):
    for path in ("/dashboard", "/dashboard?app=3"):
        page = (await browser.get(path)).body.decode()
        for title in ("Connections", "out to clients", "in from clients", "Publish latency", "Webhook attempts"):
            assert title in page, (path, title)
