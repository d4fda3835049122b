"""Records of control planes whose PostgreSQL fails over to one that lacks the last changes."""

from contextlib import AsyncExitStack

import msgspec
import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from redpoll.config.settings import Settings
from redpoll.control.commands.app_write import delete_app
from redpoll.control.records.records import RecordError, Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.protocol.apps import App, Key
from redpoll.store.audit import Actor
from redpoll.store.schema import metadata
from redpoll.store.store import Store


class Backup:
    """What a stand-by has: all rows as they were when this was made."""

    @classmethod
    async def of(cls, store: Store) -> "Backup":
        made = cls()
        async with store.reading() as connection:
            made.rows = {
                table: [dict(row._mapping) for row in await connection.execute(sa.select(table))]
                for table in metadata.sorted_tables
            }
        return made

    async def replace(self, store: Store) -> None:
        async with store.change() as connection:
            for table in reversed(metadata.sorted_tables):
                await connection.execute(sa.delete(table))
            for table, rows in self.rows.items():
                if rows:
                    await connection.execute(sa.insert(table), rows)


@pytest.fixture
async def make(postgres_url):
    """`await make()`: the records and webhooks of one more control plane."""
    async with AsyncExitStack() as stack:

        async def make() -> tuple[Records, Webhooks]:
            store = await Store.open(postgres_url)
            stack.push_async_callback(store.close)
            records = Records(store)
            await records.load()
            webhooks = Webhooks(store, records, Settings())
            await webhooks.load()
            return records, webhooks

        yield make


async def test_change_with_the_number_of_a_lost_one_is_seen(make, postgres_url):
    (one, webhooks), (other, _) = await make(), await make()
    app = await one.create_app("kept")
    extra = await one.add_key(app.id)
    await other.sync()
    store = await Store.open(postgres_url)
    backup = await Backup.of(store)

    lost = await one.create_app("lost")
    await one.create_token(app.id, "lost", ["all"])
    endpoint = await webhooks.endpoints.create(app.id, "https://example.com/hook", ["member.added"])
    await other.sync()
    assert lost.id in other.apps
    await backup.replace(store)
    await store.close()
    third, _ = await make()
    # As many changes as were lost, so the versions are the same again.
    await third.disable_key(app.id, extra.key)
    await third.rename_app(app.id, "renamed")
    await third.rename_app(app.id, "again")
    assert third.known.records == one.known.records
    for records in (one, other):
        assert await records.sync()
        assert records.by_key == third.by_key
        assert records.apps == third.apps
        assert records.tokens == {}
        assert records.directory == third.directory
        assert not await records.sync()
    assert webhooks.endpoints.known(endpoint.id) is None
    assert one.apps[app.id].hooks == ""


async def test_changes_after_a_lost_one_are_seen_and_later_ones_are_read_by_themselves(make, postgres_url):
    one, _ = await make()
    app = await one.create_app("kept")
    store = await Store.open(postgres_url)
    backup = await Backup.of(store)
    await one.create_app("lost")
    await backup.replace(store)
    await store.close()
    rewound = []
    one.on_rewound = rewound.append
    await one.sync()
    assert list(one.apps) == [app.id]
    # Workers wait for the version that they got at their start, which was higher.
    assert rewound == [one.version]
    third, _ = await make()
    for number in range(3):
        await third.rename_app(app.id, f"name {number}")
        await one.sync()
        assert one.apps == third.apps
    # Two more than known, of which the first one replaced a lost one.
    store = await Store.open(postgres_url)
    backup = await Backup.of(store)
    await one.create_app("lost again")
    await backup.replace(store)
    await store.close()
    third, _ = await make()
    await third.rename_app(app.id, "name 3")
    await third.create_app("new")
    await third.create_app("newer")
    assert third.known.records == one.known.records + 2
    with capture_logs() as logs:
        await one.sync()
    assert (one.apps, one.by_key) == (third.apps, third.by_key)
    assert [line["event"].endswith("all records read") for line in logs] == [True]


async def test_change_that_redis_brought_and_the_store_lost_is_undone(make, postgres_url):
    """While PostgreSQL fails over, a control plane takes the last change from Redis; the new primary lacks it."""
    (one, _), (other, _) = await make(), await make()
    app = await one.create_app("kept")
    token, _ = await one.create_token(app.id, "CI", ["all"])
    await other.sync()
    store = await Store.open(postgres_url)
    backup = await Backup.of(store)
    lost = await one.add_key(app.id)
    await one.revoke_tokens([token.id])
    other.adopt_directory(one.directory, one.apps)
    other.forget_revoked([token.hash])
    assert lost.key in other.by_key
    await backup.replace(store)
    await store.close()
    assert await other.sync()
    third, _ = await make()
    assert (other.by_key, other.tokens, other.directory) == (third.by_key, third.tokens, third.directory)
    assert not await other.sync()


