"""Records change in memory and in the store together, and changes are reported in order."""

import asyncio
import re

import msgspec
import pytest

from redpoll.config.config import Settings
from redpoll.control.records.loaded_records import Origin
from redpoll.control.records.records import RecordError, Records
from redpoll.protocol.apps import App, HistoryRule, Key
from redpoll.store import apps as app_rows
from redpoll.store import audit
from redpoll.store.audit import Actor
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

ENDPOINT = Endpoint(
    id="e1", app_id="1", url="https://e.com", secret="s", events=("all",), channels=(), format="service", created_at=0.0
)


async def loaded(store: Store) -> Records:
    records = Records(store)
    await records.load()
    return records


@pytest.fixture
async def records(store):
    return await loaded(store)


def given(key: str = "given-key", secret: str = "given-secret", app_id: str = "4711") -> Settings:
    return Settings(app_id=app_id, app_key=key, app_secret=secret)


async def test_created_app_is_found_by_id_and_key_and_after_a_restart(store, records):
    app = await records.create_app("demo")
    (key,) = app.keys
    assert re.fullmatch("[1-9][0-9]{6}", app.id)
    assert re.fullmatch("[0-9a-f]{20}", key.key)
    assert re.fullmatch("[0-9a-f]{40}", key.secret)
    assert records.apps[app.id] is records.by_key[key.key] is app
    again = await loaded(store)
    assert (again.apps, again.by_key, again.version) == (records.apps, records.by_key, records.version)


async def test_each_new_app_has_a_word_of_its_own_that_changes_keep(store, records):
    def imported(name):
        new = App(id="i", name=name, keys=(Key(key="imported-key", secret="s"),))
        return lambda known: new if known is None else msgspec.structs.replace(known, name=name)

    await records.first_app(given())
    await records.import_app("i", imported("one"))
    app = await records.create_app("created")
    words = {app.id: app.made for app in records.apps.values()}
    assert len(set(words.values()) - {""}) == 3
    await records.first_app(given(key="other-key"))
    await records.import_app("i", imported("two"))
    await records.set_app(app.id, {"max_batch": 20})
    await records.add_key(app.id)
    assert {app.id: app.made for app in records.apps.values()} == words
    assert (await loaded(store)).apps == records.apps


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 201])
async def test_app_with_an_invalid_name_is_refused(records, name):
    version = records.version
    with pytest.raises(RecordError):
        await records.create_app(name)
    assert (records.apps, records.version) == ({}, version)


async def test_first_app_is_created_once_in_an_empty_store(store, records):
    made = await records.first_app(Settings())
    assert records.apps == {made.id: made}
    assert await records.first_app(Settings()) is None
    assert await (await loaded(store)).first_app(Settings()) is None


async def test_app_from_settings_replaces_the_generated_first_app(records):
    assert await records.first_app(given()) is None
    (app,) = records.apps.values()
    assert (app.id, app.keys) == ("4711", (Key(key="given-key", secret="given-secret"),))


async def test_same_app_in_settings_changes_nothing(store, records):
    await records.first_app(given())
    again = await loaded(store)
    await again.first_app(given())
    assert (again.apps, again.version) == (records.apps, records.version)


async def test_new_secret_in_settings_replaces_the_previous_one(records):
    await records.first_app(given())
    await records.first_app(given(secret="other"))
    assert records.apps["4711"].keys == (Key(key="given-key", secret="other"),)
    assert records.by_key["given-key"].secret_of("given-key") == "other"


async def test_new_key_in_settings_replaces_the_previous_one(store, records):
    await records.first_app(given())
    await records.first_app(given(key="other-key"))
    assert [key.key for key in records.apps["4711"].keys] == ["other-key"]
    assert list(records.by_key) == ["other-key"]
    assert (await loaded(store)).apps == records.apps


async def test_new_key_in_settings_keeps_created_keys(records):
    app = await records.create_app("made")
    await records.first_app(given(app_id=app.id))
    await records.first_app(given(app_id=app.id, key="other-key"))
    assert [key.key for key in records.apps[app.id].keys] == [app.keys[0].key, "other-key"]
    assert records.apps[app.id].name == "made"


async def test_created_app_may_be_passed_as_settings(records):
    app = await records.create_app("made")
    version = records.version
    await records.first_app(given(app.keys[0].key, app.keys[0].secret, app.id))
    assert (records.apps[app.id], records.version) == (app, version)


