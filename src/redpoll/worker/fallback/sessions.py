"""The sessions of this worker: how one begins, its timers, and its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from redpoll.loop.slices import Slices
from redpoll.protocol.apps import App
from redpoll.protocol.errors import Code
from redpoll.protocol.handshake import Refusal
from redpoll.worker.fallback.claims import ENDED, RENEW_S, Claims, SessionName
from redpoll.worker.fallback.lines import BEAT, LineMaker
from redpoll.worker.fallback.session import Session, SessionState

if TYPE_CHECKING:
    from redpoll.worker.fallback.outlets import LineRequest
    from redpoll.worker.ingress.gate import Gate

__all__ = ["Opening", "Sessions"]

# A stream or poll that no client opens again ends the session.
_WAIT_S: Final = 30.0
# Below the 30 s after which some proxies end a silent response.
_BEAT_S: Final = 25.0
# Sessions that one tick looks at.
_MAX_A_TICK: Final = 500
# Calls to Redis under way that renew claims after a break.
_MAX_RENEWING: Final = 100
_TOO_MANY: Final = "your address has as many connections as this server allows"


class Opening(NamedTuple):
    """A request for a new session. `check()`: the app, or why it isn't admitted; called again if its record changed.
    `peer` and `headers` are as `Addresses.enter` wants them, `address` is the client's. `refuse(refusal)` and
    `foreign(owner)` answer it otherwise: `owner` is the worker that has the session, "" if it can't be had."""

    name: SessionName
    app: App
    request: LineRequest
    number: int | None
    query: Mapping[str, str]
    peer: str
    address: str
    headers: Mapping[bytes, bytes]
    check: Callable[[], App | Refusal]
    described: Callable[[], dict[str, Any]]
    refuse: Callable[[Refusal | None], None]
    foreign: Callable[[str], None]


