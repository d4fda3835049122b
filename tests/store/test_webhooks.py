"""Webhook endpoints in the record store: written, changed, removed."""

import msgspec
import pytest
import sqlalchemy as sa

from redpoll.store import deliveries as delivery_rows
from redpoll.store import old_deliveries
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.schema import apps, revision
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

ENDPOINT = Endpoint(
    id="e1",
    app_id="1",
    url="https://example.com/hook",
    secret="s" * 40,
    events=("all", "cache.miss"),
    channels=("room-", "private-"),
    format="pusher",
    created_at=1.5,
    pin="ab" * 32,
    previous_secret="o" * 40,
    previous_until=99.5,
    disabled_at=7.5,
)


@pytest.fixture
async def store(store_url):
    opened = await Store.open(store_url)
    async with opened.change() as connection:
        await connection.execute(sa.insert(apps).values(id="1", name="a", settings="{}"))
    yield opened
    await opened.close()


async def all_endpoints(store):
    async with store.reading() as connection:
        return await endpoint_rows.all_by_id(connection)


async def test_endpoint_is_read_back_as_written(store):
    async with store.change() as connection:
        await endpoint_rows.add(connection, ENDPOINT)
    assert await all_endpoints(store) == {"e1": ENDPOINT}
    assert not ENDPOINT.enabled
    async with store.reading() as connection:
        assert await endpoint_rows.find_by_id(connection, "e1") == ENDPOINT
        assert await endpoint_rows.find_by_id(connection, "e2") is None


async def test_endpoints_of_a_store_from_before_batches_have_none(store, store_url):
    async with store.change() as connection:
        await endpoint_rows.add(connection, ENDPOINT)
        await connection.execute(sa.text("ALTER TABLE webhooks DROP COLUMN batch"))
        await connection.execute(sa.update(revision).values(version_num="0013"))
    opened = await Store.open(store_url)
    assert await all_endpoints(opened) == {"e1": ENDPOINT}
    batched = msgspec.structs.replace(ENDPOINT, batch=True)
    async with opened.change() as connection:
        await endpoint_rows.put(connection, batched)
    assert await all_endpoints(opened) == {"e1": batched}
    await opened.close()


async def test_endpoints_are_sorted_oldest_first(store):
    async with store.change() as connection:
        for name, created_at in (("b", 2.0), ("c", 1.0), ("a", 3.0)):
            await endpoint_rows.add(connection, msgspec.structs.replace(ENDPOINT, id=name, created_at=created_at))
    assert list(await all_endpoints(store)) == ["c", "b", "a"]


async def test_existing_endpoints_are_found_among_more_ids_than_a_statement_has_values(store):
    async with store.change() as connection:
        for name in ("e1", "e2"):
            await endpoint_rows.add(connection, msgspec.structs.replace(ENDPOINT, id=name))
        asked = ["e1", *(f"x{number}" for number in range(33_000)), "e2"]
        assert await endpoint_rows.existing(connection, asked) == {"e1", "e2"}


async def test_changing_an_endpoint_keeps_failing_since(store):
    async with store.change() as connection:
        await endpoint_rows.add(connection, ENDPOINT)
        await endpoint_rows.set_failing_since(connection, "e1", 5.0)
        await endpoint_rows.put(connection, msgspec.structs.replace(ENDPOINT, url="https://example.com/2"))
    (changed,) = (await all_endpoints(store)).values()
    assert (changed.url, changed.failing_since) == ("https://example.com/2", 5.0)


async def test_previous_secret_is_valid_until_its_end(store):
    assert ENDPOINT.secrets(99.0) == ["s" * 40, "o" * 40]
    assert ENDPOINT.secrets(99.5) == ["s" * 40]


async def test_endpoints_and_their_deliveries_are_removed_with_the_app(store):
    async with store.change() as connection:
        await endpoint_rows.add(connection, ENDPOINT)
        with pytest.raises(sa.exc.IntegrityError):
            async with connection.begin_nested():
                await endpoint_rows.add(connection, msgspec.structs.replace(ENDPOINT, id="e2", app_id="9"))
        await delivery_rows.add(connection, [row("d1")])
        await connection.execute(sa.delete(apps))
        assert await delivery_rows.find_by_id(connection, "d1") is None
    assert await all_endpoints(store) == {}


async def test_deleted_endpoint_is_removed_after_its_last_delivery(store):
    async with store.change() as connection:
        await endpoint_rows.add(connection, msgspec.structs.replace(ENDPOINT, deleted_at=8.0))
        await endpoint_rows.add(connection, msgspec.structs.replace(ENDPOINT, id="e2"))
        await delivery_rows.add(connection, [row("d1")])
        assert await endpoint_rows.remove_deleted(connection) == []
        await delivery_rows.discard(connection, ["d1"], 9.0)
        await old_deliveries.remove_finished(connection, "e1", keep=0, older_than=99.0, before=99.0)
        assert await endpoint_rows.remove_deleted(connection) == ["e1"]
    assert list(await all_endpoints(store)) == ["e2"]


def row(delivery_id):
    columns = {"event": "cache.miss", "channel": "c", "user": None, "stamp": 1, "time_ms": 1, "trace": None}
    return {"id": delivery_id, "endpoint_id": "e1", "body": b"{}", "at": 1.0, "created_at": 1.0, **columns}
