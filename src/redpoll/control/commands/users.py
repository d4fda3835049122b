"""The commands `redpoll user create`, `redpoll user reset` and `redpoll first-login`, part of the table in
control/commands/commands.py.

They let an operator log in, also after the last admin's password was lost.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from redpoll.control.accounts.accounts import AccountError, Accounts
from redpoll.control.accounts.first_login import first_password
from redpoll.control.commands.context import Context
from redpoll.ipc.command_socket import CommandError
from redpoll.store.audit import COMMAND_LINE

__all__ = ["COMMANDS"]


async def _user_create(context: Context, args: dict[str, Any]) -> Any:
    name, role = args["name"], args["role"]
    try:
        password = await Accounts(context.store).create(name, role, by=COMMAND_LINE)
    except AccountError as error:
        raise CommandError(str(error)) from error
    return {"name": name, "role": role, "password": password}


async def _user_reset(context: Context, args: dict[str, Any]) -> Any:
    name = args["name"]
    try:
        password = await Accounts(context.store).reset(name, by=COMMAND_LINE)
    except AccountError as error:
        raise CommandError(str(error)) from error
    return {"name": name, "password": password}


async def _first_login(context: Context, _args: dict[str, Any]) -> Any:
    return {"password": await first_password(Accounts(context.store), Path(context.settings.data_dir))}


COMMANDS: dict[str, Callable[[Context, dict[str, Any]], Awaitable[Any]]] = {
    "user create": _user_create,  # {name, role} -> {name, role, password}; the password is good for one login
    "user reset": _user_reset,  # {name} -> {name, password}; the user's sessions end
    "first login": _first_login,  # {} -> {password or null}, that of the first user until it is used or replaced
}
