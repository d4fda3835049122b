"""Access control of the dashboard: sessions, roles, and protection against forms from other sites (CSRF).

AccessControl wraps a page's handler into a Route. The handler gets a Visit: the request, the session, and methods to
respond. Requests without a session are redirected to the login page and back afterwards. A form that was sent after its
session ended is not lost: the user can send it again after logging in.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import structlog

from redpoll.control.accounts.accounts import Accounts, Session
from redpoll.control.dashboard.forms import CSRF_FIELD, MAX_STRANGE_BYTES, Form, read_form, read_pairs
from redpoll.control.dashboard.pages import Pages
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response, header_line
from redpoll.control.http.router import Access, Handler, Place, Route
from redpoll.control.records.records import RecordError, Records
from redpoll.http.messages import MAX_BODY_BYTES
from redpoll.protocol.apps import App
from redpoll.protocol.auth import check_size
from redpoll.protocol.errors import ApiError
from redpoll.store.audit import Actor

__all__ = ["COOKIE", "HOME", "LOGIN", "PASSWORD", "AccessControl", "Page", "Visit", "cookie_of"]

log = structlog.get_logger(__name__)

HOME: Final = "/dashboard"
LOGIN: Final = "/dashboard/login"
PASSWORD: Final = "/dashboard/account"
COOKIE: Final = "redpoll"
_SECURE_PREFIX: Final = "__Host-"
_COOKIE_FORM: Final = "; Path=/; HttpOnly; SameSite=Lax"
_NEVER_SHOWN: Final = ("old_password", "new_password", "new_password_again", "password")
_MAX_NOTICES: Final = 1_000
# The login page sends a form of MAX_STRANGE_BYTES again, encoded twice.
_MAX_OPEN_BYTES: Final = 2 * MAX_STRANGE_BYTES
_HTMX: Final = "HX-Request"
_NO_APP: Final = "There is no app with this id. It may have been deleted."
# The pages of users who may see some apps only: those of these apps, and what belongs to the user.
_OF_APP: Final = "/apps/{app_id}"
_OF_USER: Final = ("/apps", "/account", "/logout", "/jobs/{job_id}", "/jobs/{job_id}/file")


class Visit:
    """One request of a logged-in user. `session` is None on the few pages that need no login."""

    def __init__(self, access: AccessControl, request: Request, session: Session | None) -> None:
        self.request = request
        self.access = access
        if "%00" in request.path or "%00" in request.query:
            # PostgreSQL's text can't have it, and nothing else needs it.
            raise ApiError("bad_request", "the path or the query has a NUL character")
        check_size(request.query)
        self.query = dict(parse_qsl(request.query, keep_blank_values=True))
        self._session = session

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    @property
    def form(self) -> Form:
        """The form in the body. Parsed at every access, so read it once."""
        return read_form(self.request)

    @property
    def apps(self) -> list[App]:
        """The apps that the user may see, sorted by name."""
        seen = self.session.apps
        apps = (app for app in self.access.records.apps.values() if seen is None or app.id in seen)
        return sorted(apps, key=lambda app: (app.name.casefold(), app.id))

    @property
    def app(self) -> App:
        """The app whose id is the first parameter of the path. Raises ApiError."""
        app = self.access.records.apps.get(self.request.parameters[0])
        if app is None:
            raise ApiError("not_found", _NO_APP)
        return app

    @property
    def may_change(self) -> bool:
        return self.session.is_admin

    def page(
        self, template: str, *, status: int = 200, sockets: Sequence[str] = (), headers: bytes = b"", **context: Any
    ) -> Response:
        """Renders a template. It also gets the session as `me` and the pending notice."""
        session = self._session
        shows_notice = session is not None and _HTMX not in self.request.headers
        notice = self.access.take_notice(session.hash) if session is not None and shows_notice else None
        context = {"me": session, "notice": notice, "path": self.request.path, "app": None, **context}
        return self.access.pages.answer(template, context, status=status, sockets=sockets, headers=headers)

    def redirect(self, path: str, notice: str = "") -> Response:
        """Redirects to another page, which shows `notice` once."""
        if notice:
            self.access.give_notice(self.session.hash, notice)
        return redirect(path)

    @property
    def actor(self) -> Actor:
        """The logged-in user, for the audit log."""
        return Actor(self.session.user.name, self.request.remote)

    async def note(self, action: str, app: App, target: str, detail: str = "") -> None:
        """Adds an entry to the audit log about something that changes no record, and is done already."""
        await self.access.accounts.store.note_done(self.actor, action, app.id, target, detail)


Page = Callable[[Visit], Awaitable[Response]]


class AccessControl:
    """Creates routes for pages. `expired` renders the login page after a session has ended, `offered` a form that was
    sent with an earlier session."""

    def __init__(
        self,
        accounts: Accounts,
        records: Records,
        pages: Pages,
        expired: Callable[[Request, Form | None], Awaitable[Response]],
        offered: Callable[[Visit, str, Form], Response],
    ) -> None:
        self.accounts = accounts
        self.records = records
        self.pages = pages
        self._expired = expired
        self._offered = offered
        self._notices: dict[str, str] = {}

    # -- routes

    def route(self, method: str, pattern: str, name: str, page: Page, role: str = "viewer") -> Route:
        """A route for logged-in users. Pages that change something need the role `admin`."""
        return self._made(method, pattern, name, self._guarded(page, name, role, pattern), Access.SESSION)

    def open_route(self, method: str, pattern: str, name: str, handler: Handler) -> Route:
        """A route that needs no login."""
        return self._made(method, pattern, name, handler, Access.OPEN, _MAX_OPEN_BYTES)

    def _made(
        self,
        method: str,
        pattern: str,
        name: str,
        handler: Handler,
        access: Access,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> Route:
        return Route(
            method,
            f"{HOME}{pattern}",
            f"dashboard_{name}",
            handler,
            access,
            Place.CONTROL,
            max_body_bytes=max_body_bytes,
        )

    def _guarded(self, page: Page, name: str, role: str, pattern: str) -> Handler:
        async def handle(request: Request) -> Response:
            if request.method == "POST":
                check_origin(request)
            session = await self.session_of(request)
            if session is None:
                return await self._to_login(request)
            if request.method == "POST" and not _has_csrf(request, session):
                return self._offer_form(request, session)
            if session.user.must_change and request.path not in (PASSWORD, f"{HOME}/logout"):
                return redirect(PASSWORD)
            if session.apps is not None:
                if not pattern:
                    return redirect(f"{HOME}/apps")
                _check_apps(session.apps, pattern, request)
            if role == "admin" and not session.is_admin:
                raise ApiError("forbidden", "Viewers can't make changes. Ask an admin.")
            if role == "admin":
                log.info("dashboard action", who=session.user.name, action=name, path=request.path)
            try:
                return await page(Visit(self, request, session))
            except RecordError as error:
                # Pages show the faults of their forms. This is another one, such as an app that was just deleted.
                raise ApiError("conflict", str(error)) from None

        return handle

    async def session_of(self, request: Request) -> Session | None:
        """The session that the request's cookie stands for."""
        plain = cookie_of(request)
        return await self.accounts.session(plain) if plain else None

    async def _to_login(self, request: Request) -> Response:
        if _HTMX in request.headers:
            # Redirects the whole page, because htmx would put a login page into the table that it refreshes.
            shown = _path_of(request.headers.get("HX-Current-URL", ""))
            return Response(204, b"", header_line("HX-Redirect", _login_path(shown)))
        if request.method == "POST":
            typed = _typed(request) if len(request.body) <= MAX_STRANGE_BYTES else None
            return await self._expired(request, typed)
        return redirect(_login_path(request.target))

    def _offer_form(self, request: Request, session: Session) -> Response:
        """Handles a form without the session's CSRF token, which changes nothing. The page may have been opened in an
        earlier session, so the user gets the typed values to send again."""
        is_form = "X-CSRF-Token" not in request.headers and bool(_pairs(request))
        typed = _typed(request) if is_form else Form()
        if not typed.pairs:
            raise ApiError("forbidden", "This form belongs to an earlier session. Reload the page and send it again.")
        return self._offered(Visit(self, request, session), request.path, typed)

    # -- notices

    def give_notice(self, session_hash: str, text: str) -> None:
        if len(self._notices) >= _MAX_NOTICES:
            self._notices.clear()
        self._notices[session_hash] = text

    def take_notice(self, session_hash: str) -> str | None:
        return self._notices.pop(session_hash, None)


