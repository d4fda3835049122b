"""Requests that pull webhooks: `GET /apps/ID/webhooks/stream` (protocol/README.md "Webhooks by pull").

Control hands out what is due, and answers at once. If nothing is due, the request waits here: it asks again when
control planes say that deliveries of its app may be due, and when the next retry is. So control forgets clients at
once, and what it hands out has a reader. A lost message costs a few seconds, because waiting requests also ask now and
then. A client gets one answer (LongPull) or a stream of events (pull_stream.py).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

from redpoll.cluster.envelopes import Envelope, parse_webhooks_ended
from redpoll.cluster.redis.keys import PULLS_TOPIC
from redpoll.http.errors import error_response, http_date
from redpoll.http.messages import FIELDS, HEAD_ONLY, PULL_LIMIT, PULL_TERMS, STREAM_APP, PullTerms
from redpoll.worker.streams.answers import Granted

if TYPE_CHECKING:
    from redpoll.cluster.listening import Listening
    from redpoll.http.reader import ParsedRequest

__all__ = [
    "FIRST_PAUSE_S",
    "MAX_PAUSE_S",
    "MAX_PULLS_OF_APP",
    "LongPull",
    "Pull",
    "PullPeer",
    "PullState",
    "Pulls",
    "is_pull",
    "terms_of",
]

# Of an app, in each worker, that wait or stream at a time.
MAX_PULLS_OF_APP: Final = 32
# Between two questions to control; doubles from one to the other.
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 8.0
# A delivery that is due in less time than this is asked for after it.
_LEAST_PAUSE_S: Final = 0.01
_PATH: Final = re.compile(rb"[^?]*/apps/[^/?]+/webhooks/stream(?:\?|$)").match
_ENDPOINT: Final = re.compile(rb"[?&]endpoint=([^&]*)").search
_LIMIT: Final = FIELDS.index(PULL_LIMIT)
_NOTHING: Final = b'{"deliveries":[]}'


def is_pull(request: ParsedRequest) -> bool:
    """Whether a request waits here for webhooks. Control answers one with a body, which nobody reads, at once."""
    return request.method == b"GET" and not request.flags & HEAD_ONLY and _PATH(request.target) is not None


class PullState(Enum):
    """What the request waits for."""

    ASKING = "control, for deliveries"
    WAITING = "a delivery to be due"
    FULL = "acknowledgements, because it has as many deliveries as it takes"
    UNREAD = "the client, to read"
    OVER = "nothing: it is answered, or its client is gone"


class PullPeer(Protocol):
    """The connection of a request (ingress/stream_requests.py)."""

    @property
    def stream(self) -> Any: ...

    def recognised(self) -> None:
        """The caller has a right credential."""

    def ask(self, pull: Pull) -> None:
        """Send the request to control. `pull` gets the answer, or hears that there is none."""

    def pass_on(self, flags: int, response: bytes) -> None:
        """Control's answer; flags as in http/messages.py."""

    def pass_unanswered(self, sent: bool) -> None:
        """Control doesn't answer; as of control_link.Requester."""

    def reply(self, response: bytes) -> None:
        """The whole answer."""

    def finish(self, last: bytes) -> None:
        """The end of an answer that was written piece by piece. The connection closes."""


