"""The pages of single sign-on: to the provider, back from it, and out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import parse_qs

import structlog

from redpoll.config.proxies import network_of
from redpoll.control.accounts.accounts import Accounts
from redpoll.control.accounts.sign_on import BEGUN_WITHIN_S, SignOn, SignOnError
from redpoll.control.dashboard.access import (
    HOME,
    LOGIN,
    AccessControl,
    Visit,
    cookie_of,
    own_path,
    redirect,
    set_cookie,
)
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.protocol.errors import ApiError

__all__ = ["SignOnPages"]

log = structlog.get_logger(__name__)

_CALLBACK: Final = f"{HOME}/sso/callback"
_COOKIE: Final = "redpoll-sso"
# Logins that wait for the provider: each is a request to it, right or wrong.
_MAX_FINISHING: Final = 50
# Of one address (IPv6: /64).
_MAX_FINISHING_EACH: Final = 5


class SignOnPages:
    def __init__(self, access: AccessControl, accounts: Accounts, sign_on: SignOn) -> None:
        self._access = access
        self._accounts = accounts
        self._sign_on = sign_on
        # By address.
        self._finishing: Counter[str] = Counter()

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.open_route("GET", "/sso", "sso", self.begin),
            access.open_route("GET", "/sso/callback", "sso_callback", self.finish),
        ]

    async def begin(self, request: Request) -> Response:
        """GET /dashboard/sso: to the provider. `next` is the page after the login."""
        following = own_path(parse_qs(request.query).get("next", [HOME])[-1])
        try:
            begun = await self._sign_on.begin(_address_of(request) + _CALLBACK, following)
        except SignOnError as error:
            return self._refused(request, error)
        cookie = set_cookie(request, begun.cookie, name=_COOKIE, max_age_s=BEGUN_WITHIN_S)
        return redirect(begun.url, cookie)

    async def finish(self, request: Request) -> Response:
        """GET /dashboard/sso/callback: back from the provider."""
        address = request.remote
        try:
            returned = self._sign_on.returned(request.query, cookie_of(request, _COOKIE))
            # Only now: a page of another site can send browsers here, but not with their cookie and its state.
            with self._place(address):
                identity = await self._sign_on.finish(returned, _address_of(request) + _CALLBACK)
        except SignOnError as error:
            if error.without_role:
                await self._accounts.withdraw(error.without_role, address)
            return self._refused(request, error)
        plain = await self._accounts.sign_on(identity, address, cookie_of(request))
        log.info("single sign-on", who=identity.name, role=identity.role, address=address)
        return redirect(returned.following, set_cookie(request, plain) + set_cookie(request, "", name=_COOKIE))

    @contextmanager
    def _place(self, address: str) -> Iterator[None]:
        """A place among the logins that wait for the provider. Raises ApiError if there is none.

        Wrong answers don't slow down the next ones: there is no password to guess, and all users of an address would
        wait for each other.
        """
        network = network_of(address)
        if self._finishing[network] >= _MAX_FINISHING_EACH or self._finishing.total() >= _MAX_FINISHING:
            raise ApiError("rate_limited", "Too many logins are under way. Try again in a moment.")
        self._finishing[network] += 1
        try:
            yield
        finally:
            self._finishing[network] -= 1
            if not self._finishing[network]:
                del self._finishing[network]

    def _refused(self, request: Request, error: SignOnError) -> Response:
        log.warning("single sign-on refused", reason=error.reason, address=request.remote)
        gone = set_cookie(request, "", name=_COOKIE)
        visit = Visit(self._access, request, None)
        return visit.page(
            "sign_on_refused.html", status=403, headers=gone, reason=error.reason.partition(":")[0], check=error.check
        )

    async def left(self, visit: Visit, id_token: str) -> Response:
        """After the session here has ended: ends the one at the provider, if it offers that.

        A page and no redirect: browsers apply the policy's `form-action` to redirects of a form, too.
        """
        gone = set_cookie(visit.request, "")
        url = await self._sign_on.logout_url(id_token, _address_of(visit.request) + LOGIN)
        return Visit(self._access, visit.request, None).page("signed_out.html", headers=gone, url=url)


def _address_of(request: Request) -> str:
    """The dashboard's own address, as the browser has it. The control port takes only Host headers that it knows."""
    return f"{'https' if request.secure else 'http'}://{request.headers.get('Host', '')}"
