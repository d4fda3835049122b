"""The operator's commands about users."""

import pytest

from redpoll.config.settings import Settings
from redpoll.control.accounts.accounts import Accounts
from redpoll.control.commands import users as commands
from redpoll.control.commands.context import Context
from redpoll.control.records.records import Records
from redpoll.ipc.command_socket import CommandError
from redpoll.store.store import Store, database_url


@pytest.fixture
async def context(tmp_path):
    store = await Store.open(database_url(tmp_path))
    yield Context(store, Records(store), Settings())
    await store.close()


async def test_user_is_created_and_reset_with_a_one_time_password(context):
    made = await commands.COMMANDS["user create"](context, {"name": "vera", "role": "viewer"})
    assert {"name": made["name"], "role": made["role"]} == {"name": "vera", "role": "viewer"}
    reset = await commands.COMMANDS["user reset"](context, {"name": "vera"})
    assert reset["password"] != made["password"]
    accounts = Accounts(context.store)
    session = await accounts.session(await accounts.log_in("vera", reset["password"]))
    assert session.user.must_change


async def test_refusals_are_sentences(context):
    with pytest.raises(CommandError, match="The role must be admin or viewer"):
        await commands.COMMANDS["user create"](context, {"name": "vera", "role": "king"})
    with pytest.raises(CommandError, match="There is no user vera"):
        await commands.COMMANDS["user reset"](context, {"name": "vera"})
