"""A minimal browser: it stores its cookie, follows no redirects, and remembers the CSRF token of the last page."""

import asyncio
import re
from urllib.parse import urlencode

import pytest

PASSWORD = "correct horse battery"


class Browser:
    """`await get(path)`, `await post(path, field=value, …)`: Replies. A list as a value: the field several times."""

    def __init__(self, plane, wire):
        self.plane = plane
        self.wire = wire
        self.cookie = ""
        self.csrf = ""
        # Sent with every request, as a proxy or another browser would.
        self.headers = {}

    async def get(self, path, **headers):
        return self._seen(await self._ask("GET", path, b"", headers))

    async def post(self, path, /, csrf=None, headers=None, **fields):
        pairs = [
            (name, item) for name, value in fields.items() for item in (value if isinstance(value, list) else [value])
        ]
        pairs.append(("csrf", self.csrf if csrf is None else csrf))
        all_headers = {"Content-Type": "application/x-www-form-urlencoded", **(headers or {})}
        return self._seen(await self._ask("POST", path, urlencode(pairs).encode(), all_headers))

    async def _ask(self, method, path, body, headers):
        sent = {**self.headers, **headers}
        if self.cookie:
            sent["Cookie"] = self.cookie
        lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in sent.items()]
        return await self.wire.ask("\r\n".join(lines).encode() + b"\r\n\r\n" + body, head_only=method == "HEAD")

    async def file_of(self, job):
        """The file of this job, when it is ready."""
        async with asyncio.timeout(60):
            while (reply := await self.get(f"{job}/file")).status == 404:
                await asyncio.sleep(0.01)
        return reply

    def _seen(self, reply):
        given = reply.headers.get("set-cookie")
        if given is not None:
            name_and_value = given.partition(";")[0]
            self.cookie = "" if name_and_value.endswith("=") else name_and_value
        found = re.search(rb'name="csrf" value="([0-9a-f]{64})"', reply.body)
        if found is not None:
            self.csrf = found[1].decode()
        return reply

    async def log_in(self, name="admin", password=PASSWORD):
        """Logs in, and goes to the first page, from which it has the token."""
        reply = await self.post("/dashboard/login", name=name, password=password)
        assert reply.status == 303, reply.body
        await self.get("/dashboard/apps")
        return reply


@pytest.fixture
async def open_browser(plane, connect):
    """`await open_browser()`: somebody who isn't logged in; the plane has the user `admin` with PASSWORD."""
    accounts = plane.plane.dashboard.accounts
    await accounts.first_admin(PASSWORD)

    async def made():
        return Browser(plane, await connect(plane.port))

    return made


@pytest.fixture
def log_in_to(connect):
    """`await log_in_to(plane)`: an admin who is logged in to this plane."""

    async def logged_in(plane):
        await plane.plane.dashboard.accounts.first_admin(PASSWORD)
        opened = Browser(plane, await connect(plane.port))
        await opened.log_in()
        return opened

    return logged_in


@pytest.fixture
async def browser(open_browser):
    """An admin who is logged in."""
    opened = await open_browser()
    await opened.log_in()
    return opened


@pytest.fixture
async def viewer(plane, open_browser):
    """A viewer who is logged in."""
    accounts = plane.plane.dashboard.accounts
    one_time = await accounts.create("vera", "viewer")
    opened = await open_browser()
    await opened.post("/dashboard/login", name="vera", password=one_time)
    await opened.get("/dashboard/account")
    fields = {"old_password": one_time, "new_password": PASSWORD, "new_password_again": PASSWORD}
    assert (await opened.post("/dashboard/account", **fields)).status == 303
    await opened.get("/dashboard/apps")
    return opened
