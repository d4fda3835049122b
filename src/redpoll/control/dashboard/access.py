"""The door of the dashboard: who is let in to which page, and what keeps forms of other sites out.

A page's handler gets a Visit: the call, who it is, and how to answer. Nobody logged in: to the login, and back. What
somebody typed while the session ended is kept there and offered again.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import structlog

from redpoll.control.dashboard.accounts import Accounts, Session
from redpoll.control.dashboard.forms import CSRF_FIELD, Form, read_form, read_pairs
from redpoll.control.dashboard.pages import Pages
from redpoll.control.records import Records
from redpoll.control.request import Request
from redpoll.control.response import Response, header_line
from redpoll.control.router import Access, Handler, Place, Route
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError
from redpoll.store import audit

__all__ = ["COOKIE", "HOME", "LOGIN", "PASSWORD", "AccessControl", "Page", "Visit"]

log = structlog.get_logger(__name__)

HOME: Final = "/dashboard"
LOGIN: Final = "/dashboard/login"
PASSWORD: Final = "/dashboard/account"
COOKIE: Final = "redpoll"
_SECURE_COOKIE: Final = "__Host-redpoll"
_COOKIE_FORM: Final = "; Path=/; HttpOnly; SameSite=Lax"
_NEVER_KEPT: Final = ("old_password", "new_password", "new_password_again", "password")
_MOST_NOTICES: Final = 1_000
_HTMX: Final = "HX-Request"


class Visit:
    """One call of somebody who is logged in (or `session` None, on the few pages that are for everybody)."""

    def __init__(self, door: AccessControl, call: Request, session: Session | None) -> None:
        self.call = call
        self.door = door
        self.query = dict(parse_qsl(call.query, keep_blank_values=True, max_num_fields=100))
        self._session = session

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    @property
    def form(self) -> Form:
        """What was sent; read anew at each look, so take it once."""
        return read_form(self.call)

    @property
    def app(self) -> App:
        """The app that the path names first. Raises ApiError: there is none."""
        app = self.door.records.apps.get(self.call.parameters[0])
        if app is None:
            raise ApiError("not_found", "There is no app with this id. It may have been deleted.")
        return app

    @property
    def may_change(self) -> bool:
        return self.session.is_admin

    def page(
        self, template: str, *, status: int = 200, sockets: Sequence[str] = (), headers: bytes = b"", **context: Any
    ) -> Response:
        """An answer made of a template, which also gets who it is for and what was last done."""
        session = self._session
        told = self.door.take_notice(session.hash) if session is not None and _HTMX not in self.call.headers else None
        context = {"me": session, "notice": told, "path": self.call.path, "app": None, **context}
        return self.door.pages.answer(template, context, status=status, sockets=sockets, headers=headers)

    def redirect(self, path: str, notice: str = "") -> Response:
        """On to another page, which says `notice` once."""
        if notice:
            self.door.give_notice(self.session.hash, notice)
        return redirect(path)

    async def note(self, action: str, *, app: App | None = None, target: str = "", detail: str = "") -> None:
        """Into the audit log, in the name of who is logged in."""
        await self.door.note(
            self.session.user.name, self.call.remote, action, app.id if app is not None else "", target, detail
        )


Page = Callable[[Visit], Awaitable[Response]]


class AccessControl:
    """Makes routes of pages. `expired` renders the login for somebody whose session has ended, `offered` a form of an
    earlier one."""

    def __init__(self, accounts: Accounts, records: Records, pages: Pages) -> None:
        self.accounts = accounts
        self.records = records
        self.pages = pages
        self.expired: Callable[[Request, Form | None], Awaitable[Response]]
        self.offered: Callable[[Visit, str, Form], Response]
        self._notices: dict[str, str] = {}

    # -- routes

    def route(self, method: str, pattern: str, name: str, page: Page, role: str = "viewer") -> Route:
        """A page of the control port for who is logged in; what changes something is for role `admin`."""
        return self._made(method, pattern, name, self._guarded(page, role), Access.SESSION)

    def open_route(self, method: str, pattern: str, name: str, handler: Handler) -> Route:
        """A page for everybody."""
        return self._made(method, pattern, name, handler, Access.OPEN)

    def _made(self, method: str, pattern: str, name: str, handler: Handler, access: Access) -> Route:
        return Route(method, f"{HOME}{pattern}", f"dashboard_{name}", handler, access, Place.CONTROL)

    def _guarded(self, page: Page, role: str) -> Handler:
        async def handle(call: Request) -> Response:
            if call.method == "POST":
                check_origin(call)
            session = await self.who(call)
            if session is None:
                return await self._turn_away(call)
            if call.method == "POST" and not _has_csrf(call, session):
                return self._of_earlier_login(call, session)
            if session.user.must_change and call.path not in (PASSWORD, f"{HOME}/logout"):
                return redirect(PASSWORD)
            if role == "admin" and not session.is_admin:
                raise ApiError("forbidden", "You may look at this server, not change it. Ask one of its admins.")
            return await page(Visit(self, call, session))

        return handle

    async def who(self, call: Request) -> Session | None:
        """Who the call's cookie stands for."""
        plain = _cookie(call.headers.get("Cookie", ""), cookie_name(call))
        return await self.accounts.session(plain) if plain else None

    async def _turn_away(self, call: Request) -> Response:
        if _HTMX in call.headers:
            # The page itself goes there; a login inside a table would help nobody.
            shown = _path_of(call.headers.get("HX-Current-URL", ""))
            return Response(204, b"", header_line("HX-Redirect", _login_before(shown)))
        if call.method == "POST":
            return await self.expired(call, _kept(call))
        return redirect(_login_before(call.message.path))

    def _of_earlier_login(self, call: Request, session: Session) -> Response:
        """Nothing is done by a form without the session's token. A page that was opened before a new login has one of
        those, and what was typed there is offered again."""
        typed = "X-CSRF-Token" not in call.headers and bool(_pairs(call))
        kept = _kept(call) if typed else Form()
        if not kept.pairs:
            raise ApiError("forbidden", "This form is of an earlier login. Load the page again, then send it.")
        return self.offered(Visit(self, call, session), call.path, kept)

    # -- what is told and noted

    def give_notice(self, session_hash: str, text: str) -> None:
        if len(self._notices) >= _MOST_NOTICES:
            self._notices.clear()
        self._notices[session_hash] = text

    def take_notice(self, session_hash: str) -> str | None:
        return self._notices.pop(session_hash, None)

    async def note(
        self, who: str, address: str, action: str, app_id: str = "", target: str = "", detail: str = ""
    ) -> None:
        entry = audit.Entry(
            at=self.accounts.now_s(),
            who=who,
            address=address,
            action=action,
            app_id=app_id,
            target=target[:1_000],
            detail=detail[:1_000],
        )
        async with self.accounts.store.change() as connection:
            await audit.add(connection, entry)
        log.info("dashboard", who=who, action=action, app=app_id, target=target)


