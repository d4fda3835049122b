"""Answers the HTTP requests of the fallback (protocol/README.md "HTTP fallback").

A request is for a new session, for one of this worker, or for one of another worker, which gets it by way of relay.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from redpoll.config.proxies import TrustedProxies
from redpoll.http.errors import TOO_MANY_OF_ADDRESS
from redpoll.http.messages import FIELDS, HEAD_ONLY, MAX_BODY_BYTES, SECURE
from redpoll.protocol import handshake
from redpoll.protocol.apps import App
from redpoll.protocol.handshake import Refusal
from redpoll.worker.fallback import responses
from redpoll.worker.fallback.claims import ENDED, Claims, SessionName
from redpoll.worker.fallback.lost_sends import LostSends
from redpoll.worker.fallback.outlets import LineRequest, PollRequest, Request, StreamRequest
from redpoll.worker.fallback.paths import Action, Target, read_target
from redpoll.worker.fallback.relay import Relay
from redpoll.worker.fallback.sessions import Opening, Sessions
from redpoll.worker.ingress.held_requests import LATER
from redpoll.worker.ingress.http_requests import FORWARDED_PROTO

if TYPE_CHECKING:
    import asyncio

    from redpoll.cluster.directory import Directory
    from redpoll.cluster.mailbox import Mailbox
    from redpoll.cluster.redis.keys import Keys
    from redpoll.cluster.redis.link import Link
    from redpoll.http.reader import ParsedRequest
    from redpoll.worker.ingress.gate import Gate
    from redpoll.worker.ingress.http_requests import PublicConnection

__all__ = ["Fallback"]

_ORIGIN: Final = FIELDS.index("Origin")


class _Sending(Request):
    """An xhr_send whose session is in another worker, or isn't found yet. `lost()` is called if it didn't get there."""

    __slots__ = ("_lost",)

    def __init__(self, http: PublicConnection, cors: str, lost: Callable[[], None]) -> None:
        super().__init__(http, cors)
        self._lost = lost

    def answer(self, status: int) -> None:
        if status == 503:
            self._lost()
        self.refuse(responses.nothing(self.cors) if status == 204 else responses.failed(status, self.cors))


class Fallback:
    """One per worker. `begin` says what it works with, before the first request; `beat` four times a second.

    `mailbox`: where messages of other workers come."""

    def __init__(
        self, link: Link, keys: Keys, mailbox: Mailbox, directory: Directory, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._claims = Claims(link, keys, mailbox.address)
        self.mailbox = mailbox
        self._directory = directory
        self._loop = loop
        self._gate: Gate
        self.sessions: Sessions
        self.lost_sends: LostSends
        self.relay: Relay

    def begin(self, gate: Gate) -> None:
        """The gate needs this first."""
        self._gate = gate
        self._trusted = TrustedProxies(gate.settings.trusted_proxies)
        self.sessions = Sessions(gate, self._claims)
        self.lost_sends = LostSends(self.mailbox, self.sessions)
        self.relay = Relay(self.mailbox, self.sessions, self.lost_sends, self._loop)

    def beat(self) -> None:
        self.sessions.beat()
        self.relay.beat()
        self.lost_sends.beat()

    # -- requests ------------------------------------------------------------------------------------------

    def answer(self, http: PublicConnection, request: ParsedRequest) -> bytes | None:
        """The answer, LATER, or None: it is no request of the fallback."""
        if not self._gate.settings.http_fallback or request.method not in (b"POST", b"OPTIONS"):
            return None
        target = read_target(request.target)
        if target is None:
            return None
        origin = _field(request, _ORIGIN)
        app = self._directory.find(target.key)
        allowed = app is not None and handshake.admits_origin(app, target.key, origin, self._gate.own_host)
        # Pages of other origins may read why they are refused, and nothing else.
        cors = responses.cors_lines(origin if allowed or target.action is not Action.SEND else None)
        if request.method == b"OPTIONS":
            return responses.preflight(cors) if cors or origin is None else responses.failed(403, "")
        refusal = request.refusal or self._too_large(request)
        if refusal:
            if target.action is Action.SEND and app is not None and allowed:
                self._send_lost(http, request, target, refusal)
            return responses.failed(refusal, cors)
        if request.flags & HEAD_ONLY:
            http.let_body_in()
            return LATER
        if target.action is Action.SEND:
            if app is None or not allowed:
                return responses.failed(404 if app is None else 403, cors)
            return self._send(http, request, target, cors)
        return self._attach(http, request, target, cors)

    def _too_large(self, request: ParsedRequest) -> int:
        # Each message is bounded as on a WebSocket. As a text in a list, its quotes and backslashes are escaped.
        largest = min(2 * self._gate.settings.max_message_bytes + len('[""]'), MAX_BODY_BYTES)
        return 413 if max(len(request.body), request.announced or 0) > largest else 0

    def _send(self, http: PublicConnection, request: ParsedRequest, target: Target, cors: str) -> bytes:
        name = SessionName(target.key, target.session)
        session = self.sessions.by_name.get(name)
        if session is not None:
            status = session.bring(target.number, request.body)
            return responses.nothing(cors) if status == 204 else responses.failed(status, cors)
        lost = partial(self._send_lost, http, request, target, 503)
        refusal = self._unable(http, request, cors)
        if refusal is not None:
            lost()
            return refusal
        sending = _Sending(http, cors, lost)
        http.hold(sending, request)
        self._claims.find(name, partial(self._owner_known, name, sending, target.number, request.body))
        return LATER

    def _send_lost(self, http: PublicConnection, request: ParsedRequest, target: Target, status: int) -> None:
        """pusher-js doesn't look at the status. A lost heartbeat is no loss."""
        if request.body.strip() == b"[]":
            return
        name = SessionName(target.key, target.session)
        session = self.sessions.by_name.get(name)
        if session is not None:
            session.message_lost(status)
        else:
            network = self._gate.strangers.counted_as(self._gate.http.client_of(http, request))
            self.lost_sends.note(name, status, network)

    def _owner_known(
        self, name: SessionName, sending: _Sending, number: int | None, body: bytes, owner: str | None
    ) -> None:
        if owner is None or (owner == "" and self.lost_sends.unsure):
            sending.answer(503)
        elif owner in ("", ENDED, self.mailbox.address):
            sending.answer(404)
        else:
            self.relay.bring(owner, name, number, body, sending.answer)

    def _attach(self, http: PublicConnection, request: ParsedRequest, target: Target, cors: str) -> bytes:
        name = SessionName(target.key, target.session)
        query = handshake.read_query(target.query)
        check = partial(self._check, http, request, target, query)
        outcome = check()
        if isinstance(outcome, Refusal):
            self._gate.upgrades_refused_total += 1
            self._refused(target.key, outcome, partial(self._described, http, request, target, query))
            return responses.refused(outcome, cors)
        session = self.sessions.by_name.get(name)
        if session is None:
            refusal = self._unable(http, request, cors) or self._full(http, request, cors)
            if refusal is not None:
                return refusal
        polls = target.action is Action.POLL
        waiting = PollRequest(http, cors) if polls else StreamRequest(http, cors, request.flags)
        http.hold(waiting, request)
        if session is not None:
            waiting.on_left = partial(session.left, waiting)
            session.attach(waiting, target.number)
        else:
            self._open(http, request, target, name, outcome, waiting, query, cors)
        return LATER

    def _open(
        self,
        http: PublicConnection,
        request: ParsedRequest,
        target: Target,
        name: SessionName,
        app: App,
        waiting: LineRequest,
        query: Mapping[str, str],
        cors: str,
    ) -> None:
        def refuse(refusal: Refusal | None) -> None:
            self._gate.upgrades_refused_total += 1
            if refusal is None:
                waiting.refuse(responses.failed(503, cors))
                return
            self._refused(target.key, refusal, described)
            waiting.refuse(responses.refused(refusal, cors))

        def not_there(status: int) -> None:
            waiting.refuse(responses.failed(status, cors))

        def foreign(owner: str) -> None:
            if owner in ("", self.mailbox.address):
                not_there(404)
                return
            self.relay.attach(owner, name, waiting, target.number, not_there)
            if not waiting.open:
                # Its client went while the session was looked for: the session's worker must know.
                waiting.left()

        described = partial(self._described, http, request, target, query)
        self.sessions.open(
            Opening(
                name=name,
                app=app,
                request=waiting,
                number=target.number,
                query=query,
                peer=http.peer,
                address=self._gate.http.client_of(http, request),
                headers=_forwarded(request),
                check=partial(self._check, http, request, target, query),
                described=described,
                refuse=refuse,
                foreign=foreign,
            )
        )

    # -- what requests say ---------------------------------------------------------------------------------

    def _check(
        self, http: PublicConnection, request: ParsedRequest, target: Target, query: Mapping[str, str]
    ) -> App | Refusal:
        return handshake.check(
            target.path,
            query,
            _field(request, _ORIGIN),
            self._directory.find,
            self._is_secure(http, request),
            self._gate.own_host,
        )

    def _is_secure(self, http: PublicConnection, request: ParsedRequest) -> bool:
        return self._trusted.is_secure(http.peer, _field(request, FORWARDED_PROTO), bool(request.flags & SECURE))

    def _unable(self, http: PublicConnection, request: ParsedRequest, cors: str) -> bytes | None:
        """The answer if other workers, or Redis, can't be asked."""
        gate = self._gate
        if not self.mailbox.up:
            return responses.failed(503, cors)
        if http.authenticated or gate.strangers.reserve(http.stream, gate.http.client_of(http, request)):
            return None
        gate.http.limit_reached("address")
        return responses.failed(503, cors, TOO_MANY_OF_ADDRESS)

    def _full(self, http: PublicConnection, request: ParsedRequest, cors: str) -> bytes | None:
        """The answer if no session may begin here."""
        text = self._gate.unready(self._gate.http.client_of(http, request))
        if text is None and self.sessions.full:
            text = "this server is full"
        if text is None:
            return None
        self._gate.upgrades_refused_total += 1
        return responses.failed(503, cors, text)

    # -- debugging -----------------------------------------------------------------------------------------

    def _refused(self, key: str, refusal: Refusal, described: partial[dict[str, Any]]) -> None:
        if self._gate.debugging.any:
            self._gate.debugging.refused(self._directory.find(key), refusal, **described())

    def _described(
        self, http: PublicConnection, request: ParsedRequest, target: Target, query: Mapping[str, str]
    ) -> dict[str, Any]:
        """A client and its request, as the gate describes them."""
        headers = {"origin": _field(request, _ORIGIN), "x-forwarded-for": ",".join(request.forwarded) or None}
        return {
            "address": self._gate.http.client_of(http, request),
            "path": target.path,
            "query": dict(query),
            "secure": self._is_secure(http, request),
            "headers": {name: value for name, value in headers.items() if value is not None},
        }


def _field(request: ParsedRequest, place: int) -> str | None:
    return next((value.decode("latin-1") for at, value in request.fields if at == place), None)


def _forwarded(request: ParsedRequest) -> dict[bytes, bytes]:
    return {b"x-forwarded-for": ",".join(request.forwarded).encode("latin-1")} if request.forwarded else {}