async def test_settings_with_a_key_of_another_app_are_refused(records):
    app = await records.create_app("made")
    with pytest.raises(RecordError, match=f"belongs to app {app.id}"):
        await records.first_app(given(key=app.keys[0].key))
    assert list(records.apps) == [app.id]


async def test_changes_are_reported_in_order_with_increasing_versions(records):
    reported = []

    async def hear(app_id, app, before, after):
        await asyncio.sleep(0)
        reported.append((app_id, app, after.number))

    records.on_change = hear
    before = records.version
    apps = await asyncio.gather(*(records.create_app(f"app {number}") for number in range(10)))
    assert [version for _, _, version in reported] == list(range(before + 1, before + 11))
    assert {app_id: app for app_id, app, _ in reported} == {app.id: app for app in apps}


class Changes:
    """Records every reported change."""

    def __init__(self, records: Records) -> None:
        self.seen: list[tuple[App, int]] = []
        records.on_change = self._hear

    async def _hear(self, app_id, app, before, after):
        assert before.id != after.id
        self.seen.append((app, after.number))


# -- settings


async def test_changed_setting_is_stored_and_reported_with_the_next_version(store, records):
    app = await records.create_app("x")
    changes, before = Changes(records), records.version
    changed = await records.set_app(app.id, {"plan": "free", "allowed_origins": ("a.example",)})
    assert (changed.plan, changed.allowed_origins, changed.keys) == ("free", ("a.example",), app.keys)
    assert changes.seen == [(changed, before + 1)]
    assert records.apps[app.id] is records.by_key[app.keys[0].key] is changed
    assert (await loaded(store)).apps == records.apps


async def test_setting_with_its_current_value_changes_nothing(records):
    app = await records.create_app("x")
    changes, before = Changes(records), records.version
    assert await records.set_app(app.id, {"enabled": True}) == app
    assert await records.set_app(app.id, {}) == app
    assert (changes.seen, records.version) == ([], before)


async def test_settings_of_an_unknown_app_are_refused(records):
    with pytest.raises(RecordError, match="there is no app with the id 5"):
        await records.set_app("5", {"enabled": False})


async def test_member_list_of_a_full_channel_must_fit_into_half_the_send_buffer(records, store):
    app = await records.create_app("x")
    version = records.version
    with pytest.raises(RecordError, match=r"500 members of 1152 bytes .* do not fit into 524288 bytes"):
        await records.set_app(app.id, {"max_presence_members": 500})
    assert (records.apps[app.id], records.version) == (app, version)
    await records.set_app(app.id, {"max_presence_members": 455})
    wide = Records(store, max_unsent_bytes=2 * 1_048_576)
    await wide.load()
    await wide.set_app(app.id, {"max_presence_members": 500})


async def test_record_that_is_too_large_for_workers_is_refused(records):
    app = await records.create_app("x")
    with pytest.raises(RecordError, match="the maximum is 16384"):
        await records.set_app(app.id, {"allowed_origins": tuple(f"{number:0250}.example" for number in range(70))})


# -- keys


async def test_new_key_works_together_with_the_old_one(store, records):
    app = await records.create_app("x")
    changes, before = Changes(records), records.version
    made = await records.add_key(app.id)
    assert re.fullmatch("[0-9a-f]{20}", made.key)
    assert re.fullmatch("[0-9a-f]{40}", made.secret)
    changed = records.apps[app.id]
    assert changed.keys == (*app.keys, made)
    assert changed.signing_key() == app.keys[0]
    assert records.by_key[made.key] is records.by_key[app.keys[0].key] is changed
    assert changes.seen == [(changed, before + 1)]
    assert (await loaded(store)).apps == records.apps


async def test_new_key_signs_after_the_old_one_is_disabled(store, records):
    app = await records.create_app("x")
    old, new = app.keys[0], await records.add_key(app.id)
    changes = Changes(records)
    assert await records.disable_key(app.id, old.key) == Key(key=old.key, secret=old.secret, enabled=False)
    changed = records.apps[app.id]
    assert changed.secret_of(old.key) is None
    assert changed.signing_key() == new
    assert [app for app, _ in changes.seen] == [changed]
    assert (await loaded(store)).apps == records.apps


async def test_key_may_be_chosen_by_the_operator(records):
    app = await records.create_app("x")
    assert (await records.add_key(app.id, "my-key_2")).key == "my-key_2"
    for name in ("a:b", "a/b", "ä", "x" * 129):
        with pytest.raises(RecordError, match="must have 1 to 128 letters"):
            await records.add_key(app.id, name)


