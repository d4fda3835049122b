"""Single sign-on in a real browser, against a real provider (npm's oidc-provider) in a process of its own."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from browser.lively import PASSWORD
from helpers.browser import chromium, new_page
from helpers.server import Server

CLIENTS = Path(__file__).parents[1] / "clients"
MIN_NODE = 20


def node_version() -> int:
    if shutil.which("node") is None or not (CLIENTS / "node_modules" / "oidc-provider").is_dir():
        return 0
    shown = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return int(shown.removeprefix("v").partition(".")[0])


pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(node_version() < MIN_NODE, reason="needs Node.js 20, and `npm ci` in tests/clients"),
]


@dataclass
class Place:
    """redpoll with a provider."""

    server: Server
    issuer: str
    provider: asyncio.subprocess.Process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[Place]:
    # Beside node_modules, where an `import` finds the library.
    script = CLIENTS / "node_modules" / ".provider.mjs"
    script.write_text(Path(__file__).with_name("provider.mjs").read_text())
    provider = await asyncio.create_subprocess_exec(
        "node", str(script), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert provider.stdin is not None
    assert provider.stdout is not None
    try:
        async with asyncio.timeout(60):
            issuer = (await provider.stdout.readline()).decode().strip()
        settings = {"oidc_issuer": issuer, "oidc_client_id": "redpoll", "oidc_client_secret": "a secret of the client"}
        with Server(workers=1, admin_password=PASSWORD, **settings) as server:
            provider.stdin.write(f"{server.control_url}\n".encode())
            async with asyncio.timeout(60):
                assert await provider.stdout.readline() == b"ready\n"
            yield Place(server, issuer, provider)
    finally:
        if provider.returncode is None:
            provider.kill()
        await provider.wait()
        script.unlink()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A page of a browser without cookies."""
    page = await new_page(browser)
    yield page
    await page.context.close()


async def log_in(place: Place, page: Page, user: str, path: str = "/dashboard") -> None:
    """Through the provider's pages, until redpoll shows one again."""
    await page.goto(place.server.control_url + path)
    await page.get_by_role("link", name="Log in by single sign-on").click()
    await page.fill("input[name=login]", user)
    await page.fill("input[name=password]", "any")
    await page.get_by_role("button", name="Sign-in").click()
    await page.get_by_role("button", name="Continue").click()
    await page.wait_for_url(re.compile(re.escape(place.server.control_url)))


async def test_admin_logs_in_and_out_here_and_there(place: Place, page: Page) -> None:
    await log_in(place, page, "ann", "/dashboard/users")
    # The page for which the login was.
    await expect(page.get_by_role("heading", name="Users", level=1)).to_be_visible()
    await expect(page.locator(".who")).to_have_text(re.compile("sso:ann.*admin"))
    row = page.get_by_role("row", name=re.compile("sso:ann"))
    await expect(row).to_contain_text("single sign-on")
    await page.get_by_role("button", name="Log out").click()
    # The page leads to the provider, which asks whether to end its session.
    await page.wait_for_url(f"{place.issuer}/session/end**")
    await page.get_by_role("button", name="Yes, sign me out").click()
    await page.wait_for_url("**/dashboard/login**")
    await page.goto(place.server.control_url + "/dashboard/users")
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    await page.get_by_role("link", name="Log in by single sign-on").click()
    # It asks for a name again.
    await expect(page.locator("input[name=login]")).to_be_visible()


async def test_viewer_sees_the_apps_of_the_claim_only(place: Place, page: Page) -> None:
    await log_in(place, page, "vera")
    await page.wait_for_url("**/dashboard/apps")
    await expect(page.locator(".who")).to_have_text(re.compile("sso:vera.*viewer"))
    await expect(page.get_by_role("link", name="Audit log")).to_have_count(0)
    answer = await page.goto(f"{place.server.control_url}/dashboard/apps/{place.server.app_id}/connections")
    assert answer is not None
    assert answer.status == 200
    for path in ("/dashboard/audit", "/dashboard/users", "/dashboard/nodes", "/dashboard/figures", "/dashboard/series"):
        answer = await page.goto(place.server.control_url + path)
        assert answer is not None
        assert answer.status == 403


async def test_viewer_of_another_app_finds_nothing(place: Place, page: Page) -> None:
    await log_in(place, page, "walt")
    await page.wait_for_url("**/dashboard/apps")
    answer = await page.goto(f"{place.server.control_url}/dashboard/apps/{place.server.app_id}/keys")
    assert answer is not None
    assert answer.status == 404


async def test_user_without_a_role_is_refused_with_what_to_check(place: Place, page: Page) -> None:
    await log_in(place, page, "stan")
    await expect(page.get_by_role("heading", name="Single sign-on failed")).to_be_visible()
    await expect(page.get_by_role("alert")).to_have_text("The user 'stan' has no role here.")
    await expect(page.locator("main")).to_contain_text("Ask the provider's admin for the role redpoll_admin")
    assert "single sign-on refused" in place.server.output()


async def test_foreign_state_is_refused(place: Place, page: Page) -> None:
    answer = await page.goto(place.server.control_url + "/dashboard/sso/callback?code=c&state=s")
    assert answer is not None
    assert answer.status == 403
    await expect(page.get_by_role("alert")).to_have_text("The cookie of the login is missing or not ours.")


async def test_local_users_log_in_beside_it(place: Place, page: Page) -> None:
    await page.goto(place.server.control_url)
    await page.fill("#name", "admin")
    await page.fill("#password", PASSWORD)
    await page.get_by_role("button", name="Log in").click()
    await page.wait_for_url("**/dashboard")
    # Nobody can change a provider's user here.
    await page.goto(place.server.control_url + "/dashboard/users")
    row = page.get_by_role("row", name=re.compile("sso:ann"))
    await expect(row.get_by_role("button", name="Reset password")).to_have_count(0)
