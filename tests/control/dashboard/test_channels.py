"""The pages of channels, on a real Redis."""

import csv
import io

from redis.asyncio import Redis

from redpoll.cluster.redis.keys import Keys


async def test_occupied_channels_are_listed_with_kind_and_counts(browser, occupy):
    await occupy("private-cache-a", {"w": 2, "v": 3})
    await occupy("presence-b", {"w": 2}, users=("anna", "bob"))
    page = (await browser.get("/dashboard/apps/3/channels")).body.decode()
    assert "2 channels" in page
    assert page.index("presence-b") < page.index("private-cache-a")
    assert 'class="number">5<' in page
    narrowed = (await browser.get("/dashboard/apps/3/channels?prefix=presence-")).body.decode()
    assert "private-cache-a" not in narrowed
    assert "No matching channels" in (await browser.get("/dashboard/apps/3/channels?prefix=zzz")).body.decode()
    assert "No occupied channels" in (await browser.get("/dashboard/apps/4/channels")).body.decode()


async def test_list_has_pages_of_a_hundred(browser, occupy):
    for at in range(105):
        await occupy(f"c-{at:03}", {"w": 1})
    first = (await browser.get("/dashboard/apps/3/channels")).body.decode()
    assert "c-099" in first
    assert "c-100" not in first
    second = (await browser.get("/dashboard/apps/3/channels?prefix=&page=1")).body.decode()
    assert "c-104" in second
    assert "c-099" not in second
    assert "c-104" in (await browser.get("/dashboard/apps/3/channels?page=99999")).body.decode()


async def test_open_page_asks_less_often_when_the_list_takes_long(browser, monkeypatch):
    """Each open page of an app with a million channels took a fifth of the control plane's core."""
    monkeypatch.setattr("redpoll.control.dashboard.channels.monotonic", iter((7.0, 7.2, 8.0, 9.01)).__next__)
    for refresh_s in (5, 21):
        page = (await browser.get("/dashboard/apps/3/channels")).body.decode()
        assert f'hx-trigger="every {refresh_s}s"' in page


async def test_members_are_shown_escaped_with_their_info(redis, browser, occupy):
    await occupy("presence-b", {"w": 1}, users=("anna",))
    async with Redis(unix_socket_path=redis.path) as client:
        key = Keys("rp").members("3", "presence-b")
        await client.hset(key, "<script>eve", 'w\n{"name":"<script>alert(1)</script>"}')
    page = (await browser.get("/dashboard/apps/3/channels/presence-b")).body.decode()
    assert "anna" in page
    assert "&lt;script&gt;eve" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page


async def test_cached_event_is_shown(plane, browser):
    event = {"name": "price", "channels": ["cache-gold"], "data": '"<script>1"'}
    assert (await plane.trigger(**event)).status == 200
    page = (await browser.get("/dashboard/apps/3/channels/cache-gold")).body.decode()
    assert "&#34;&lt;script&gt;1&#34;" in page


async def test_invalid_channel_name_is_404(browser):
    assert (await browser.get("/dashboard/apps/3/channels/%3Cscript%3E")).status == 404


async def test_channels_are_exported(browser, occupy):
    await occupy("a", {"w": 1})
    await occupy("presence-b", {"w": 2}, users=("anna",))
    job = (await browser.post("/dashboard/apps/3/export-channels", format="csv")).headers["location"]
    rows = list(csv.DictReader(io.StringIO((await browser.file_of(job)).body.decode())))
    assert [(row["name"], row["subscriptions"], row["users"]) for row in rows] == [
        ("a", "1", ""),
        ("presence-b", "2", "1"),
    ]
