"""A control plane that can't reach the record store learns from Redis what others revoked."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.config.settings import Settings
from redpoll.control.commands.app_write import delete_app
from redpoll.control.records import redis_sync
from redpoll.control.records.records import Records
from redpoll.control.records.redis_sync import RedisSync
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.store.audit import Actor
from redpoll.store.store import Store


class Plane:
    """Records of one control plane, which never read the store by themselves."""

    def __init__(self, store: Store, redis_url: str) -> None:
        self.store = store
        self.records = Records(store)
        self.link = Link(redis_url)
        self.reaches_store = True
        self.sync = RedisSync(self.link, Keys(), self.records, self)
        self.writer = DirectoryWriter(self.link, Keys())
        self.records.on_change = self.write

    @property
    def read_at(self) -> float:
        """When the store was read last."""
        return asyncio.get_running_loop().time() if self.reaches_store else float("-inf")

    async def write(self, app_id, app, before, after):
        assert await self.writer.put(app_id, app, after.number, after.id, before.id)


@pytest.fixture
async def planes(postgres_url, redis, monkeypatch):
    monkeypatch.setattr(redis_sync, "LOOK_EVERY_S", 0.01)
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(2):
            store = await Store.open(postgres_url)
            stack.push_async_callback(store.close)
            made.append(Plane(store, redis.url))
            await made[-1].records.load()
            made[-1].link.start()
            stack.push_async_callback(made[-1].link.close)
            await made[-1].link.wait_up()
            made[-1].sync.start()
            stack.push_async_callback(made[-1].sync.finish)
        one = made[0]
        await one.writer.fill([], *one.records.directory)
        yield made


async def test_revoked_keys_and_tokens_are_known_without_the_store_and_read_from_it_later(planes, wait_until):
    one, cut_off = planes
    app = await one.records.create_app("app")
    extra = await one.records.add_key(app.id)
    token, _ = await one.records.create_token(app.id, "CI", ["all"])
    await cut_off.records.sync()
    cut_off.reaches_store = False

    await one.records.disable_key(app.id, extra.key)
    await one.records.revoke_tokens([token.id])
    await wait_until(lambda: cut_off.records.apps == one.records.apps)
    assert not cut_off.records.by_key[extra.key].keys[1].enabled
    await wait_until(lambda: cut_off.records.tokens[token.hash].revoked_at is not None)
    assert cut_off.sync.is_current()
    assert cut_off.records.known != one.records.known
    cut_off.reaches_store = True
    assert await cut_off.records.sync()
    assert (cut_off.records.known, cut_off.records.tokens) == (one.records.known, one.records.tokens)


async def test_revocation_that_a_third_server_made_without_redis_is_passed_on(planes, postgres_url, wait_until):
    one, cut_off = planes
    app = await one.records.create_app("app")
    token, _ = await one.records.create_token(app.id, "CI", ["all"])
    await cut_off.records.sync()
    cut_off.reaches_store = False
    # As the command line without a server of its own.
    store = await Store.open(postgres_url)
    command = Records(store)
    await command.load()
    await command.revoke_tokens([token.id])
    await store.close()
    await one.records.sync()
    await wait_until(lambda: cut_off.records.tokens[token.hash].revoked_at is not None)


async def test_deleted_app_is_refused_without_the_store(planes, wait_until):
    one, cut_off = planes
    kept, app = await one.records.create_app("kept"), await one.records.create_app("deleted")
    await cut_off.records.sync()
    cut_off.reaches_store = False
    webhooks = Webhooks(one.store, one.records, Settings())
    await webhooks.load()
    await delete_app(one.records, webhooks, app.id, Actor("test"))
    await wait_until(lambda: list(cut_off.records.apps) == [kept.id])
    assert app.keys[0].key not in cut_off.records.by_key
    cut_off.reaches_store = True
    assert await cut_off.records.sync()
    assert cut_off.records.apps == one.records.apps


async def test_without_redis_and_the_store_nothing_is_current(planes, monkeypatch, wait_until):
    _, cut_off = planes
    monkeypatch.setattr(redis_sync, "_CURRENT_FOR_S", 0.2)
    cut_off.reaches_store = False
    await wait_until(cut_off.sync.is_current)
    await cut_off.link.close()
    await wait_until(lambda: not cut_off.sync.is_current())
    cut_off.reaches_store = True
    assert cut_off.sync.is_current()
