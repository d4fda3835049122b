"""Long jobs show their progress to the user who started them."""

import asyncio

import pytest
from structlog.testing import capture_logs

from redpoll.control.dashboard import jobs
from redpoll.control.dashboard.access import Visit
from redpoll.control.dashboard.jobs import File
from redpoll.control.records.records import RecordError
from redpoll.protocol.errors import ApiError
from redpoll.store.errors import StoreUnavailable


@pytest.fixture
async def begin(plane, browser):
    """`await begin(work, total, by=browser)`: the path of the job's page, begun by this browser's user."""
    dashboard = plane.plane.dashboard

    async def begun(work, total, by, changes):
        session = await dashboard.accounts.session(by.cookie.partition("=")[2])
        return dashboard.jobs.begin(
            Visit(dashboard.access, _Request(), session), "Work", "/dashboard", work, total, changes=changes
        )

    async def path_of(work, total=0, by=browser, changes=True):
        answer = await begun(work, total, by, changes)
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


@pytest.mark.parametrize("changes", [True, False])
async def test_a_store_that_is_away_is_no_internal_error(begin, browser, changes):
    async def away(progress):
        progress.done = 5
        raise StoreUnavailable("PostgreSQL at redpoll@10.9.8.7/records can't be reached")

    with capture_logs() as logged:
        page = (await browser.get(await begin(away, changes=changes))).body.decode()
    assert "Not confirmed: the record store is not available at present. Try again." in page
    # An export leaves nothing.
    assert ("5 were done before the failure" in page) is changes
    (line,) = [line for line in logged if "reason" in line]
    assert line["log_level"] == "warning"
    assert "10.9.8.7" in line["reason"]
    assert "exc_info" not in line


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


async def endless(progress):
    await asyncio.Event().wait()


def file_with(body):
    async def work(progress):
        return File("a.csv", "text/csv", body)

    return work


async def test_one_user_keeps_out_no_others(begin, browser, viewer):
    for _ in range(5):
        await begin(endless, by=viewer)
    with pytest.raises(ApiError, match="rate_limited"):
        await begin(endless, by=viewer)
    # All other places are free, too.
    path = await begin(file_with(b"1"))
    assert (await browser.file_of(path)).body == b"1"


async def test_jobs_that_have_ended_make_room_for_new_ones(begin, browser):
    paths = []
    for number in range(6):
        paths.append(await begin(file_with(b"%d" % number)))
        await browser.file_of(paths[-1])
    assert [(await browser.get(path)).status for path in paths] == [404, 200, 200, 200, 200, 200]


async def test_oldest_files_of_a_user_are_deleted_at_the_users_limit_of_bytes(begin, browser, viewer, monkeypatch):
    monkeypatch.setattr(jobs, "MAX_FILE_BYTES", 10)
    others = await begin(file_with(b"x" * 10), by=viewer)
    await viewer.file_of(others)
    paths = []
    for _ in range(3):
        paths.append(await begin(file_with(b"x" * 5)))
        await browser.file_of(paths[-1])
    assert [(await browser.get(f"{path}/file")).status for path in paths] == [404, 200, 200]
    page = (await browser.get(paths[0])).body.decode()
    assert "deleted to make room" in page
    assert "Download" not in page
    assert (await viewer.get(f"{others}/file")).status == 200


async def test_oldest_files_of_all_are_deleted_at_the_limit_of_all_bytes(begin, browser, viewer, monkeypatch):
    monkeypatch.setattr(jobs, "_MAX_BYTES", 10)
    oldest = await begin(file_with(b"x" * 6), by=viewer)
    await viewer.file_of(oldest)
    newest = await begin(file_with(b"x" * 6))
    await browser.file_of(newest)
    assert (await viewer.get(f"{oldest}/file")).status == 404
    assert (await browser.get(f"{newest}/file")).status == 200


async def test_file_expires_also_if_no_other_job_begins(begin, plane, monkeypatch, wait_until):
    monkeypatch.setattr(jobs, "_EXPIRES_AFTER_S", 0.01)
    await begin(file_with(b"1"))
    await wait_until(lambda: not plane.plane.dashboard.jobs._jobs)