def _check_apps(apps: frozenset[str], pattern: str, request: Request) -> None:
    """Raises ApiError if a user who may see only `apps` may not see this page."""
    if pattern == _OF_APP or pattern.startswith(f"{_OF_APP}/"):
        if request.parameters[0] not in apps:
            raise ApiError("not_found", _NO_APP)
    elif pattern not in _OF_USER:
        raise ApiError("forbidden", "You may see some apps only, and this page is about all of them.")


def _login_path(path: str) -> str:
    """The path of the login page, which leads to `path` after the login."""
    return LOGIN if path in ("", HOME, "/") else f"{LOGIN}?{urlencode({'next': path})}"


def _path_of(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return parts.path + (f"?{parts.query}" if parts.query else "")


def redirect(path: str, headers: bytes = b"") -> Response:
    """A 303 redirect to a path of this server."""
    return Response(303, b"", header_line("Location", path) + b"Cache-Control: no-store\r\n" + headers)


def own_path(path: str) -> str:
    """`path` if it is a dashboard page, else the overview. Prevents redirects to other sites."""
    try:
        parts = urlsplit(path)
    except ValueError:
        return HOME
    inside = parts.path == HOME or parts.path.startswith(f"{HOME}/")
    # Browsers resolve these, also percent-encoded ones.
    climbs = any(segment in (".", "..") for segment in unquote(parts.path).split("/"))
    plain = path.isascii() and path.isprintable() and "\\" not in path and " " not in path
    return path if inside and not climbs and plain and not parts.scheme and not parts.netloc else HOME


# -- cookies


def is_secure(request: Request) -> bool:
    """Whether the browser uses https, according to a trusted proxy. The control port itself has no TLS."""
    return request.secure


def cookie_name(request: Request, name: str = COOKIE) -> str:
    return _SECURE_PREFIX + name if is_secure(request) else name


def cookie_of(request: Request, name: str = COOKIE) -> str:
    """The value of a cookie that `set_cookie` set; "" if the request has none."""
    return _cookie(request.headers.get("Cookie", ""), cookie_name(request, name))


def set_cookie(request: Request, plain: str, *, name: str = COOKIE, max_age_s: float | None = None) -> bytes:
    """The header line that sets a cookie, by default that of the session; "" deletes the cookie."""
    line = f"{cookie_name(request, name)}={plain}{_COOKIE_FORM}"
    if is_secure(request):
        line += "; Secure"
    if not plain:
        max_age_s = 0
    if max_age_s is not None:
        line += f"; Max-Age={max_age_s:.0f}"
    return header_line("Set-Cookie", line)


def _cookie(header: str, name: str) -> str:
    for part in header.split(";"):
        cookie, _, value = part.strip().partition("=")
        if cookie == name:
            return value
    return ""


# -- forms from other sites


def check_origin(request: Request) -> None:
    """Raises ApiError if the request was sent by a page of another site.

    Browsers send Sec-Fetch-Site or Origin. A request with neither is not from a browser, and needs the CSRF token.
    """
    site = request.headers.get("Sec-Fetch-Site")
    origin = request.headers.get("Origin")
    host = request.headers.get("Host", "")
    foreign = site is not None and site not in ("same-origin", "none")
    if origin is not None and origin.partition("://")[2] != host:
        foreign = True
    if foreign:
        raise ApiError("forbidden", "This form came from another site, so nothing was done.")


def _typed(request: Request) -> Form:
    """The typed values of a form, without passwords, which must not be shown again."""
    return Form(pair for pair in read_form(request).pairs if pair[0] not in _NEVER_SHOWN)


def _has_csrf(request: Request, session: Session) -> bool:
    token = request.headers.get("X-CSRF-Token")
    if token is None:
        token = next((value for name, value in reversed(_pairs(request)) if name == CSRF_FIELD), "")
    return hmac.compare_digest(token.encode(), session.csrf.encode())


def _pairs(request: Request) -> list[tuple[str, str]]:
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return read_pairs(request.body) if kind == "application/x-www-form-urlencoded" else []
