"""`redpoll grant mint|check|revoke`, without a server."""

import pytest

from helpers.granting import mint
from redpoll.config.settings import Settings
from redpoll.control.commands import commands
from redpoll.control.commands.context import Context
from redpoll.control.records.records import Records
from redpoll.ipc.command_socket import CommandError
from redpoll.protocol.access import REVOKED
from redpoll.store.store import Store, database_url

ARGUMENTS = {"app": "1", "user": "7", "channels": ["private-*"], "may": [], "info": {"a": 1}, "lasts_s": 60.0}


@pytest.fixture
async def context(tmp_path):
    store = await Store.open(database_url(tmp_path))
    made = Context(store, Records(store), Settings())
    await made.records.load()
    await made.records.upsert_app("1", "k" * 20, "s" * 40)
    yield made
    await store.close()


async def run(context, verb: str, **args: object):
    return await commands.run(context, verb, args)


async def check(context, auth: str, channel: str | None = None):
    return await run(context, "grant check", app="1", auth=auth, channel=channel)


async def test_what_is_minted_is_accepted_once_the_app_accepts_grants(context):
    minted = await run(context, "grant mint", **ARGUMENTS)
    assert (minted["accepted"], minted["claims"]["sub"]) == (False, "7")
    assert "setting `grants`" in (await check(context, minted["auth"]))["reason"]
    await context.records.set_app("1", {"grants": True})
    checked = await check(context, minted["auth"], "private-a")
    assert (checked["valid"], checked["reason"], checked["sub"]) == (True, None, "7")
    assert (checked["channels"], checked["may"]) == (["private-*"], ["subscribe"])
    assert "no pattern" in (await check(context, minted["auth"], "presence-a"))["reason"]
    assert (await check(context, mint("k" * 20, "s" * 40, "private-a", sub="7")))["valid"]


@pytest.mark.parametrize(
    ("changed", "reason"), [({"user": None}, "needs a sub"), ({"info": "x" * 2000}, "the app allows 1024"), ({}, None)]
)
async def test_channels_with_members_need_what_a_subscribe_needs(context, changed, reason):
    await context.records.set_app("1", {"grants": True})
    channels = {"channels": ["private-*", "presence-*"]}
    minted = await run(context, "grant mint", **ARGUMENTS | channels | changed)
    checked = await check(context, minted["auth"], "presence-a")
    assert checked["valid"] is (reason is None)
    assert (reason or "") in (checked["reason"] or "")
    # It opens other channels.
    assert (await check(context, minted["auth"], "private-a"))["valid"]


async def test_revoked_without_a_server_for_the_next_one(context):
    await context.records.set_app("1", {"grants": True})
    first, second = [await run(context, "grant mint", **ARGUMENTS | {"user": user}) for user in ("7", "8")]
    await run(context, "grant revoke", app="1", jti=None, user="7")
    await run(context, "grant revoke", app="1", jti=second["claims"]["jti"], user=None)
    for minted in (first, second):
        assert (await check(context, minted["auth"]))["reason"] == REVOKED
        assert (await check(context, minted["auth"], "private-a"))["reason"] == REVOKED


async def test_others_that_share_the_store_would_not_hear_of_it(context):
    context.store.shared = True
    with pytest.raises(CommandError, match="run the command on a machine where a server runs"):
        await run(context, "grant revoke", app="1", jti="a", user=None)


@pytest.mark.parametrize(
    ("verb", "args", "text"),
    [
        ("grant mint", ARGUMENTS | {"channels": ["a*b"]}, "with \\* at the end"),
        ("grant mint", ARGUMENTS | {"lasts_s": 90_000}, "at most 86400 s"),
        ("grant mint", ARGUMENTS | {"info": "x" * 5000}, "at most 4096"),
        ("grant mint", ARGUMENTS | {"app": "2"}, "no app with the id 2"),
        ("grant revoke", {"app": "1", "jti": "", "user": None}, "the jti must have"),
        ("grant revoke", {"app": "1", "jti": None, "user": "x" * 129}, "the user must have"),
    ],
)
async def test_refusals_are_sentences(context, verb, args, text):
    with pytest.raises(CommandError, match=text):
        await run(context, verb, **args)
