"""Tokens in the records: creation, last use, revocation, and removal long after their end."""

import asyncio
import random
import re

import pytest

from redpoll.config.settings import Settings
from redpoll.control.commands.app_write import delete_app
from redpoll.control.records.records import RecordError, Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.protocol.auth import token_hash
from redpoll.protocol.tokens import MANAGE, Token, fault_of_token
from redpoll.store.audit import Actor
from redpoll.store.store import Store


async def loaded(store: Store) -> Records:
    records = Records(store)
    await records.load()
    return records


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
    """Records that use `clock`, with an app "x"."""
    made = Records(store, clock=clock)
    await made.load()
    await made.create_app("x")
    yield made
    await made.finish()


@pytest.fixture
def app_id(timed):
    return next(iter(timed.apps))


async def test_token_is_shown_once_and_found_by_its_hash(store, timed, app_id):
    token, plain = await timed.create_token(app_id, "CI", ["read", "publish", "read"], 3_600)
    assert re.fullmatch("rp_[A-Za-z0-9]{40}", plain)
    assert timed.tokens[token_hash(plain)] is token
    assert (token.name, token.prefix, token.scopes) == ("CI", plain[:8], ("publish", "read"))
    assert (token.created_at, token.expires_at, token.last_used_at) == (1_000_000.0, 1_003_600.0, None)
    assert (await loaded(store)).tokens == timed.tokens


async def test_plain_token_is_not_in_the_store(store, timed, app_id, tmp_path):
    _, plain = await timed.create_token(app_id, "CI", ["all"])
    await store.close()
    for path in tmp_path.iterdir():
        assert plain.encode() not in path.read_bytes()


async def test_token_changes_are_not_reported_to_workers(timed, app_id):
    changes, before = [], timed.version

    async def hear(*change):
        changes.append(change)

    timed.on_change = hear
    token, _ = await timed.create_token(app_id, "CI", ["all"])
    await timed.revoke_tokens([token.id])
    assert (changes, timed.version) == ([], before)


@pytest.mark.parametrize(
    ("name", "scopes", "lasts_s", "fault"),
    [
        ("", ["all"], None, "a token's name must have"),
        ("a\nb", ["all"], None, "a token's name must have"),
        ("n", [], None, "one or more of the scopes publish, read, auth, webhooks, all, not nothing"),
        ("n", ["read", "write"], None, "not 'write'"),
        ("n", ["all"], 0, "at most a hundred years"),
        ("n", ["all"], 10**12, "at most a hundred years"),
    ],
)
async def test_invalid_token_is_refused(timed, app_id, name, scopes, lasts_s, fault):
    with pytest.raises(RecordError, match=fault):
        await timed.create_token(app_id, name, scopes, lasts_s)
    assert timed.tokens == {}


async def test_token_of_an_unknown_app_is_refused(timed):
    with pytest.raises(RecordError, match="there is no app with the id 5"):
        await timed.create_token("5", "n", ["all"])
    with pytest.raises(RecordError, match="there is no app with the id 5"):
        timed.tokens_of("5")


async def test_app_lists_its_own_tokens_oldest_first(timed, app_id, clock):
    other = await timed.create_app("y")
    mine = []
    # A node whose clock is behind may make a token after the others.
    for name in ("b", "a"):
        clock.now_s -= 1
        mine.insert(0, (await timed.create_token(app_id, name, ["all"]))[0])
    await timed.create_token(other.id, "c", ["all"])
    assert timed.tokens_of(app_id) == mine


async def test_revoked_token_is_refused_at_once(store, timed, app_id, clock):
    token, plain = await timed.create_token(app_id, "n", ["all"])
    assert fault_of_token(timed.tokens[token_hash(plain)], "read", app_id, clock()) is None
    clock.now_s += 5
    (revoked,) = await timed.revoke_tokens([token.id])
    assert revoked.revoked_at == clock.now_s
    for records in (timed, await loaded(store)):
        assert fault_of_token(records.tokens[token_hash(plain)], "read", app_id, clock()).code == "token_revoked"


async def test_revoking_affects_all_or_none_and_keeps_earlier_times(timed, app_id, clock):
    first, _ = await timed.create_token(app_id, "a", ["all"])
    second, _ = await timed.create_token(app_id, "b", ["all"])
    with pytest.raises(RecordError, match="no token with the id nix, nada; nothing was revoked"):
        await timed.revoke_tokens([first.id, "nix", "nada"])
    assert timed.tokens[first.hash].revoked_at is None
    await timed.revoke_tokens([first.id])
    clock.now_s += 10
    revoked = await timed.revoke_tokens([first.id, second.id])
    assert [found.revoked_at for found in revoked] == [1_000_000.0, 1_000_010.0]


async def test_last_use_is_updated_at_once_and_written_at_most_once_a_minute(store, timed, app_id, clock):
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


async def test_uses_at_the_same_time_are_written_together(store, timed, app_id, clock):
    tokens = [(await timed.create_token(app_id, "n", ["all"]))[0] for _ in range(20)]
    writes = Counter(store)
    for token in tokens:
        timed.token_used(token, clock())
    await timed.finish()
    assert writes.count <= 2
    assert {found.last_used_at for found in (await loaded(store)).tokens.values()} == {clock()}


