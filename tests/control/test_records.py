"""Records in memory and in the store: changed together, told in order."""

import asyncio
import re

import pytest

from redpoll.config import Settings
from redpoll.control.records import RecordError, Records
from redpoll.protocol.apps import App, Key
from redpoll.protocol.auth import token_hash
from redpoll.protocol.tokens import fault_of_token
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


class Told:
    """Hears every change."""

    def __init__(self, records: Records) -> None:
        self.changes: list[tuple[App, int]] = []
        records.on_change = self._hear

    async def _hear(self, app_id, app, version):
        self.changes.append((app, version))


# -- settings


async def test_a_setting_is_kept_and_told_with_the_next_version(store, records):
    app = await records.create_app("x")
    told, before = Told(records), records.version
    changed = await records.set_app(app.id, {"plan": "free", "allowed_origins": ("a.example",)})
    assert (changed.plan, changed.allowed_origins, changed.keys) == ("free", ("a.example",), app.keys)
    assert told.changes == [(changed, before + 1)]
    assert records.apps[app.id] is records.by_key[app.keys[0].key] is changed
    assert (await loaded(store)).apps == records.apps


async def test_a_setting_that_says_what_is_so_already_changes_nothing(records):
    app = await records.create_app("x")
    told, before = Told(records), records.version
    assert await records.set_app(app.id, {"enabled": True}) == app
    assert await records.set_app(app.id, {}) == app
    assert (told.changes, records.version) == ([], before)


async def test_settings_of_no_app_are_refused(records):
    with pytest.raises(RecordError, match="there is no app with the id 5"):
        await records.set_app("5", {"enabled": False})


async def test_a_full_channels_roster_must_fit_into_half_of_what_a_connection_may_be_owed(records, store):
    app = await records.create_app("x")
    version = records.version
    with pytest.raises(RecordError, match=r"500 members of 1152 bytes .* do not fit into 524288 bytes"):
        await records.set_app(app.id, {"max_presence_members": 500})
    assert (records.apps[app.id], records.version) == (app, version)
    await records.set_app(app.id, {"max_presence_members": 455})
    wide = Records(store, max_owed_bytes=2 * 1_048_576)
    await wide.load()
    await wide.set_app(app.id, {"max_presence_members": 500})


async def test_a_record_that_workers_would_not_take_is_refused(records):
    app = await records.create_app("x")
    with pytest.raises(RecordError, match="every worker keeps 16384"):
        await records.set_app(app.id, {"allowed_origins": tuple(f"{number:0250}.example" for number in range(70))})


# -- keys


async def test_a_new_key_works_beside_the_old_one(store, records):
    app = await records.create_app("x")
    told, before = Told(records), records.version
    made = await records.add_key(app.id)
    assert re.fullmatch("[0-9a-f]{20}", made.key)
    assert re.fullmatch("[0-9a-f]{40}", made.secret)
    changed = records.apps[app.id]
    assert changed.keys == (*app.keys, made)
    assert changed.signing_key() == app.keys[0]
    assert records.by_key[made.key] is records.by_key[app.keys[0].key] is changed
    assert told.changes == [(changed, before + 1)]
    assert (await loaded(store)).apps == records.apps


async def test_after_the_old_key_is_disabled_the_new_one_signs(store, records):
    app = await records.create_app("x")
    old, new = app.keys[0], await records.add_key(app.id)
    told = Told(records)
    assert await records.disable_key(app.id, old.key) == Key(key=old.key, secret=old.secret, enabled=False)
    changed = records.apps[app.id]
    assert changed.secret_of(old.key) is None
    assert changed.signing_key() == new
    assert [each for each, _ in told.changes] == [changed]
    assert (await loaded(store)).apps == records.apps


async def test_a_key_may_have_a_name_of_its_own(records):
    app = await records.create_app("x")
    assert (await records.add_key(app.id, "my-key_2")).key == "my-key_2"
    for name in ("a:b", "a/b", "ä", "x" * 129):
        with pytest.raises(RecordError, match="holds letters, digits"):
            await records.add_key(app.id, name)


async def test_a_key_of_anybody_cannot_be_added(records):
    app, other = await records.create_app("x"), await records.create_app("y")
    with pytest.raises(RecordError, match=f"belongs to app {other.id}"):
        await records.add_key(app.id, other.keys[0].key)
    with pytest.raises(RecordError, match=r"has the key .* already"):
        await records.add_key(app.id, app.keys[0].key)
    with pytest.raises(RecordError, match="there is no app"):
        await records.add_key("5")


async def test_a_disabled_key_added_again_is_back_with_its_secret_and_age(store, records):
    app = await records.create_app("x")
    await records.add_key(app.id)
    await records.disable_key(app.id, app.keys[0].key)
    assert await records.add_key(app.id, app.keys[0].key) == app.keys[0]
    assert records.apps[app.id].signing_key() == app.keys[0]
    assert (await loaded(store)).apps == records.apps


