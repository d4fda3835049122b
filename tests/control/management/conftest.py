"""A control plane, and a client of its management API with a token of the scope `manage`."""

import contextlib
import json
import sqlite3
import time

import pytest

from redpoll.config.settings import Settings
from redpoll.control.management.managed import Managed
from redpoll.control.records.records import Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.store.store import Store

APPS = "/api/v1/apps"


class Manager:
    """`await manager("PATCH", "/3", {"name": "x"}, etag)`: a Reply to a request below /api/v1/apps."""

    def __init__(self, plane, token, plain):
        self.plane = plane
        self.records = plane.records
        self.token = token
        self.plain = plain

    async def __call__(self, method, path="", body=None, etag=None, **headers):
        fields = {"Authorization": f"Bearer {self.plain}", **headers}
        if etag is not None:
            fields["If-Match"] = etag
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.plane.ask(method, APPS + path, raw, fields)

    async def etag(self, path="/3"):
        return (await self("GET", path)).headers["etag"]

    async def changed(self, method, path, body=None, app="/3"):
        """A change with the present tag."""
        return await self(method, path, body, await self.etag(app))


@pytest.fixture
async def manager(plane):
    token, plain = await plane.records.create_token(None, "platform", ["manage"])
    return Manager(plane, token, plain)


@pytest.fixture
async def make_node(postgres_url):
    """`await make_node()`: what the management API of one more node knows. All have one record store."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(clock=time.time):
            store = await Store.open(postgres_url)
            stack.push_async_callback(store.close)
            records = Records(store, clock=clock)
            await records.load()
            webhooks = Webhooks(store, records, Settings(), clock=clock)
            await webhooks.load()
            return Managed(records, webhooks, b"secret")

        yield make


@pytest.fixture
def audit(tmp_path):
    """`audit()`: the entries of the audit log, oldest first, as (who, action, app, target, detail)."""

    def read():
        with contextlib.closing(sqlite3.connect(tmp_path / "redpoll.sqlite")) as store:
            return store.execute("SELECT who, action, app_id, target, detail FROM audit ORDER BY number").fetchall()

    return read