async def test_key_that_exists_already_cannot_be_added(records):
    app, other = await records.create_app("x"), await records.create_app("y")
    with pytest.raises(RecordError, match=f"belongs to app {other.id}"):
        await records.add_key(app.id, other.keys[0].key)
    with pytest.raises(RecordError, match="already has the key"):
        await records.add_key(app.id, app.keys[0].key)
    with pytest.raises(RecordError, match="there is no app"):
        await records.add_key("5")


async def test_adding_a_disabled_key_enables_it_with_its_secret_and_position(store, records):
    app = await records.create_app("x")
    await records.add_key(app.id)
    await records.disable_key(app.id, app.keys[0].key)
    assert await records.add_key(app.id, app.keys[0].key) == app.keys[0]
    assert records.apps[app.id].signing_key() == app.keys[0]
    assert (await loaded(store)).apps == records.apps


async def test_last_enabled_key_cannot_be_disabled(records):
    app = await records.create_app("x")
    changes = Changes(records)
    with pytest.raises(RecordError, match=rf"last enabled key .*redpoll key add {app.id}"):
        await records.disable_key(app.id, app.keys[0].key)
    assert (records.apps[app.id], changes.seen) == (app, [])


async def test_disabling_a_key_again_changes_nothing_and_an_unknown_key_is_refused(records):
    app = await records.create_app("x")
    await records.add_key(app.id, "second")
    await records.disable_key(app.id, "second")
    changes = Changes(records)
    assert not (await records.disable_key(app.id, "second")).enabled
    assert changes.seen == []
    with pytest.raises(RecordError, match="has no key third"):
        await records.disable_key(app.id, "third")


async def test_disabled_key_from_settings_stays_disabled_after_a_restart(records):
    await records.first_app(given())
    await records.add_key("4711", "second")
    await records.disable_key("4711", "given-key")
    await records.first_app(given())
    assert records.apps["4711"].secret_of("given-key") is None


async def test_number_of_keys_is_limited_by_the_size_of_the_record(records):
    app = await records.create_app("x")
    for number in range(60):
        await records.add_key(app.id, f"{number:0128}")
    await records.set_app(app.id, {"allowed_origins": tuple(f"{number:040}" for number in range(50))})
    with pytest.raises(RecordError, match="the maximum is 16384"):
        await add_keys(records, app.id, 20)


async def add_keys(records: Records, app_id: str, count: int) -> None:
    for number in range(count):
        await records.add_key(app_id, f"more{number:0124}")


async def test_keys_can_be_rotated_without_limit(store, records):
    app = await records.create_app("x")
    for number in range(30):
        await records.add_key(app.id, f"key{number}")
        await records.disable_key(app.id, records.apps[app.id].signing_key().key)
    keys = [key.key for key in records.apps[app.id].keys]
    assert keys == [f"key{number}" for number in range(18, 30)]
    assert set(records.by_key) == set(keys)
    assert (await loaded(store)).apps == records.apps


# -- history rules, hooks, the console


def rule(name: str = "news-", **fields) -> HistoryRule:
    return HistoryRule(**{"id": "", "name": name, "prefix": True, "keep": 10, "seconds": 60, **fields})


async def test_history_rule_gets_an_id_is_stored_and_reported(store, records):
    app = await records.create_app("x")
    changes, before = Changes(records), records.version
    made = [await records.add_history_rule(app.id, rule(name)) for name in ("a", "b")]
    assert all(re.fullmatch("[0-9a-f]{6}", added.id) for added in made)
    assert records.apps[app.id].history == tuple(made)
    assert [version for _, version in changes.seen] == [before + 1, before + 2]
    assert (await loaded(store)).apps == records.apps
    assert await records.remove_history_rule(app.id, made[0].id) == made[0]
    assert (await loaded(store)).apps[app.id].history == (made[1],)


async def test_recreated_rule_has_a_new_era_and_other_rules_keep_theirs(store, records):
    app = await records.create_app("x")
    one, other = [await records.add_history_rule(app.id, rule(name)) for name in ("a", "b")]
    assert one.era != other.era
    assert one.era
    await records.remove_history_rule(app.id, one.id)
    again = await records.add_history_rule(app.id, rule("a"))
    assert again.era not in (one.era, other.era, "")
    assert records.apps[app.id].history == (other, again)
    assert (await loaded(store)).apps[app.id].history == (other, again)