def _login_before(path: str) -> str:
    """The login, and on to a page from there."""
    return LOGIN if path in ("", HOME, "/") else f"{LOGIN}?{urlencode({'next': path})}"


def _path_of(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return parts.path + (f"?{parts.query}" if parts.query else "")


def redirect(path: str, headers: bytes = b"") -> Response:
    """303 to a path of ours."""
    return Response(303, b"", header_line("Location", path) + b"Cache-Control: no-store\r\n" + headers)


def own_path(path: str) -> str:
    """`path` where it is a page of the dashboard, else its first one: nobody is sent elsewhere from here."""
    parts = urlsplit(path)
    inside = parts.path == HOME or parts.path.startswith(f"{HOME}/")
    plain = path.isascii() and path.isprintable() and "\\" not in path and " " not in path
    return path if inside and plain and not parts.scheme and not parts.netloc else HOME


# -- cookies


def is_secure(call: Request) -> bool:
    """Whether the browser came by https, as a trusted proxy says; the control port itself has no TLS."""
    peer = call.protocol.peername
    host = peer[0] if isinstance(peer, tuple) else ""
    return call.protocol.trusted.is_secure(host, call.headers.get("X-Forwarded-Proto"), False)


def cookie_name(call: Request) -> str:
    return _SECURE_COOKIE if is_secure(call) else COOKIE


def set_cookie(call: Request, plain: str) -> bytes:
    """The header line that gives the browser its session; "" takes it away."""
    line = f"{cookie_name(call)}={plain}{_COOKIE_FORM}"
    if is_secure(call):
        line += "; Secure"
    if not plain:
        line += "; Max-Age=0"
    return header_line("Set-Cookie", line)


def _cookie(header: str, name: str) -> str:
    for part in header.split(";"):
        each, _, value = part.strip().partition("=")
        if each == name:
            return value
    return ""


# -- forms of other sites


def check_origin(call: Request) -> None:
    """A form comes from a page of ours. Browsers say where from, in one header or the other; who says nothing is no
    browser, and is stopped by the token. Raises ApiError."""
    site = call.headers.get("Sec-Fetch-Site")
    origin = call.headers.get("Origin")
    host = call.headers.get("Host", "")
    foreign = site is not None and site not in ("same-origin", "none")
    if origin is not None and urlsplit(origin).netloc != host:
        foreign = True
    if foreign:
        raise ApiError("forbidden", "This form came from another site, so nothing was done.")


def _kept(call: Request) -> Form:
    """What was typed, as far as it may stand in a page again."""
    return Form(pair for pair in read_form(call).pairs if pair[0] not in _NEVER_KEPT)


def _has_csrf(call: Request, session: Session) -> bool:
    given = call.headers.get("X-CSRF-Token")
    if given is None:
        given = next((value for name, value in reversed(_pairs(call)) if name == CSRF_FIELD), "")
    return hmac.compare_digest(given.encode(), session.csrf.encode())


def _pairs(call: Request) -> list[tuple[str, str]]:
    kind = call.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return read_pairs(call.body) if kind == "application/x-www-form-urlencoded" else []
