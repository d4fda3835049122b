"""The operator's commands about users."""

import pytest

from redpoll.config.settings import Settings
from redpoll.control.accounts.accounts import Accounts
from redpoll.control.accounts.first_login import FIRST_LOGIN
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


async def test_first_login_shows_the_password_only_while_it_works(context, tmp_path):
    context = Context(context.store, context.records, Settings(data_dir=str(tmp_path)))
    accounts, file = Accounts(context.store), tmp_path / FIRST_LOGIN

    async def shown():
        return (await commands.COMMANDS["first login"](context, {}))["password"]

    assert await shown() is None
    first = await accounts.first_admin("")
    file.write_text(f"{first}\n")
    assert await shown() == first
    reset = await commands.COMMANDS["user reset"](context, {"name": "admin"})
    assert (await shown(), file.exists()) == (None, False)
    # The login is at another node.
    file.write_text(f"{reset['password']}\n")
    assert await shown() == reset["password"]
    session = await accounts.session(await accounts.log_in("admin", reset["password"]))
    await accounts.change_password(session, reset["password"], "correct horse battery", "")
    assert (await shown(), file.exists()) == (None, False)


async def test_refusals_are_sentences(context):
    with pytest.raises(CommandError, match="The role must be admin or viewer"):
        await commands.COMMANDS["user create"](context, {"name": "vera", "role": "king"})
    with pytest.raises(CommandError, match="There is no user vera"):
        await commands.COMMANDS["user reset"](context, {"name": "vera"})
