"""Logging in and out, and changing one's own password.

Who was in the middle of a form when the session ended finds what was typed behind the login: it is carried through in
the page itself, and sent by the person, not by us.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

from redpoll.control.dashboard.access import (
    HOME,
    PASSWORD,
    AccessControl,
    Visit,
    check_origin,
    own_path,
    redirect,
    set_cookie,
)
from redpoll.control.dashboard.accounts import FIRST_USER, AccountError, Accounts
from redpoll.control.dashboard.forms import Form, read_form, read_pairs
from redpoll.control.dashboard.login_throttle import LoginThrottle
from redpoll.control.request import Request
from redpoll.control.response import Response, header_line
from redpoll.control.router import Route
from redpoll.protocol.errors import ApiError

__all__ = ["FIRST_LOGIN", "Login"]

# In the data folder: the one-time password of the first start.
FIRST_LOGIN: Final = "first-login"
_LONG_FIELD_CHARS: Final = 80
_LOOPBACK: Final = ("127.", "::1", "localhost")


class Login:
    """The pages. `data_dir` has the file with the first password, which goes at the first login of all."""

    def __init__(
        self, door: AccessControl, accounts: Accounts, data_dir: Path, attempts: LoginThrottle | None = None
    ) -> None:
        self._door = door
        self._accounts = accounts
        self._data_dir = data_dir
        self._attempts = attempts or LoginThrottle()
        door.expired = self.expired
        door.offered = self.offer_again

    def routes(self) -> list[Route]:
        door = self._door
        return [
            door.open_route("GET", "/login", "login", self.show),
            door.open_route("POST", "/login", "log_in", self.log_in),
            door.route("POST", "/logout", "log_out", self.log_out),
            door.route("GET", "/account", "account", self.account),
            door.route("POST", "/account", "change_password", self.change_password),
        ]

    async def show(self, call: Request) -> Response:
        """GET /dashboard/login; on from here for who is logged in already."""
        following = parse_qs(call.query).get("next", [HOME])[-1]
        if await self._door.who(call) is not None:
            return redirect(own_path(following))
        return self._page(call, following=own_path(following))

    async def expired(self, call: Request, kept: Form | None) -> Response:
        """The login in the place of what a form was to do, with what was typed into it."""
        return self._page(call, status=401, kept_path=call.path, kept=urlencode(kept.pairs) if kept is not None else "")

    def _page(
        self,
        call: Request,
        *,
        status: int = 200,
        following: str = HOME,
        kept_path: str = "",
        kept: str = "",
        name: str = "",
        fault: str = "",
        headers: bytes = b"",
    ) -> Response:
        host = call.headers.get("Host", "")
        context: dict[str, Any] = {
            "following": following,
            "kept_path": kept_path,
            "kept": kept,
            "name": name,
            "fault": fault,
            "plain_text": not (host.strip("[").startswith(_LOOPBACK) or _is_https(call)),
            "first_login": (self._data_dir / FIRST_LOGIN).exists(),
        }
        return Visit(self._door, call, None).page("login.html", status=status, headers=headers, **context)

    async def log_in(self, call: Request) -> Response:
        """POST /dashboard/login: name, password, next; kept_path and kept are a form that was typed before."""
        check_origin(call)
        form = read_form(call)
        name, address = form.text("name"), call.remote
        following = own_path(form.text("next", HOME))
        kept_path, kept = form.text("kept_path"), form.raw("kept")
        again: dict[str, Any] = {"following": following, "kept_path": kept_path, "kept": kept, "name": name}
        wait_s = math.ceil(self._attempts.wait_s(address, name))
        if wait_s > 0:
            fault = f"Too many failed logins. Try again in {wait_s} s."
            return self._page(call, status=429, fault=fault, headers=header_line("Retry-After", str(wait_s)), **again)
        self._attempts.begun(address, name)
        plain = await self._accounts.log_in(name, form.raw("password"))
        if plain is None:
            await self._door.note(name[:64], address, "login failed")
            return self._page(call, status=401, fault="Name or password is wrong.", **again)
        self._attempts.succeeded(address, name)
        await self._door.note(name, address, "logged in")
        if name == FIRST_USER:
            # Whoever read it is in, and is asked for another one now.
            (self._data_dir / FIRST_LOGIN).unlink(missing_ok=True)
        cookie = set_cookie(call, plain)
        session = await self._accounts.session(plain)
        assert session is not None
        if kept_path and not session.user.must_change:
            typed = Form(read_pairs(kept.encode("ascii", "replace")))
            return self.offer_again(Visit(self._door, call, session), own_path(kept_path), typed, 200, cookie)
        return redirect(PASSWORD if session.user.must_change else following, cookie)

    def offer_again(self, visit: Visit, path: str, kept: Form, status: int = 403, headers: bytes = b"") -> Response:
        """What was typed into a form of an earlier login, to be sent by the person."""
        fields = [(name, value, len(value) > _LONG_FIELD_CHARS or "\n" in value) for name, value in kept.pairs]
        return visit.page("kept.html", status=status, headers=headers, kept_path=path, fields=fields)

    async def log_out(self, visit: Visit) -> Response:
        await self._accounts.log_out(visit.session)
        await visit.note("logged out")
        return redirect("/dashboard/login", set_cookie(visit.call, ""))

    # -- one's own account

    async def account(self, visit: Visit) -> Response:
        """GET /dashboard/account."""
        return visit.page("account.html", form=Form())

    async def change_password(self, visit: Visit) -> Response:
        """POST /dashboard/account: old_password, new_password, new_password_again."""
        form = visit.form
        wait_s = math.ceil(self._attempts.wait_s(visit.call.remote, visit.session.user.name))
        if wait_s > 0:
            raise ApiError("rate_limited", f"Too many wrong passwords. Try again in {wait_s} s.")
        if form.raw("new_password") != form.raw("new_password_again"):
            form.fault("new_password_again", "That isn't the same as above.")
        else:
            self._attempts.begun(visit.call.remote, visit.session.user.name)
            try:
                await self._accounts.change_password(visit.session, form.raw("old_password"), form.raw("new_password"))
            except AccountError as error:
                form.fault(error.field, str(error))
        if not form.good:
            return visit.page("account.html", status=422, form=form)
        self._attempts.succeeded(visit.call.remote, visit.session.user.name)
        await visit.note("password changed", target=visit.session.user.name)
        return visit.redirect(HOME, "Your password is changed. Other logins of yours have ended.")


def _is_https(call: Request) -> bool:
    return set_cookie(call, "x").endswith(b"; Secure\r\n")
