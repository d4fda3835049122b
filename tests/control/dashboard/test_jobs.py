"""Long work: shown as it goes on, to who began it."""

import asyncio

import pytest

from redpoll.control.dashboard.access import Visit
from redpoll.control.dashboard.jobs import File
from redpoll.control.records import RecordError


@pytest.fixture
async def begin(plane, browser):
    """`await begin(work, total)`: the path of the job's page, begun by the browser's user."""
    dashboard = plane.plane.dashboard
    plain = browser.cookie.partition("=")[2]

    async def begun(work, total=0):
        session = await dashboard.accounts.session(plain)
        return dashboard._jobs.begin(Visit(dashboard.door, _Call(), session), "Work", "/dashboard", work, total)

    async def path_of(work, total=0):
        answer = await begun(work, total)
        return answer.headers.split(b"Location: ")[1].split(b"\r\n")[0].decode()

    return path_of


class _Call:
    def __init__(self):
        self.query = ""
        self.path = "/dashboard"
        self.headers = {}


async def test_a_page_shows_how_far_it_is_and_then_what_came_of_it(begin, browser, wait_until):
    go_on = asyncio.Event()

    async def work(progress):
        progress.done = 3
        await go_on.wait()
        return "10 things were done."

    path = await begin(work, 10)
    page = (await browser.get(path)).body.decode()
    assert "3 of 10" in page
    assert 'hx-trigger="every 1s"' in page
    go_on.set()
    await asyncio.sleep(0)
    page = (await browser.get(path)).body.decode()
    assert "10 things were done." in page
    assert "hx-trigger" not in page


async def test_a_failure_is_told_and_not_the_end_of_anything(begin, browser):
    async def refused(progress):
        raise RecordError("it can't be")

    async def broken(progress):
        raise RuntimeError("the secret is 1234")

    told = (await browser.get(await begin(refused))).body.decode()
    assert "it can&#39;t be" in told
    told = (await browser.get(await begin(broken))).body.decode()
    assert "its log says why" in told
    assert "1234" not in told


async def test_only_who_began_it_sees_it_or_takes_its_file(begin, browser, viewer):
    async def work(progress):
        return File("a.csv", "text/csv", b"1,2")

    path = await begin(work)
    await browser.get(path)
    assert (await browser.get(f"{path}/file")).body == b"1,2"
    assert (await viewer.get(path)).status == 404
    assert (await viewer.get(f"{path}/file")).status == 404


async def test_work_under_way_ends_before_what_it_stands_on(plane, begin):
    ended = asyncio.Event()

    async def work(progress):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await begin(work)
    await asyncio.sleep(0)
    await plane.plane.finish()
    assert ended.is_set()