async def test_the_last_enabled_key_cannot_be_disabled(records):
    app = await records.create_app("x")
    told = Told(records)
    with pytest.raises(RecordError, match=rf"last enabled key .*redpoll key add {app.id}"):
        await records.disable_key(app.id, app.keys[0].key)
    assert (records.apps[app.id], told.changes) == (app, [])


async def test_disabling_twice_is_once_and_an_unknown_key_is_told(records):
    app = await records.create_app("x")
    await records.add_key(app.id, "second")
    await records.disable_key(app.id, "second")
    told = Told(records)
    assert not (await records.disable_key(app.id, "second")).enabled
    assert told.changes == []
    with pytest.raises(RecordError, match="has no key third"):
        await records.disable_key(app.id, "third")


async def test_a_given_key_that_was_disabled_stays_so_after_a_restart(records):
    await records.first_app(given())
    await records.add_key("4711", "second")
    await records.disable_key("4711", "given-key")
    await records.first_app(given())
    assert records.apps["4711"].secret_of("given-key") is None


async def test_an_app_can_have_only_as_many_keys_as_its_record_holds(records):
    app = await records.create_app("x")
    for number in range(60):
        await records.add_key(app.id, f"{number:0128}")
    await records.set_app(app.id, {"allowed_origins": tuple(f"{number:040}" for number in range(50))})
    with pytest.raises(RecordError, match="every worker keeps 16384"):
        await add_keys(records, app.id, 20)


async def add_keys(records: Records, app_id: str, count: int) -> None:
    for number in range(count):
        await records.add_key(app_id, f"more{number:0124}")


async def test_key_rotation_never_ends(store, records):
    app = await records.create_app("x")
    for number in range(30):
        await records.add_key(app.id, f"key{number}")
        await records.disable_key(app.id, records.apps[app.id].signing_key().key)
    keys = [key.key for key in records.apps[app.id].keys]
    assert keys == [f"key{number}" for number in range(18, 30)]
    assert set(records.by_key) == set(keys)
    assert (await loaded(store)).apps == records.apps


# -- tokens


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def timed(store, clock):
    """Records whose time is `clock`'s, with an app "x"."""
    made = Records(store, clock=clock)
    await made.load()
    await made.create_app("x")
    yield made
    await made.finish()


@pytest.fixture
def app_id(timed):
    return next(iter(timed.apps))


async def test_a_token_is_shown_once_and_found_by_its_hash(store, timed, app_id):
    token, plain = await timed.create_token(app_id, "CI", ["read", "publish", "read"], 3_600)
    assert re.fullmatch("rp_[A-Za-z0-9]{40}", plain)
    assert timed.tokens[token_hash(plain)] is token
    assert (token.name, token.prefix, token.scopes) == ("CI", plain[:8], ("publish", "read"))
    assert (token.created_at, token.expires_at, token.last_used_at) == (1_000_000.0, 1_003_600.0, None)
    assert (await loaded(store)).tokens == timed.tokens


async def test_the_plain_form_is_nowhere_in_the_store(store, timed, app_id, tmp_path):
    _, plain = await timed.create_token(app_id, "CI", ["all"])
    await store.close()
    for path in tmp_path.iterdir():
        assert plain.encode() not in path.read_bytes()


async def test_a_token_changes_nothing_that_workers_keep(timed, app_id):
    told, before = Told(timed), timed.version
    token, _ = await timed.create_token(app_id, "CI", ["all"])
    await timed.revoke_tokens([token.id])
    assert (told.changes, timed.version) == ([], before)


@pytest.mark.parametrize(
    ("name", "scopes", "lasts_s", "fault"),
    [
        ("", ["all"], None, "a token's name is"),
        ("a\nb", ["all"], None, "a token's name is"),
        ("n", [], None, "one scope or more out of publish, read, auth, all, not nothing"),
        ("n", ["read", "write"], None, "not 'write'"),
        ("n", ["all"], 0, "at most a hundred years"),
        ("n", ["all"], 10**12, "at most a hundred years"),
    ],
)
async def test_what_is_no_token_is_refused(timed, app_id, name, scopes, lasts_s, fault):
    with pytest.raises(RecordError, match=fault):
        await timed.create_token(app_id, name, scopes, lasts_s)
    assert timed.tokens == {}


async def test_a_token_of_no_app_is_refused(timed):
    with pytest.raises(RecordError, match="there is no app with the id 5"):
        await timed.create_token("5", "n", ["all"])
    with pytest.raises(RecordError, match="there is no app with the id 5"):
        timed.tokens_of("5")


async def test_an_app_lists_its_own_tokens(timed, app_id):
    other = await timed.create_app("y")
    mine = [(await timed.create_token(app_id, name, ["all"]))[0] for name in ("a", "b")]
    await timed.create_token(other.id, "c", ["all"])
    assert timed.tokens_of(app_id) == mine


