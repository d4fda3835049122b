"""Requests that reach another worker than the one that has their session.

The worker that has the request asks the session's worker by a message, and keeps the connection. Lines come back as
messages. All of it goes through Redis (cluster/mailbox.py), between the workers of a node as well as between nodes.

A stream carries at most REOPENED_AFTER_UNITS and a frame, so what a client doesn't read is bounded here without asking
the session; the rest waits in the session's connection. When a worker or the link to Redis is lost, relayed requests
end, and so do the sessions that wrote there: clients connect again, and notice that something may be missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from redpoll.cluster.mailbox import Mailbox
from redpoll.loop.slices import Slices
from redpoll.worker.fallback.claims import SessionName
from redpoll.worker.fallback.lines import Lines, lines_of
from redpoll.worker.fallback.messages import Attach, Bring, Left, Message, Missed, Status, Written, decode, encode
from redpoll.worker.fallback.session import Session

if TYPE_CHECKING:
    import asyncio

    from redpoll.worker.fallback.lost_sends import LostSends
    from redpoll.worker.fallback.outlets import LineRequest
    from redpoll.worker.fallback.sessions import Sessions

__all__ = ["Relay"]

log = structlog.get_logger()

_ANSWER_S: Final = 5.0
_LOOK_TICKS: Final = 8


class _Waiting:
    """A request of this worker whose session is in `owner`. `answer(status)` answers it if the session doesn't."""

    __slots__ = ("answer", "begun", "due", "owner", "request")

    def __init__(self, owner: str, answer: Callable[[int], None], request: LineRequest | None = None) -> None:
        self.owner = owner
        self.answer = answer
        # A stream or poll; None for an xhr_send.
        self.request = request
        self.begun = False
        self.due = monotonic() + _ANSWER_S


class _RemoteOutlet:
    """The outlet of a session whose client's request is in the worker `by`."""

    __slots__ = ("_ended", "_relay", "_scheduled", "_text", "by", "number", "polls", "session")

    def __init__(self, relay: Relay, session: Session, by: str, number: int, polls: bool) -> None:
        self.polls = polls
        self.by = by
        self.number = number
        self.session = session
        self._relay = relay
        self._text: list[bytes] = []
        self._scheduled = False
        self._ended = False

    def begin(self) -> None:
        self._schedule()

    def write(self, lines: Lines) -> None:
        self._text.append(lines.text)
        self._schedule()

    def end(self) -> None:
        self._ended = True
        self._relay.outlets.pop((self.by, self.number), None)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._relay.loop.call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        text, self._text = b"".join(self._text), []
        message = Written(self.number, self._relay.own, text, self._ended)
        self._relay.mailbox.send(self.by, encode(message), self._sent)

    def _sent(self, arrived: bool) -> None:
        if not arrived:
            self._relay.outlets.pop((self.by, self.number), None)
            self._relay.tell_later(self.by, Written(self.number, self._relay.own, b"", True))
            # Lines may be lost, also if the client has another stream or poll by now.
            self.session.drop()


