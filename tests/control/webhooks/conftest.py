"""Fixtures for the tests of webhooks: a clock, a store with two apps, `Webhooks`, and a receiver."""

import contextlib

import pytest

from receiver import Receiver
from redpoll.config.settings import Settings
from redpoll.control.records.records import Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.store.store import Store, database_url
from transitions import APP, OTHER, Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def store(tmp_path):
    opened = await Store.open(database_url(tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
async def records(store):
    loaded = Records(store)
    await loaded.load()
    await loaded.upsert_app(APP, "a" * 20, "b" * 40)
    await loaded.upsert_app(OTHER, "c" * 20, "d" * 40)
    return loaded


LOOPBACK = {"webhook_allow_http": True, "webhook_allow_addresses": ("127.0.0.0/8",)}


@pytest.fixture
async def make_webhooks(monkeypatch, store, records, clock):
    """`await make_webhooks(box, **settings)`: a Webhooks, started if a box is given, and ended after the test."""
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    async with contextlib.AsyncExitStack() as stack:

        async def make(box=None, **settings):
            made = Webhooks(store, records, Settings(**{**LOOPBACK, **settings}), clock=clock, steady=clock.steady)
            await made.load()
            stack.push_async_callback(made.finish)
            if box is not None:
                made.start(box, lambda *traced: None)
            return made

        yield make


@pytest.fixture
async def receiver():
    async with Receiver() as it:
        yield it