async def test_a_revoked_token_opens_nothing_from_that_moment_on(store, timed, app_id, clock):
    token, plain = await timed.create_token(app_id, "n", ["all"])
    assert fault_of_token(timed.tokens[token_hash(plain)], "read", app_id, clock()) is None
    clock.now_s += 5
    (revoked,) = await timed.revoke_tokens([token.id])
    assert revoked.revoked_at == clock.now_s
    for records in (timed, await loaded(store)):
        assert fault_of_token(records.tokens[token_hash(plain)], "read", app_id, clock()).code == "token_revoked"


async def test_revoking_is_all_or_none_and_once(timed, app_id, clock):
    first, _ = await timed.create_token(app_id, "a", ["all"])
    second, _ = await timed.create_token(app_id, "b", ["all"])
    with pytest.raises(RecordError, match="no token with the id nix, nada; nothing was revoked"):
        await timed.revoke_tokens([first.id, "nix", "nada"])
    assert timed.tokens[first.hash].revoked_at is None
    await timed.revoke_tokens([first.id])
    clock.now_s += 10
    revoked = await timed.revoke_tokens([first.id, second.id])
    assert [each.revoked_at for each in revoked] == [1_000_000.0, 1_000_010.0]


async def test_use_is_seen_at_once_and_written_at_most_once_a_minute(store, timed, app_id, clock):
    token, _ = await timed.create_token(app_id, "n", ["all"])
    writes = Counter(store)
    for passed_s in (0, 1, 59, 60, 61, 119.9, 120):
        timed.token_used(token, clock() + passed_s)
        await timed.finish()
    assert writes.count == 3
    assert timed.tokens[token.hash].last_used_at == clock() + 120
    assert (await loaded(store)).tokens == timed.tokens


class Counter:
    """Counts the transactions of a store."""

    def __init__(self, store: Store) -> None:
        self.count = 0
        change = store.change

        def counted():
            self.count += 1
            return change()

        store.change = counted


async def test_uses_at_one_time_are_written_together(store, timed, app_id, clock):
    tokens = [(await timed.create_token(app_id, "n", ["all"]))[0] for _ in range(20)]
    writes = Counter(store)
    for token in tokens:
        timed.token_used(token, clock())
    await timed.finish()
    assert writes.count <= 2
    assert {each.last_used_at for each in (await loaded(store)).tokens.values()} == {clock()}


async def test_a_clock_set_back_does_not_leave_the_last_use_in_the_future(timed, app_id, clock):
    token, _ = await timed.create_token(app_id, "n", ["all"])
    timed.token_used(token, clock())
    timed.token_used(token, clock() - 3_600)
    assert timed.tokens[token.hash].last_used_at == clock() - 3_600


async def test_a_use_during_a_revocation_does_not_undo_it(store, timed, app_id, clock):
    token, _ = await timed.create_token(app_id, "n", ["all"])
    revoking = asyncio.create_task(timed.revoke_tokens([token.id]))
    while not revoking.done():
        timed.token_used(token, clock())
        clock.now_s += 61
        await asyncio.sleep(0)
    await timed.finish()
    held = timed.tokens[token.hash]
    assert held.revoked_at is not None
    assert held.last_used_at is not None
    assert (await loaded(store)).tokens == timed.tokens


async def test_a_token_that_is_not_ours_any_more_is_not_used(timed, app_id, clock):
    token, _ = await timed.create_token(app_id, "n", ["all"])
    del timed.tokens[token.hash]
    timed.token_used(token, clock())
    assert timed.tokens == {}


async def test_tokens_that_ended_long_ago_are_forgotten_when_the_next_is_made(store, timed, app_id, clock):
    expired, _ = await timed.create_token(app_id, "expired", ["all"], 60)
    revoked, _ = await timed.create_token(app_id, "revoked", ["all"], 200 * 86_400)
    lasting, _ = await timed.create_token(app_id, "lasting", ["all"])
    await timed.revoke_tokens([revoked.id])
    clock.now_s += 90 * 86_400
    await timed.create_token(app_id, "n", ["all"])
    assert {expired.hash, revoked.hash, lasting.hash} < set(timed.tokens)
    clock.now_s += 61
    await timed.create_token(app_id, "n", ["all"])
    assert {expired.hash, revoked.hash} & set(timed.tokens) == set()
    assert lasting.hash in timed.tokens
    assert (await loaded(store)).tokens == timed.tokens


# -- daily counters


async def test_a_daily_counter_is_kept_and_never_falls(store, timed, app_id):
    await timed.keep_daily("20261121", {app_id: 10})
    await timed.keep_daily("20261121", {app_id: 9})
    assert await timed.daily_used("20261121") == {app_id: 10}
    assert await (await loaded(store)).daily_used("20261121") == {app_id: 10}


async def test_a_counter_of_an_app_that_is_gone_is_no_harm(timed, app_id):
    await timed.keep_daily("20261121", {"5": 3, app_id: 10})
    assert await timed.daily_used("20261121") == {app_id: 10}


async def test_counters_are_kept_for_a_month(timed, app_id):
    for day in ("20261020", "20261021", "20261121"):
        await timed.keep_daily(day, {app_id: 1})
    days = [await timed.daily_used(day) for day in ("20261020", "20261021")]
    assert days == [{}, {app_id: 1}]
