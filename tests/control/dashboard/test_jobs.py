"""Long jobs show their progress to the user who started them."""

import asyncio

import pytest

from redpoll.control.dashboard.access import Visit
from redpoll.control.dashboard.jobs import File
from redpoll.control.records.records import RecordError


@pytest.fixture
async def begin(plane, browser):
    """`await begin(work, total)`: the path of the job's page, begun by the browser's user."""
    dashboard = plane.plane.dashboard
    plain = browser.cookie.partition("=")[2]

    async def begun(work, total=0):
        session = await dashboard.accounts.session(plain)
        return dashboard.jobs.begin(Visit(dashboard.access, _Request(), session), "Work", "/dashboard", work, total)

    async def path_of(work, total=0):
        answer = await begun(work, total)
        return answer.headers.split(b"Location: ")[1].split(b"\r\n")[0].decode()

    return path_of


class _Request:
    def __init__(self):
        self.query = ""
        self.path = "/dashboard"
        self.headers = {}


async def test_page_shows_progress_and_then_the_result(begin, browser, wait_until):
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


async def test_failure_is_shown_without_internal_details(begin, browser):
    async def refused(progress):
        raise RecordError("it can't be")

    async def broken(progress):
        raise RuntimeError("the secret is hunter2")

    page = (await browser.get(await begin(refused))).body.decode()
    assert "it can&#39;t be" in page
    page = (await browser.get(await begin(broken))).body.decode()
    assert "An internal error occurred" in page
    # Not only digits: the form's token is random hex.
    assert "hunter2" not in page


async def test_only_the_user_who_started_a_job_can_see_it(begin, browser, viewer):
    async def work(progress):
        return File("a.csv", "text/csv", b"1,2")

    path = await begin(work)
    await browser.get(path)
    assert (await browser.get(f"{path}/file")).body == b"1,2"
    assert (await viewer.get(path)).status == 404
    assert (await viewer.get(f"{path}/file")).status == 404


async def test_running_jobs_end_before_the_control_plane(plane, begin):
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
