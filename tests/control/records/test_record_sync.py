"""Control planes that share a record store: each sees the changes of the others, and no change is lost."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from argon2 import PasswordHasher

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.config.settings import Settings
from redpoll.control.accounts.accounts import AccountError, Accounts
from redpoll.control.accounts.passwords import Passwords
from redpoll.control.records import record_sync, tokens
from redpoll.control.records.checks import RecordError
from redpoll.control.records.record_sync import RecordSync
from redpoll.control.records.records import Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.store.store import Store

CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


class Plane:
    """The parts of a control plane that have records."""

    def __init__(self, store: Store, redis_url: str) -> None:
        self.store = store
        self.records = Records(store)
        self.webhooks = Webhooks(store, self.records, Settings())
        self.accounts = Accounts(store, passwords=Passwords(CHEAP))
        self.link = Link(redis_url)
        self.synced = asyncio.Event()
        self.sync = RecordSync(self.link, Keys(), self.records, store.name, self.synced.set)
        store.on_version = self.sync.committed


@asynccontextmanager
async def running(url: str, redis_url: str):
    plane = Plane(await Store.open(url), redis_url)
    await plane.records.load()
    await plane.webhooks.load()
    plane.link.start(on_up=plane.sync.link_up, on_push=plane.sync.received)
    plane.sync.start()
    try:
        yield plane
    finally:
        await plane.sync.finish()
        await plane.link.close()
        await plane.webhooks.finish()
        await plane.records.finish()
        await plane.store.close()


@pytest.fixture
async def planes(postgres_url, redis):
    async with running(postgres_url, redis.url) as one, running(postgres_url, redis.url) as other:
        await asyncio.gather(one.link.wait_up(), other.link.wait_up())
        # Answers come in order: when these are here, both are subscribed.
        await asyncio.gather(one.link.ask(b"PING"), other.link.ask(b"PING"))
        yield one, other


@pytest.fixture
def only_messages(monkeypatch):
    """Changes are found by messages alone: nothing looks by itself."""
    monkeypatch.setattr(record_sync, "LOOK_EVERY_S", 3600.0)


async def test_every_kind_of_change_reaches_the_other_control_plane(only_messages, planes, wait_until):
    one, other = planes
    app = await one.records.create_app("first")
    await wait_until(lambda: other.records.apps == one.records.apps)
    assert other.records.by_key[app.keys[0].key].id == app.id
    await one.records.set_app(app.id, {"max_batch": 3})
    await wait_until(lambda: other.records.apps[app.id].max_batch == 3)
    key = await one.records.add_key(app.id)
    await one.records.disable_key(app.id, app.keys[0].key)
    await wait_until(lambda: other.records.apps == one.records.apps)
    assert other.records.apps[app.id].secret_of(key.key) == key.secret
    token, _ = await one.records.create_token(app.id, "CI", ["publish"])
    await wait_until(lambda: token.hash in other.records.tokens)
    await one.records.revoke_tokens([token.id])
    await wait_until(lambda: other.records.tokens[token.hash].revoked_at is not None)
    endpoint = await one.webhooks.endpoints.create(app.id, "https://example.com/hook", ["member.added"])
    await wait_until(lambda: other.webhooks.endpoints.of_app(app.id) == (endpoint,))
    assert other.records.apps[app.id].hooks == one.records.apps[app.id].hooks != ""
    await one.webhooks.endpoints.delete(endpoint.id)
    await wait_until(lambda: other.records.apps[app.id].hooks == "")
    await one.records.watch_console(app.id, until=5e9)
    await wait_until(lambda: other.records.apps == one.records.apps)
    assert other.records.version == one.records.version


async def test_token_that_is_used_on_one_node_is_shown_as_used_on_the_others(only_messages, planes, monkeypatch):
    monkeypatch.setattr(tokens, "READ_USES_EVERY_S", 3600.0)
    one, other = planes
    app = await one.records.create_app("first")
    token, _ = await one.records.create_token(app.id, "CI", ["publish"])
    await other.records.sync()
    known = other.records.known
    at_s = time.time()
    one.records.token_used(token, at_s)
    await one.records.finish()
    await other.records.sync()
    assert [found.last_used_at for found in other.records.tokens_of(app.id)] == [None]
    monkeypatch.setattr(tokens, "READ_USES_EVERY_S", 0.0)
    await other.records.sync()
    assert [found.last_used_at for found in other.records.tokens_of(app.id)] == [at_s]
    assert one.records.known == other.records.known == known


async def test_changes_of_a_command_that_has_no_redis_are_found_too(planes, postgres_url, wait_until):
    one, other = planes
    # As the command line without a server of its own.
    store = await Store.open(postgres_url)
    records = Records(store)
    await records.load()
    app = await records.create_app("by a command")
    await store.close()
    await wait_until(lambda: app.id in one.records.apps and app.id in other.records.apps)


async def test_changes_at_the_same_time_lose_nothing(planes):
    one, other = planes
    app = await one.records.create_app("shared")
    await other.records.sync()

    async def add(plane: Plane, number: int) -> None:
        await plane.records.add_key(app.id, f"key-{number}")
        await plane.records.set_app(app.id, {"max_batch" if number % 2 else "max_channels": 2 + number})

    await asyncio.gather(*(add(planes[number % 2], number) for number in range(12)))
    for plane in planes:
        await plane.records.sync()
    assert one.records.apps == other.records.apps
    assert {key.key for key in one.records.apps[app.id].keys} >= {f"key-{number}" for number in range(12)}
    with pytest.raises(RecordError, match="already has the key"):
        await other.records.add_key(app.id, "key-0")


async def test_key_is_given_to_one_app_only(only_messages, planes):
    one, other = planes
    first, second = await one.records.create_app("1"), await other.records.create_app("2")
    outcomes = await asyncio.gather(
        one.records.add_key(first.id, "same"), other.records.add_key(second.id, "same"), return_exceptions=True
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Key", "RecordConflict"]


async def test_servers_that_start_at_once_on_an_empty_store_create_one_app_and_one_admin(planes):
    one, other = planes
    apps = await asyncio.gather(*(plane.records.first_app(Settings()) for plane in planes))
    assert sum(app is not None for app in apps) == 1
    passwords = await asyncio.gather(*(plane.accounts.first_admin("") for plane in planes))
    assert sum(password is not None for password in passwords) == 1
    await asyncio.gather(*(plane.records.sync() for plane in planes))
    assert len(one.records.apps) == len(other.records.apps) == 1
    assert [user.name for user in await one.accounts.users()] == ["admin"]


async def test_last_two_admins_cant_remove_each_other(planes):
    one, other = planes
    for name in ("anna", "vera"):
        await one.accounts.create(name, "admin")
    outcomes = await asyncio.gather(one.accounts.remove("anna"), other.accounts.remove("vera"), return_exceptions=True)
    assert sorted(type(outcome) for outcome in outcomes if outcome is not None) == [AccountError]


async def test_logged_out_user_is_logged_out_everywhere_and_the_others_hear_of_it(only_messages, planes, wait_until):
    one, other = planes
    await one.accounts.first_admin("a long password")
    plain = await one.accounts.log_in("admin", "a long password")
    session = await other.accounts.session(plain)
    await wait_until(lambda: other.records.known == one.records.known)
    other.synced.clear()
    await one.accounts.log_out(session)
    assert await other.accounts.session(plain) is None
    await asyncio.wait_for(other.synced.wait(), 60)
