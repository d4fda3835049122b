"""The pages for logging in and out and for changing one's own password.

When a form is sent after its session ended, the login page carries the typed values in hidden fields. After the login
the user sees them again and sends the form. Single sign-on leaves the page, so it opens in another tab, and the typed
values have a form of their own: `AccessControl` takes it for one of an earlier session.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlencode

from sqlalchemy.exc import SQLAlchemyError

from redpoll.control.accounts.accounts import FIRST_USER, AccountError, Accounts
from redpoll.control.accounts.first_login import FIRST_LOGIN, first_password
from redpoll.control.accounts.login_throttle import LoginThrottle
from redpoll.control.dashboard.access import (
    HOME,
    LOGIN,
    PASSWORD,
    AccessControl,
    Visit,
    check_origin,
    cookie_of,
    own_path,
    redirect,
    set_cookie,
)
from redpoll.control.dashboard.forms import Form, read_form, read_pairs
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response, header_line
from redpoll.control.http.router import Route
from redpoll.protocol.errors import ApiError

if TYPE_CHECKING:
    from redpoll.control.accounts.sign_on import SignOn
    from redpoll.control.dashboard.sign_on import SignOnPages

__all__ = ["Login"]

_LONG_FIELD_CHARS: Final = 80
_LOOPBACK: Final = ("127.", "::1", "localhost")


class Login:
    """The pages. The file with the first password, in `data_dir`, is deleted when `admin` logs in. `throttle` slows
    down logins after failed ones."""

    def __init__(
        self,
        access: AccessControl,
        accounts: Accounts,
        data_dir: Path,
        throttle: LoginThrottle | None = None,
        *,
        sign_on: SignOn | None = None,
    ) -> None:
        self._access = access
        self._accounts = accounts
        self._data_dir = data_dir
        self.throttle = throttle or LoginThrottle()
        self._sign_on: SignOnPages | None = None
        if sign_on is not None:
            # Here, because most servers don't have it (dashboard.py).
            from redpoll.control.dashboard.sign_on import SignOnPages

            self._sign_on = SignOnPages(access, accounts, sign_on)

    def routes(self) -> list[Route]:
        access = self._access
        return [
            *(self._sign_on.routes() if self._sign_on is not None else ()),
            access.open_route("GET", "/login", "login", self.show),
            access.open_route("POST", "/login", "log_in", self.log_in),
            access.route("POST", "/logout", "log_out", self.log_out),
            access.route("GET", "/account", "account", self.account),
            access.route("POST", "/account", "change_password", self.change_password),
        ]

    async def show(self, request: Request) -> Response:
        """GET /dashboard/login; redirects users who are logged in already."""
        following = parse_qs(request.query).get("next", [HOME])[-1]
        if await self._access.session_of(request) is not None:
            return redirect(own_path(following))
        return await self._page(request, following=own_path(following))

    async def expired(self, request: Request, typed: Form | None) -> Response:
        """The login page in response to a form without a session. It carries the typed values; None: they are longer
        than what is taken from strangers."""
        if typed is None:
            fault = "Your session has ended, so nothing was saved. What you typed was too long to be kept."
            return await self._page(request, status=401, fault=fault)
        return await self._page(request, status=401, resend_path=request.path, resend=urlencode(typed.pairs))

    async def _page(
        self,
        request: Request,
        *,
        status: int = 200,
        following: str = HOME,
        resend_path: str = "",
        resend: str = "",
        name: str = "",
        fault: str = "",
        headers: bytes = b"",
    ) -> Response:
        host = request.headers.get("Host", "")
        context: dict[str, Any] = {
            "following": following,
            "resend_path": resend_path,
            "resend": resend,
            "name": name,
            "fault": fault,
            "plain_text": not (host.strip("[").startswith(_LOOPBACK) or _is_https(request)),
            "typed": _pairs_of(resend) if resend_path and self._sign_on is not None else (),
            "typed_path": own_path(resend_path),
            "sign_on": None if self._sign_on is None else f"{HOME}/sso?{urlencode({'next': following})}",
            "first_login": await self._is_first(),
        }
        return Visit(self._access, request, None).page("login.html", status=status, headers=headers, **context)

    async def _is_first(self) -> bool:
        try:
            return await first_password(self._accounts, self._data_dir) is not None
        except SQLAlchemyError:
            # Nobody can log in at present.
            return False

    async def log_in(self, request: Request) -> Response:
        """POST /dashboard/login: name, password, next; resend_path and resend are a form to send again."""
        check_origin(request)
        form = read_form(request)
        name, address = form.text("name"), request.remote
        following = own_path(form.text("next", HOME))
        resend_path, resend = form.text("resend_path"), form.raw("resend")
        again: dict[str, Any] = {"following": following, "resend_path": resend_path, "resend": resend, "name": name}
        async with self.throttle.attempt(address, name) as wait_s:
            if wait_s > 0:
                wait = str(math.ceil(wait_s))
                fault = f"Too many logins fail at present. Try again in {wait} s."
                return await self._page(
                    request, status=429, fault=fault, headers=header_line("Retry-After", wait), **again
                )
            plain = await self._accounts.log_in(name, form.raw("password"), address, cookie_of(request))
        if plain is None:
            return await self._page(request, status=401, fault="Wrong name or password.", **again)
        self.throttle.succeeded(address, name)
        if name == FIRST_USER:
            # The one-time password in the file has been used.
            (self._data_dir / FIRST_LOGIN).unlink(missing_ok=True)
        cookie = set_cookie(request, plain)
        session = await self._accounts.session(plain)
        assert session is not None
        if resend_path and not session.user.must_change:
            typed = Form(_pairs_of(resend))
            return self.offer_again(Visit(self._access, request, session), own_path(resend_path), typed, 200, cookie)
        return redirect(PASSWORD if session.user.must_change else following, cookie)

    def offer_again(self, visit: Visit, path: str, typed: Form, status: int = 403, headers: bytes = b"") -> Response:
        """A page with the typed values of a form from an earlier session, for the user to send again."""
        fields = [(name, value, len(value) > _LONG_FIELD_CHARS or "\n" in value) for name, value in typed.pairs]
        return visit.page("resend.html", status=status, headers=headers, resend_path=path, fields=fields)

    async def log_out(self, visit: Visit) -> Response:
        id_token = await self._accounts.id_token(visit.session)
        await self._accounts.log_out(visit.session, visit.request.remote)
        if self._sign_on is not None and id_token is not None:
            return await self._sign_on.left(visit, id_token)
        return redirect(LOGIN, set_cookie(visit.request, ""))

    # -- one's own account

    async def account(self, visit: Visit) -> Response:
        """GET /dashboard/account."""
        return visit.page("account.html", form=Form())

    async def change_password(self, visit: Visit) -> Response:
        """POST /dashboard/account: old_password, new_password, new_password_again."""
        form = visit.form
        if form.raw("new_password") != form.raw("new_password_again"):
            form.fault("new_password_again", "The two passwords are different.")
        else:
            plain = await self._changed_password(visit, form)
        if not form.good:
            return visit.page("account.html", status=422, form=form)
        self.throttle.succeeded(visit.request.remote, visit.session.user.name)
        session = await self._accounts.session(plain)
        assert session is not None
        self._access.give_notice(session.hash, "Password changed. Your other sessions have ended.")
        return redirect(HOME, set_cookie(visit.request, plain))

    async def _changed_password(self, visit: Visit, form: Form) -> str:
        """The id of the session after the change; "" and a fault in `form` if nothing was changed."""
        session, address = visit.session, visit.request.remote
        async with self.throttle.attempt(address, session.user.name) as wait_s:
            if wait_s > 0:
                raise ApiError("rate_limited", f"Too many wrong passwords. Try again in {math.ceil(wait_s)} s.")
            try:
                return await self._accounts.change_password(
                    session, form.raw("old_password"), form.raw("new_password"), address
                )
            except AccountError as error:
                form.fault(error.field, str(error))
                return ""


def _pairs_of(resend: str) -> list[tuple[str, str]]:
    return read_pairs(resend.encode("ascii", "replace"))


def _is_https(request: Request) -> bool:
    return set_cookie(request, "x").endswith(b"; Secure\r\n")