async def test_deleted_app_is_gone_in_every_control_plane_also_if_its_id_is_used_again(make):
    (one, webhooks), (other, others_webhooks) = await make(), await make()
    kept = await one.create_app("kept")
    app = await one.create_app("deleted")
    token, _ = await one.create_token(app.id, "CI", ["all"])
    endpoint = await webhooks.endpoints.create(app.id, "https://example.com/hook")
    await other.sync()
    revoked = []
    one.on_revoked = other.on_revoked = revoked.extend
    await delete_app(one, webhooks, app.id, Actor("test"))
    assert await other.sync()
    assert list(other.apps) == list(one.apps) == [kept.id]
    assert other.by_key == one.by_key
    assert (other.tokens, one.tokens, revoked) == ({}, {}, [token.hash] * 2)
    assert (others_webhooks.endpoints.of_app(app.id), other.directory) == ((), one.directory)

    again = App(id=app.id, name="again", keys=(Key(key="new", secret="s"),))
    await one.import_app(app.id, lambda _: again)
    assert await other.sync()
    made = other.apps[app.id]
    assert made == one.apps[app.id] == msgspec.structs.replace(again, made=made.made)
    # Deleted and made again between two looks.
    await one.create_token(app.id, "CI", ["all"])
    await webhooks.endpoints.create(app.id, "https://example.com/hook")
    await other.sync()
    assert (len(other.tokens), len(others_webhooks.endpoints.of_app(app.id))) == (1, 1)
    await delete_app(one, webhooks, app.id, Actor("test"))
    newer = App(id=app.id, name="newer", keys=(Key(key="newer", secret="s"),))
    await one.import_app(app.id, lambda _: newer)
    assert await other.sync()
    assert (other.apps[app.id].keys, "new" in other.by_key) == (newer.keys, False)
    assert other.apps[app.id].made not in ("", made.made)
    assert (other.tokens, others_webhooks.endpoints.of_app(app.id)) == ({}, ())
    assert not await other.sync()
    third, thirds_webhooks = await make()
    assert (third.apps, third.by_key) == (other.apps, other.by_key)
    assert thirds_webhooks.endpoints.of_app(app.id) == ()
    assert endpoint.app_id == app.id


async def test_condition_is_checked_after_the_changes_of_others(make):
    (one, _), (other, _) = await make(), await make()
    app = await one.create_app("name")
    await other.sync()
    seen = []

    def condition():
        seen.append(other.apps[app.id].name)
        if seen[-1] != "name":
            raise RecordError("changed")

    by = Actor("test", condition=condition)
    await other.rename_app(app.id, "other's", by=by)
    await one.sync()
    await one.rename_app(app.id, "one's")
    with pytest.raises(RecordError):
        await other.rename_app(app.id, "name", by=by)
    assert seen == ["name", "one's"]
    assert other.apps == one.apps


async def test_key_that_moved_to_an_app_with_a_smaller_id_is_read_in_one_look(make):
    """Apps are read in order of their ids: the new owner comes before the record that loses the key."""
    (one, _), (other, _) = await make(), await make()
    for app_id, key in (("1", "first"), ("9", "moving"), ("9", "stays")):
        given = Key(key=key, secret="s" * 40)
        await one.import_app(
            app_id,
            lambda known, app_id=app_id, given=given: App(
                id=app_id, name="app", keys=(given,) if known is None else (*known.keys, given)
            ),
        )
    await other.sync()
    await one.delete_key("9", "moving")
    await one.add_key("1", "moving")
    assert await other.sync()
    assert other.by_key == one.by_key
    assert other.by_key["moving"].id == "1"
    await one.rename_app("1", "after")
    assert await other.sync()
    assert (other.by_key, other.apps) == (one.by_key, one.apps)


async def test_what_is_on_or_off_is_decided_by_the_store_and_not_by_older_memory(make):
    (one, webhooks), (other, others_webhooks) = await make(), await make()
    app = await one.create_app("a")
    first = app.keys[0].key
    await one.add_key(app.id)
    endpoint = await webhooks.endpoints.create(app.id, "https://example.com/hook")
    await other.sync()
    await webhooks.endpoints.set_enabled(endpoint.id, False)
    await one.disable_key(app.id, first)
    # For the other node, both are still enabled.
    assert (await others_webhooks.endpoints.set_enabled(endpoint.id, True)).enabled
    assert (await other.enable_key(app.id, first)).enabled
    assert await one.sync()
    assert webhooks.endpoints.get(endpoint.id).enabled
    assert first in {key.key for key in one.apps[app.id].keys if key.enabled}
    # Nothing to do is nothing in the store.
    before = one.known
    await webhooks.endpoints.set_enabled(endpoint.id, True)
    await webhooks.endpoints.change(endpoint.id, enabled=True)
    await one.enable_key(app.id, first)
    assert one.known == before
