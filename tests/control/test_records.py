"""Records in memory and in the store: changed together, told in order."""

import asyncio
import re

import pytest

from redpoll.config import Settings
from redpoll.control.records import RecordError, Records
from redpoll.protocol.apps import Key
from redpoll.store.store import Store, database_url


@pytest.fixture
async def store(tmp_path):
    opened = await Store.open(database_url(tmp_path))
    yield opened
    await opened.close()


async def loaded(store: Store) -> Records:
    records = Records(store)
    await records.load()
    return records


@pytest.fixture
async def records(store):
    return await loaded(store)


def given(key: str = "given-key", secret: str = "given-secret", app_id: str = "4711") -> Settings:
    return Settings(app_id=app_id, app_key=key, app_secret=secret)


async def test_a_made_app_is_found_by_id_and_key_and_after_a_restart(store, records):
    app = await records.create_app("demo")
    (key,) = app.keys
    assert re.fullmatch("[1-9][0-9]{6}", app.id)
    assert re.fullmatch("[0-9a-f]{20}", key.key)
    assert re.fullmatch("[0-9a-f]{40}", key.secret)
    assert records.apps[app.id] is records.by_key[key.key] is app
    again = await loaded(store)
    assert (again.apps, again.by_key, again.version) == (records.apps, records.by_key, records.version)


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 201])
async def test_a_name_must_fit_on_a_line(records, name):
    version = records.version
    with pytest.raises(RecordError):
        await records.create_app(name)
    assert (records.apps, records.version) == ({}, version)


async def test_an_empty_store_gets_one_app_once(store, records):
    made = await records.first_app(Settings())
    assert records.apps == {made.id: made}
    assert await records.first_app(Settings()) is None
    assert await (await loaded(store)).first_app(Settings()) is None


async def test_with_an_app_given_none_is_made_up(records):
    assert await records.first_app(given()) is None
    (app,) = records.apps.values()
    assert (app.id, app.keys) == ("4711", (Key(key="given-key", secret="given-secret"),))


async def test_the_same_app_given_again_changes_nothing(store, records):
    await records.first_app(given())
    again = await loaded(store)
    await again.first_app(given())
    assert (again.apps, again.version) == (records.apps, records.version)


async def test_another_secret_given_replaces_the_one_before(records):
    await records.first_app(given())
    await records.first_app(given(secret="other"))
    assert records.apps["4711"].keys == (Key(key="given-key", secret="other"),)
    assert records.by_key["given-key"].secret_of("given-key") == "other"


async def test_another_key_given_takes_the_place_of_the_one_before(store, records):
    await records.first_app(given())
    await records.first_app(given(key="other-key"))
    assert [key.key for key in records.apps["4711"].keys] == ["other-key"]
    assert list(records.by_key) == ["other-key"]
    assert (await loaded(store)).apps == records.apps


async def test_keys_made_here_stay_when_others_are_given(records):
    app = await records.create_app("made")
    await records.first_app(given(app_id=app.id))
    await records.first_app(given(app_id=app.id, key="other-key"))
    assert [key.key for key in records.apps[app.id].keys] == [app.keys[0].key, "other-key"]
    assert records.apps[app.id].name == "made"


async def test_the_printed_app_may_be_given_back(records):
    app = await records.create_app("made")
    version = records.version
    await records.first_app(given(app.keys[0].key, app.keys[0].secret, app.id))
    assert (records.apps[app.id], records.version) == (app, version)


async def test_a_key_of_one_app_cannot_be_given_to_another(records):
    app = await records.create_app("made")
    with pytest.raises(RecordError, match=f"belongs to app {app.id}"):
        await records.first_app(given(key=app.keys[0].key))
    assert list(records.apps) == [app.id]


async def test_every_change_is_told_in_order_with_a_version_one_higher(records):
    told = []

    async def hear(app_id, app, version):
        await asyncio.sleep(0)
        told.append((app_id, app, version))

    records.on_change = hear
    before = records.version
    apps = await asyncio.gather(*(records.create_app(f"app {number}") for number in range(10)))
    assert [version for _, _, version in told] == list(range(before + 1, before + 11))
    assert {app_id: app for app_id, app, _ in told} == {app.id: app for app in apps}
