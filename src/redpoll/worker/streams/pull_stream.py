"""A pull whose client gets a stream of events, one for each delivery.

Of all that is handed out here, at most `limit` deliveries are neither acknowledged nor back in the queue. So a client
gets as many as it can work on, and a lease doesn't run out while the delivery waits for the ones before it. Control
planes tell which deliveries were acknowledged. After a break of the link to Redis the stream counts from zero, as a new
one would; a message that is lost otherwise costs a place until the lease ends. A client that doesn't read gets no
further deliveries.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import msgspec

from redpoll.http.messages import HTTP_1_0
from redpoll.loop.writable import WRITABLE_BELOW_BYTES
from redpoll.protocol.errors import ApiError
from redpoll.protocol.streams import Live
from redpoll.worker.streams.answers import Granted, error_answer, stream_head
from redpoll.worker.streams.formats import KEEP_ALIVE_S, Form, event_text, lifetime_s
from redpoll.worker.streams.pulls import FIRST_PAUSE_S, MAX_PAUSE_S, Pull, PullPeer, Pulls, PullState, terms_of

if TYPE_CHECKING:
    from redpoll.http.messages import PullTerms
    from redpoll.http.reader import ParsedRequest

__all__ = ["PullStream"]

_EVENT: Final = b"delivery"


class _Answer(msgspec.Struct, gc=False):
    """Control's answer, with each delivery as it is."""

    deliveries: list[msgspec.Raw]


class _Delivery(msgspec.Struct, gc=False):
    id: str


_decode_answer: Final = msgspec.json.Decoder(_Answer).decode
_decode_delivery: Final = msgspec.json.Decoder(_Delivery).decode


class PullStream(Pull):
    """A request whose answer is a stream. Its first question takes nothing: it asks whether the client may pull."""

    __slots__ = ("_form", "_lease_s", "_leased", "_limit", "_written_at")

    def __init__(self, pulls: Pulls, peer: PullPeer, request: ParsedRequest) -> None:
        super().__init__(pulls, peer, request)
        self.request = self._limited(self.request, 0)
        self._form: Form | None = None
        self._limit = 0
        self._lease_s = 0.0
        # The deliveries that the client has: when their leases end, by id, in this order.
        self._leased: dict[str, float] = {}
        self._written_at = 0.0

    # -- what control says ---------------------------------------------------------------------------------

    def answered(self, flags: int, response: bytes) -> None:
        answer = terms_of(response)
        if answer is None:
            if self._form is None:
                self._finish()
                self._peer.pass_on(flags, response)
            else:
                # The client learns the error when it asks again.
                self.close()
            return
        app_id, terms = answer
        if self._form is None:
            self._peer.recognised()
            self._begin(app_id, terms, response)
        else:
            self._take(terms, response)

    def unanswered(self, sent: bool) -> None:
        if self._form is None:
            super().unanswered(sent)
        else:
            self.close()

    def _begin(self, app_id: str, terms: PullTerms, response: bytes) -> None:
        if not self._pulls.admits():
            self.close()
        elif self._join(app_id):
            self._limit, self._lease_s = terms.limit, terms.lease_s
            self._until = self._pulls.now_s() + lifetime_s()
            chunked = not self.request.flags & HTTP_1_0
            self._form = form = Form(Live.EVENT_SOURCE, False, chunked)
            self._write(stream_head(Granted.of_response(response), chunked) + form.opening())
            self._go_on()

    def _take(self, terms: PullTerms, response: bytes) -> None:
        """The answer to a question for deliveries."""
        assert self._form is not None
        events = []
        now = self._pulls.now_s()
        for raw in _decode_answer(response.partition(b"\r\n\r\n")[2]).deliveries:
            delivery_id = _decode_delivery(raw).id
            # If it has an older lease, that has ended.
            self._leased.pop(delivery_id, None)
            self._leased[delivery_id] = now + self._lease_s
            events.append(event_text(delivery_id, _EVENT, bytes(raw)))
        if not events:
            self._go_on(terms.next_s)
            return
        self._pause_s = FIRST_PAUSE_S
        app = self._app
        self._write(self._form.events(events))
        self._go_on()
        if app is not None:
            # There may be more than this client takes.
            app.wake(self.endpoint)

    # -- the next step -------------------------------------------------------------------------------------

    def _go_on(self, next_s: float | None = None) -> None:
        """Ask control, or wait for what must come first. `next_s`: nothing was due, as of `_ask_again`."""
        assert self._until is not None
        now = self._pulls.now_s()
        while self._leased and (first := next(iter(self._leased.items())))[1] <= now:
            del self._leased[first[0]]
        room = self._limit - len(self._leased)
        if now >= self._until or not self._pulls.admits():
            self.close()
        elif self._peer.stream.unsent_bytes >= WRITABLE_BELOW_BYTES:
            self._pause(PullState.UNREAD, MAX_PAUSE_S)
            self._pulls.when_read(self._peer.stream, self._client_has_read)
        elif room <= 0:
            first_s = next(iter(self._leased.values()), self._until) - now
            self._pause(PullState.FULL, min(first_s, MAX_PAUSE_S))
        elif next_s is not None:
            self._ask_again(next_s)
        else:
            self.ask()

    def ask(self) -> None:
        self.request = self._limited(self.request, 0 if self._form is None else self._limit - len(self._leased))
        super().ask()

    def ended(self, ids: Collection[str]) -> None:
        for delivery_id in ids:
            self._leased.pop(delivery_id, None)
        if self.state is PullState.FULL and len(self._leased) < self._limit:
            self._go_on()

    def missed(self) -> None:
        self._leased.clear()
        if self.state is PullState.FULL:
            self._go_on()

    def _client_has_read(self) -> None:
        if self.state is PullState.UNREAD:
            self._go_on()

    def _paused(self) -> None:
        if self.state is PullState.UNREAD:
            self._pause(PullState.UNREAD, MAX_PAUSE_S)
            return
        if self._form is not None and self._pulls.now_s() >= self._written_at + KEEP_ALIVE_S:
            self._write(self._form.keep_alive())
        self._go_on()

    def _write(self, data: bytes) -> None:
        self._written_at = self._pulls.now_s()
        self._peer.stream.write_http(data)

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self.state is PullState.OVER:
            return
        self._finish()
        if self._form is None:
            self._peer.reply(error_answer(ApiError("unavailable", "the server is draining; ask again")))
        else:
            self._peer.finish(self._form.closing())