class Pull:
    """One request. It ends when its client sends no more."""

    ends_with_client = True

    __slots__ = ("_app", "_heard", "_pause_s", "_peer", "_pulls", "_timer", "_until", "request", "state")

    def __init__(self, pulls: Pulls, peer: PullPeer, request: ParsedRequest) -> None:
        self.state = PullState.ASKING
        self.request = self._limited(request, None)
        self._pulls = pulls
        self._peer = peer
        self._app: AppPulls | None = None
        # The messages about its app, when it asked control.
        self._heard = -1
        # When the client's time is over, on the loop's clock.
        self._until: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None

    @property
    def endpoint(self) -> bytes:
        """The endpoint that it asks for, as in the query; empty for all."""
        match = _ENDPOINT(self.request.target)
        return match[1] if match else b""

    @staticmethod
    def _limited(request: ParsedRequest, limit: int | None) -> ParsedRequest:
        """The request with this limit of our own, or without one."""
        fields = [field for field in request.fields if field[0] != _LIMIT]
        return request._replace(fields=fields if limit is None else [*fields, (_LIMIT, b"%d" % limit)])

    # -- what control says (control_link.Requester) --------------------------------------------------------

    def answered(self, flags: int, response: bytes) -> None:
        raise NotImplementedError

    def unanswered(self, sent: bool) -> None:
        self._finish()
        self._peer.pass_unanswered(sent)

    def _join(self, app_id: str) -> bool:
        """Hear of the app's deliveries, from now on. False: too many do, and the client was told."""
        app = self._pulls.of_app(app_id)
        if len(app.pulls) >= MAX_PULLS_OF_APP:
            text = f"{MAX_PULLS_OF_APP} requests wait for this app's webhooks in this worker, the most that may"
            self._finish()
            self._peer.reply(error_response(429, "too_many_connections", text, "Retry-After: 1\r\n", keep_alive=True))
            return False
        self._app = app
        app.pulls[self] = None
        return True

    # -- asking again --------------------------------------------------------------------------------------

    def ask(self) -> None:
        self._stop_timer()
        self.state = PullState.ASKING
        if self._app is not None:
            self._heard = self._app.messages
        self._peer.ask(self)

    def _ask_again(self, next_s: float) -> None:
        """Nothing was due, and is in `next_s` at the earliest, as far as control knew."""
        assert self._app is not None
        if self._heard != self._app.messages:
            self.ask()
            return
        self._pause(PullState.WAITING, min(self._pause_s, max(next_s, _LEAST_PAUSE_S)))
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _pause(self, state: PullState, seconds: float) -> None:
        """Wait for so long, or until the client's time is over."""
        assert self._until is not None
        self.state = state
        seconds = min(seconds, self._until - self._pulls.now_s())
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._timed)

    def _timed(self) -> None:
        self._timer = None
        if self._until is not None and self._pulls.now_s() >= self._until:
            self.close()
        else:
            self._paused()

    def _paused(self) -> None:
        """A pause has ended."""
        self.ask()

    def ended(self, ids: Collection[str]) -> None:
        """These deliveries were acknowledged."""

    def missed(self) -> None:
        """Deliveries may have been acknowledged while nothing was heard."""

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Its time is over, or the worker drains: end the answer."""
        raise NotImplementedError

    def left(self) -> None:
        """The client is gone. It may have been woken for a delivery: then another request asks."""
        app = self._app if self.state is PullState.ASKING else None
        self._finish()
        if app is not None:
            app.wake(self.endpoint)

    def _finish(self) -> None:
        self.state = PullState.OVER
        self._stop_timer()
        app, self._app = self._app, None
        if app is not None:
            app.pulls.pop(self, None)
            self._pulls.left(app)


class LongPull(Pull):
    """A request with one answer: deliveries, or nothing once the client's time is over."""

    __slots__ = ("_lines",)

    def __init__(self, pulls: Pulls, peer: PullPeer, request: ParsedRequest) -> None:
        super().__init__(pulls, peer, request)
        # Of control's last answer, for an answer of our own.
        self._lines = ""

    def answered(self, flags: int, response: bytes) -> None:
        answer = terms_of(response)
        if answer is None:
            app = self._app
            self._finish()
            self._peer.pass_on(flags, response)
            if app is not None:
                # There may be more than one answer holds.
                app.wake(self.endpoint)
            return
        self._peer.recognised()
        self._lines = Granted.of_response(response).headers
        app_id, terms = answer
        now = self._pulls.now_s()
        if self._until is None:
            self._until = now + terms.wait_s
        if now >= self._until or not self._pulls.admits():
            self.close()
        elif self._app is not None:
            self._ask_again(terms.next_s)
        elif self._join(app_id):
            if terms.limit:
                # For deliveries that came before it heard of them.
                self.ask()
            else:
                # It only shows that a request can wait.
                self._pause(PullState.FULL, terms.wait_s)

    def close(self) -> None:
        if self.state is not PullState.OVER:
            self._finish()
            self._peer.reply(_nothing(self._lines))