async def test_clock_set_back_moves_the_last_use_back(timed, app_id, clock):
    token, _ = await timed.create_token(app_id, "n", ["all"])
    timed.token_used(token, clock())
    timed.token_used(token, clock() - 3_600)
    assert timed.tokens[token.hash].last_used_at == clock() - 3_600


async def test_use_during_a_revocation_does_not_undo_it(store, timed, app_id, clock):
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


async def test_use_of_a_removed_token_is_ignored(timed, app_id, clock):
    token, _ = await timed.create_token(app_id, "n", ["all"])
    await timed.revoke_tokens([token.id])
    clock.now_s += 91 * 86_400
    timed.take_tokens((), (), clock())
    timed.token_used(token, clock())
    assert timed.tokens == {}


async def test_tokens_that_ended_long_ago_are_removed_when_one_is_created(store, timed, app_id, clock):
    expired, _ = await timed.create_token(app_id, "expired", ["all"], 60)
    revoked, _ = await timed.create_token(app_id, "revoked", ["all"], 200 * 86_400)
    lasting, _ = await timed.create_token(app_id, "lasting", ["all"])
    await timed.revoke_tokens([revoked.id])
    clock.now_s += 90 * 86_400
    await timed.create_token(app_id, "n", ["all"])
    assert {expired.hash, revoked.hash, lasting.hash} < set(timed.tokens)
    assert {"expired", "revoked"} < {token.name for token in timed.tokens_of(app_id)}
    clock.now_s += 61
    # They aren't listed from now on, also before they are removed.
    assert {"expired", "revoked"} & {token.name for token in timed.tokens_of(app_id)} == set()
    await timed.create_token(app_id, "n", ["all"])
    assert {expired.hash, revoked.hash} & set(timed.tokens) == set()
    assert lasting.hash in timed.tokens
    assert (await loaded(store)).tokens == timed.tokens


@pytest.mark.parametrize("of", ["app", "management"])
async def test_of_an_apps_expired_tokens_the_newest_are_kept(store, timed, app_id, clock, monkeypatch, of):
    """A page that gets a token of 15 minutes for each visitor made lists and tags of 90,000."""
    monkeypatch.setattr("redpoll.control.records.loaded_records.MAX_EXPIRED", 3)
    which, scopes = (app_id, ["all"]) if of == "app" else (None, [MANAGE])
    lasting, _ = await timed.create_token(which, "lasting", scopes)
    revoked = [(await timed.create_token(which, "revoked", scopes, 86_400))[0] for _ in range(5)]
    # A control plane that couldn't read the store for a day must still find out that they are revoked.
    await timed.revoke_tokens([token.id for token in revoked])
    expired = []
    for _ in range(5):
        expired.append((await timed.create_token(which, "expired", scopes, 60))[0])
        clock.now_s += 1
    other, _ = await timed.create_token(None if of == "app" else app_id, "other", [MANAGE] if of == "app" else ["all"])
    clock.now_s += 60
    listed = {lasting.id, *(token.id for token in (*revoked, *expired[2:]))}
    started = Records(store, clock=clock)
    await started.load()
    for records in (timed, started):
        assert {token.id for token in records.tokens_of(which)} == listed
    new, _ = await timed.create_token(which, "new", scopes)
    assert {token.id for token in timed.tokens.values()} == {*listed, new.id, other.id}
    assert (await loaded(store)).tokens == timed.tokens


async def test_tokens_of_each_app_are_those_among_all_after_any_changes(store, timed, clock):
    webhooks = Webhooks(store, timed, Settings())
    await webhooks.load()
    made = [timed]

    async def change(at: int) -> None:
        apps, tokens = list(timed.apps), list(timed.tokens.values())
        if at % 5 == 0:
            await timed.create_app(f"app {at}")
        elif at % 11 == 0:
            await delete_app(timed, webhooks, draw.choice(apps), Actor("test"))
        elif at % 3 == 0 and tokens:
            await timed.revoke_tokens([draw.choice(tokens).id])
        elif at % 7 == 0 and tokens:
            timed.forget_revoked([draw.choice(tokens).hash])
        elif at % 13 == 0:
            await timed.create_token(None, "n", [MANAGE])
        else:
            token, _ = await timed.create_token(draw.choice(apps), "n", ["all"], draw.choice([None, 10 * 86_400]))
            timed.token_used(token, clock())

    draw = random.Random(4)
    for at in range(80):
        await change(at)
        clock.now_s += 3 * 86_400
        made[1:] = [await loaded(store)]
        for records in made:
            grouped: dict[str | None, dict[str, Token]] = {}
            for token in records.tokens.values():
                grouped.setdefault(token.app_id, {})[token.hash] = token
            assert records.tokens_by_app == grouped
        for app_id in timed.apps:
            assert {token.hash for token in timed.tokens_of(app_id)} <= grouped.get(app_id, {}).keys()
    await timed.create_token(None, "n", [MANAGE])
    ends = [token.ends_at for token in timed.tokens.values()]
    assert len(ends) > 10
    assert min(ends) >= clock() - 90 * 86_400