async def test_rules_of_unknown_apps_and_unknown_rules_are_refused(records):
    app = await records.create_app("x")
    with pytest.raises(RecordError, match="there is no app with the id 5"):
        await records.add_history_rule("5", rule())
    with pytest.raises(RecordError, match="has no history rule with the id 00000a"):
        await records.remove_history_rule(app.id, "00000a")


async def test_endpoints_and_hooks_change_together(store, records):
    app = await records.create_app("x")
    changes, before = Changes(records), records.version
    async with records.edit(None) as edit:
        await app_rows.enable_key(edit.connection, app.keys[0].key, False)
        edit.endpoints = (ENDPOINT,)
        edit.app = msgspec.structs.replace(app, hooks="om")
        assert records.apps[app.id].hooks == ""
    assert records.apps[app.id].hooks == "om"
    assert changes.seen == [(records.apps[app.id], before + 1)]
    assert not (await loaded(store)).apps[app.id].keys[0].enabled


async def test_failed_change_of_endpoints_changes_nothing(store, records):
    app = await records.create_app("x")
    changes, before = Changes(records), records.version

    async def fail():
        async with records.edit(Actor("vera")) as edit:
            await app_rows.enable_key(edit.connection, app.keys[0].key, False)
            edit.app = msgspec.structs.replace(app, hooks="o")
            await edit.note("webhook create", app.id, "e1")
            raise RecordError("no")

    with pytest.raises(RecordError, match="no"):
        await fail()
    assert (records.apps[app.id], changes.seen, records.version) == (app, [], before)
    again = await loaded(store)
    assert (again.apps, again.version) == (records.apps, before)
    async with store.reading() as connection:
        assert await audit.find(connection) == []


async def test_change_of_endpoints_without_new_hooks_is_not_reported(records):
    changes, before, taken = Changes(records), records.version, []
    records.on_endpoints = lambda *given: taken.append(given)
    async with records.edit(None) as edit:
        edit.endpoints = (ENDPOINT,)
        assert taken == []
    assert taken == [({"e1": ENDPOINT}, Origin.HERE)]
    assert (changes.seen, records.version) == ([], before)


async def test_computed_fields_survive_changes_of_the_app(store, records):
    app = await records.create_app("x")
    again = await loaded(store)
    again.set_hooks({app.id: "omc", "5": "o"})
    assert (again.apps[app.id].hooks, again.version) == ("omc", records.version)
    await again.watch_console(app.id, 99.0)
    await again.add_key(app.id, "second")
    await again.disable_key(app.id, "second")
    await again.upsert_app(app.id, "third", "secret")
    await again.set_app(app.id, {"plan": "free"})
    held = again.apps[app.id]
    assert (held.hooks, held.console_until) == ("omc", 99.0)
    assert again.by_key["third"] is held


async def test_console_key_is_created_once_and_is_no_key_of_the_app(store, records):
    app = await records.create_app("x")
    key = await records.watch_console(app.id, 50.0)
    assert await records.watch_console(app.id, 80.0) == key
    held = records.apps[app.id]
    assert (held.console_key, held.console_until) == (key, 80.0)
    assert key.key not in records.by_key
    assert held.secret_of(key.key) is None
    assert (await loaded(store)).apps[app.id].console_key == key


async def test_app_is_renamed(store, records):
    app = await records.create_app("x")
    changes = Changes(records)
    await records.rename_app(app.id, "new name")
    assert records.apps[app.id].name == changes.seen[0][0].name == "new name"
    assert (await loaded(store)).apps == records.apps
    with pytest.raises(RecordError, match="1 to 200 printable"):
        await records.rename_app(app.id, "")


# -- daily counters


@pytest.fixture
async def app_id(records):
    return (await records.create_app("x")).id


async def test_daily_counter_is_stored_and_never_decreases(store, records, app_id):
    await records.save_daily("20261121", {app_id: 10})
    await records.save_daily("20261121", {app_id: 9})
    assert await records.daily_used("20261121") == {app_id: 10}
    assert await (await loaded(store)).daily_used("20261121") == {app_id: 10}


async def test_counter_of_a_deleted_app_is_ignored(records, app_id):
    await records.save_daily("20261121", {"5": 3, app_id: 10})
    assert await records.daily_used("20261121") == {app_id: 10}


async def test_counters_are_kept_for_a_month(records, app_id):
    for day in ("20261020", "20261021", "20261121"):
        await records.save_daily(day, {app_id: 1})
    days = [await records.daily_used(day) for day in ("20261020", "20261021")]
    assert days == [{}, {app_id: 1}]