class Relay:
    """Both sides. `relayed_total` counts requests that were passed on to other workers."""

    def __init__(
        self, mailbox: Mailbox, sessions: Sessions, lost_sends: LostSends, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.mailbox = mailbox
        self.own = mailbox.address
        self.loop = loop
        self.relayed_total = 0
        self.outlets: dict[tuple[str, int], _RemoteOutlet] = {}
        self._sessions = sessions
        self._lost_sends = lost_sends
        # Requests of this worker, by number.
        self._waiting: dict[int, _Waiting] = {}
        # Those that the session's worker hasn't answered, the oldest first.
        self._unanswered: dict[int, _Waiting] = {}
        self._next = 1
        self._tick = 0
        # Of broken ways: requests, and sessions that wrote to such.
        self._lost: deque[int | Session] = deque()
        self._slices = Slices(self._end_one)
        # What other workers must know once the link is up: their names, and the messages.
        self._untold: deque[tuple[str, Message]] = deque()
        self._telling = Slices(self._tell_one)
        mailbox.start(self._received, self._link_up, self._link_lost)

    @property
    def waiting(self) -> int:
        """Requests of this worker whose sessions are in others."""
        return len(self._waiting)

    # -- for requests of this worker -----------------------------------------------------------------------

    def attach(
        self, owner: str, name: SessionName, request: LineRequest, n: int | None, answer: Callable[[int], None]
    ) -> None:
        """Let the worker `owner` write to a stream or poll. `answer` is called with 404 or 503 if it doesn't."""
        number = self._add(_Waiting(owner, answer, request))
        request.on_left = lambda: self._left(number)
        self._send(number, owner, Attach(number, self.own, name.key, name.session, request.polls, n))

    def bring(self, owner: str, name: SessionName, n: int | None, body: bytes, answer: Callable[[int], None]) -> None:
        """Pass an xhr_send on. `answer` is called with the status, later; 503: it may be lost."""
        number = self._add(_Waiting(owner, answer))
        self._send(number, owner, Bring(number, self.own, name.key, name.session, n, body))

    def _add(self, waiting: _Waiting) -> int:
        self.relayed_total += 1
        number = self._next
        self._next += 1
        self._waiting[number] = self._unanswered[number] = waiting
        return number

    def _send(self, number: int, owner: str, message: Attach | Bring) -> None:
        def sent(arrived: bool) -> None:
            if not arrived:
                # The session's worker is gone, or its link is down and it comes back.
                is_send = isinstance(message, Bring)
                self._give_up(number, 503 if is_send or not self.mailbox.up else 404)

        self.mailbox.send(owner, encode(message), sent)

    def _left(self, number: int) -> None:
        waiting = self._pop(number)
        if waiting is not None:
            self.mailbox.send(waiting.owner, encode(Left(number, self.own)), _ignore)

    def _pop(self, number: int) -> _Waiting | None:
        self._unanswered.pop(number, None)
        return self._waiting.pop(number, None)

    def _give_up(self, number: int, status: int) -> None:
        """No more comes from the session's worker. A poll gets an error even if the session was there: its last message
        may be lost, and a client whose poll is answered goes on."""
        waiting = self._pop(number)
        if waiting is None:
            return
        if waiting.request is not None:
            self.tell_later(waiting.owner, Left(number, self.own))
        if waiting.begun and waiting.request is not None and not waiting.request.polls:
            waiting.request.end()
        else:
            waiting.answer(status)

    def _link_lost(self) -> None:
        self._lost_sends.link_lost()
        self._lost.extend(self._waiting)
        self._lost.extend(outlet.session for outlet in self.outlets.values())
        self._slices.start()

    def _link_up(self) -> None:
        self._lost_sends.link_up()
        self._sessions.renew_all()
        self._telling.start()

    def tell_later(self, address: str, message: Message) -> None:
        """The way to this worker is broken. If that is our link's fault, the worker still waits for us."""
        if not self.mailbox.up:
            self._untold.append((address, message))

    def _tell_one(self) -> bool:
        if not self._untold or not self.mailbox.up:
            return False
        address, message = self._untold.popleft()
        self.mailbox.send(address, encode(message), _ignore)
        return True

    def _end_one(self) -> bool:
        if not self._lost:
            return False
        lost = self._lost.popleft()
        if isinstance(lost, int):
            self._give_up(lost, 503)
        else:
            lost.drop()
        return True

    def beat(self) -> None:
        """Call it four times a second: gives up what isn't answered, and what waits for dead workers."""
        self._tick += 1
        if not self._waiting:
            return
        now = monotonic()
        while self._unanswered:
            number, oldest = next(iter(self._unanswered.items()))
            if oldest.due > now:
                break
            self._give_up(number, 503)
        if self._tick % _LOOK_TICKS == 0:
            for owner in {waiting.owner for waiting in self._waiting.values()}:
                self.mailbox.are_there(owner, partial(self._looked, owner))

    def _looked(self, owner: str, there: bool) -> None:
        if not there:
            self._lost.extend(number for number, waiting in self._waiting.items() if waiting.owner == owner)
            self._slices.start()

    # -- messages ------------------------------------------------------------------------------------------

    def _received(self, payload: bytes) -> None:
        try:
            message = decode(payload)
        except msgspec.DecodeError as error:
            log.error("message of another worker refused", reason=str(error))
            return
        match message:
            case Written():
                self._written(message)
            case Status():
                self._give_up(message.number, message.status)
            case Attach():
                self._attach(message)
            case Bring():
                session = self._sessions.by_name.get(SessionName(message.key, message.session))
                self._answer(message, 404 if session is None else session.bring(message.n, message.body))
            case Missed():
                session = self._sessions.by_name.get(SessionName(message.key, message.session))
                if session is not None:
                    session.message_lost(message.status)
            case Left():
                outlet = self.outlets.pop((message.by, message.number), None)
                if outlet is not None:
                    outlet.session.left(outlet)

    def _written(self, message: Written) -> None:
        waiting = self._waiting.get(message.number)
        if waiting is None or waiting.request is None:
            # Its client went, or a break of the link ended it.
            self.mailbox.send(message.by, encode(Left(message.number, self.own)), _ignore)
            return
        request = waiting.request
        if not waiting.begun:
            waiting.begun = True
            self._unanswered.pop(message.number, None)
            request.begin()
        if message.text:
            request.write(lines_of(message.text))
        if message.last:
            self._pop(message.number)
            request.end()

    def _attach(self, message: Attach) -> None:
        session = self._sessions.by_name.get(SessionName(message.key, message.session))
        if session is None:
            self._answer(message, 404)
            return
        outlet = _RemoteOutlet(self, session, message.by, message.number, message.polls)
        self.outlets[message.by, message.number] = outlet
        session.attach(outlet, message.n)

    def _answer(self, message: Message, status: int) -> None:
        self.mailbox.send(message.by, encode(Status(message.number, self.own, status)), _ignore)


def _ignore(arrived: bool) -> None:
    pass