class Sessions:
    """`begun_total` counts those that were opened. `by_name` has those that can be asked for."""

    def __init__(self, gate: Gate, claims: Claims) -> None:
        self.gate = gate
        self.claims = claims
        self.maker = LineMaker()
        self.by_name: dict[SessionName, Session] = {}
        self.begun_total = 0
        self.wait_s = _WAIT_S
        self.beat_s = _BEAT_S
        # Those without a stream or poll, and those with one, with the time at which something is due: the next first.
        self._waiting: dict[Session, float] = {}
        self._beats: dict[Session, float] = {}
        # After a break of the link to Redis, all claims are renewed. How many calls are under way.
        self._to_renew: deque[Session] = deque()
        self._renewing = 0
        self._renewal = Slices(self._renew_next)
        # Names that Redis is asked for.
        self._asked: set[SessionName] = set()

    @property
    def full(self) -> bool:
        """There are as many as connections may speak HTTP."""
        return len(self.by_name) + len(self._asked) >= self.gate.max_connections // 2

    # -- the beginning -------------------------------------------------------------------------------------

    def open(self, opening: Opening) -> None:
        """Open a session, if no other worker has one of this name."""
        if opening.name in self._asked:
            opening.foreign("")
            return
        self._asked.add(opening.name)
        self.claims.claim(opening.name, lambda owner: self._claimed(opening, owner))

    def _claimed(self, opening: Opening, owner: str | None) -> None:
        self._asked.discard(opening.name)
        if owner:
            opening.foreign("" if owner == ENDED else owner)
        elif owner is None:
            opening.refuse(None)
        elif not opening.request.open:
            self.claims.give_up(opening.name)
        else:
            self._check_again(opening)

    def _check_again(self, opening: Opening) -> None:
        """Redis has answered: the app's record may have changed meanwhile, or this worker may be draining."""
        outcome = opening.check()
        if isinstance(outcome, Refusal):
            self._give_up(opening, outcome)
        elif self.gate.unready(opening.address) is not None:
            self.claims.give_up(opening.name)
            opening.refuse(None)
        else:
            self._ask_for_place(opening._replace(app=outcome))

    def _ask_for_place(self, opening: Opening) -> None:
        gate = self.gate
        slot = gate.addresses.enter(opening.peer, opening.headers, named=gate.settings.proxy_protocol)
        if slot is None:
            self._give_up(opening, Refusal(Code.OVER_CAPACITY, _TOO_MANY))
            return
        session = Session(self, opening.name, opening.address)
        session.connection.address_slot = slot
        admission = gate.hub.admission
        if admission.admits_at_once(opening.app):
            self._opened(opening, session)
            return
        self._asked.add(opening.name)

        def left() -> None:
            admission.withdraw(session.connection)
            self._asked.discard(opening.name)
            self._give_up(opening, None, session)

        opening.request.on_left = left
        admission.ask(session.connection, opening.app, lambda refusal: self._place_found(opening, session, refusal))

    def _place_found(self, opening: Opening, session: Session, refusal: Refusal | None) -> None:
        self._asked.discard(opening.name)
        if refusal is None:
            outcome = self.gate.hub.admission.confirmed(opening.app, opening.check())
            if isinstance(outcome, Refusal):
                refusal = outcome
            else:
                opening = opening._replace(app=outcome)
        if refusal is not None:
            self._give_up(opening, refusal, session)
        else:
            self._opened(opening, session)

    def _give_up(self, opening: Opening, refusal: Refusal | None, session: Session | None = None) -> None:
        self.claims.give_up(opening.name)
        if session is not None:
            session.connection.released()
        if refusal is not None:
            opening.refuse(refusal)

    def _opened(self, opening: Opening, session: Session) -> None:
        self.begun_total += 1
        self.by_name[session.name] = session
        session.renewed_at = monotonic()
        request = opening.request
        request.on_left = lambda: session.left(request)
        session.opened(request, opening.number)
        connection = session.connection
        self.gate.greet(connection, opening.app, opening.query, opening.address, opening.described)

    # -- timers --------------------------------------------------------------------------------------------

    def attached(self, session: Session) -> None:
        """It has a stream or poll."""
        self._waiting.pop(session, None)
        self._beats.pop(session, None)
        now = monotonic()
        self._beats[session] = now + self.beat_s
        # Here too: no heartbeat is ever due in a session that always has messages for its polls.
        self._renew_if_due(session, now)

    def waits(self, session: Session) -> None:
        """It has neither."""
        self._beats.pop(session, None)
        self._waiting[session] = monotonic() + self.wait_s

    def beat(self) -> None:
        """Call it a few times a second."""
        self.maker.forget()
        now = monotonic()
        for session in _due(self._waiting, now):
            del self._waiting[session]
            if session.state is SessionState.OPEN:
                session.drop()
            else:
                session.ended()
        for session in _due(self._beats, now):
            # At the end again, before it writes: a poll ends by that.
            del self._beats[session]
            self._beats[session] = now + self.beat_s
            session.beat(BEAT)
            self._renew_if_due(session, now)

    # -- claims --------------------------------------------------------------------------------------------

    def renew_all(self) -> None:
        """Redis may have lost who has which session, and others may have marked sessions of ours as ended."""
        self._to_renew = deque(self.by_name.values())
        self._renewal.start()

    def _renew_next(self) -> bool:
        if not self._to_renew or self._renewing >= _MAX_RENEWING:
            return False
        self._renew(self._to_renew.popleft())
        return True

    def _renew_if_due(self, session: Session, now: float) -> None:
        if session.renewed_at < now - RENEW_S:
            self._renew(session)

    def _renew(self, session: Session) -> None:
        if session.state is SessionState.OPEN:
            session.renewed_at = monotonic()
            self._renewing += 1
            self.claims.renew(session.name, partial(self._renewed, session))

    def _renewed(self, session: Session, owner: str | None) -> None:
        self._renewing -= 1
        if self._to_renew:
            self._renewal.start()
        if owner and owner != self.claims.own and session.state is SessionState.OPEN:
            session.message_lost(503)

    # -- the end -------------------------------------------------------------------------------------------

    def ended(self, session: Session) -> None:
        """It can't be asked for any more."""
        self._waiting.pop(session, None)
        self._beats.pop(session, None)
        if self.by_name.get(session.name) is session:
            del self.by_name[session.name]
            self.claims.release(session.name)


def _due(sessions: dict[Session, float], now: float) -> list[Session]:
    """The first ones whose time has come, not all if there are many."""
    ready: list[Session] = []
    for session, due in sessions.items():
        if due > now or len(ready) == _MAX_A_TICK:
            break
        ready.append(session)
    return ready