class AppPulls:
    """The requests that pull an app's webhooks in this worker (a `Listener` of cluster/listening.py). `messages` counts
    what may have made deliveries due."""

    def __init__(self, app_id: str, topic: bytes) -> None:
        self.app_id = app_id
        self.topic = topic
        self.pulls: dict[Pull, None] = {}
        self.messages = 0
        self._was_lost = False

    def subscribed(self) -> None:
        # What was said before is lost.
        if self._was_lost:
            self._was_lost = False
            for pull in list(self.pulls):
                pull.missed()
        self._may_be_due()

    def pushed(self, payload: bytes) -> None:
        if payload.startswith(Envelope.WEBHOOKS_ENDED):
            ids = parse_webhooks_ended(payload)
            for pull in list(self.pulls):
                pull.ended(ids)
        else:
            self._may_be_due()

    def lost(self) -> None:
        """Nothing is heard until `subscribed`: requests ask now and then."""
        self._was_lost = True

    def _may_be_due(self) -> None:
        self.messages += 1
        for endpoint in {pull.endpoint for pull in self.pulls}:
            self.wake(endpoint)

    def wake(self, endpoint: bytes) -> None:
        """One of the requests that wait for this endpoint asks: the one that asked the longest ago. If it gets
        deliveries, it wakes the next one."""
        for pull in self.pulls:
            if pull.state is PullState.WAITING and pull.endpoint == endpoint:
                self.pulls[pull] = self.pulls.pop(pull)
                pull.ask()
                return


class Pulls:
    """All requests of a worker that pull webhooks. `admits()`: the worker isn't draining. `when_read` is that of
    HttpServer (Streams.serve_by)."""

    when_read: Callable[[Any, Callable[[], None]], None]

    def __init__(self, listening: Listening, admits: Callable[[], bool]) -> None:
        self.admits = admits
        self._listening = listening
        self._apps: dict[str, AppPulls] = {}
        self.now_s = asyncio.get_running_loop().time

    def __len__(self) -> int:
        """How many requests wait or stream."""
        return sum(len(app.pulls) for app in self._apps.values())

    def of_app(self, app_id: str) -> AppPulls:
        """The requests of an app. Its topic is heard from now on."""
        app = self._apps.get(app_id)
        if app is None:
            app = self._apps[app_id] = AppPulls(app_id, self._listening.topic(app_id, PULLS_TOPIC))
            self._listening.add(app)
        return app

    def left(self, app: AppPulls) -> None:
        """A request of this app is over."""
        if not app.pulls and self._apps.get(app.app_id) is app:
            del self._apps[app.app_id]
            self._listening.remove(app)

    def drain(self) -> None:
        """End all but those that ask control, which end with its answer. Their clients ask again elsewhere."""
        for app in list(self._apps.values()):
            for pull in list(app.pulls):
                if pull.state is not PullState.ASKING:
                    pull.close()


def terms_of(response: bytes) -> tuple[str, PullTerms] | None:
    """The app and the terms, if control's answer has them (control/api/pulls.py). None: it is for the client."""
    head = response.partition(b"\r\n\r\n")[0].decode("latin-1")
    fields = dict(line.partition(": ")[::2] for line in head.split("\r\n")[1:])
    return (fields[STREAM_APP], PullTerms.unpack(fields[PULL_TERMS])) if PULL_TERMS in fields else None


def _nothing(lines: str) -> bytes:
    """The answer without deliveries. `lines` are more header lines, each with its CRLF."""
    head = (
        f"HTTP/1.1 200 OK\r\nDate: {http_date(int(time.time()))}\r\nContent-Type: application/json\r\n"
        f"Cache-Control: no-store\r\nContent-Length: {len(_NOTHING)}\r\n{lines}\r\n"
    )
    return head.encode() + _NOTHING
