"""One request to read a channel, from control's answer to the last byte.

A reader asks control whether it may read, reads what is stored, page by page, and then waits at the channel's tail
(tail.py). It answers through its HTTP connection, its `Peer`. A client that reads slowly gets no further page until it
has read (loop/writable.py); at the tail, the fan-out closes it at `max_unsent_bytes`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from redpoll._fanout import Sink
from redpoll.cluster.history import MAX_PAGE_ROWS, Page
from redpoll.http.errors import closing
from redpoll.http.messages import HEAD_ONLY, HTTP_1_0
from redpoll.loop.writable import WRITABLE_BELOW_BYTES
from redpoll.protocol.errors import ApiError, Code
from redpoll.protocol.history import MAX_OFFSET
from redpoll.protocol.streams import Live, Reading, has_ended_since, token_of
from redpoll.worker.streams.answers import (
    Granted,
    batch_answer,
    come_again,
    error_answer,
    metadata,
    secured,
    stream_head,
)
from redpoll.worker.streams.asked import Asked
from redpoll.worker.streams.formats import Batch, Form, Message, form_of
from redpoll.worker.streams.owner import Owner, Peer
from redpoll.worker.streams.tail import Tail, messages_of

if TYPE_CHECKING:
    from redpoll.protocol.apps import App, HistoryRule
    from redpoll.protocol.grants import Grant
    from redpoll.protocol.handshake import Refusal

__all__ = ["Reader", "ReaderState"]

# Of one answer that isn't a stream; a single message may be larger.
_MAX_MESSAGES: Final = 1_000
_MAX_BYTES: Final = 512 * 1024
_GONE: Final = (
    "this position is no longer stored, or is of an earlier history: messages after it are missing. Read again from "
    "offset=-1, or from now"
)


class ReaderState(Enum):
    """What the reader waits for."""

    ASKING = "control, whether it may read"
    ADMITTING = "a place among the app's connections"
    READING = "a page of the history"
    UNREAD = "the client, to read"
    AT_TAIL = "the next message"
    OVER = "nothing: it is answered, or its client is gone"


class Reader:
    """A request of `peer` to read a channel. `form`: how its stream is written; None while it has none. `grant` is what
    lets it read; None: another credential does."""

    __slots__ = (
        "_app",
        "_asked",
        "_at",
        "_begin",
        "_counted",
        "_epoch",
        "_granted",
        "_messages",
        "_peer",
        "_reading",
        "_size",
        "_slot",
        "_streams",
        "_tail",
        "form",
        "grant",
        "state",
    )

    def __init__(self, streams: Owner, peer: Peer, asked: Asked) -> None:
        self.state = ReaderState.ASKING
        self.form: Form | None = None
        self.grant: Grant | None = None
        self._streams = streams
        self._peer = peer
        self._asked = asked
        self._app: App | None = None
        self._granted: Granted | None = None
        self._reading: Reading | None = None
        self._tail: Tail | None = None
        # The position up to which it has read, and the token of where the answer begins.
        self._epoch = ""
        self._at = 0
        self._begin = ""
        # What the answer has so far, and its bytes.
        self._messages: list[Message] = []
        self._size = 0
        # It counts among the app's connections, and in this slot of its address.
        self._counted = False
        self._slot = 0

    def __repr__(self) -> str:
        return f"<Reader of {self.channel or 'a channel'}: {self.state.value}, at {self._at}>"

    @property
    def stream(self) -> Sink:
        """The connection's bytes."""
        sink: Sink = self._peer.stream
        return sink

    @property
    def app_id(self) -> str:
        return "" if self._granted is None else self._granted.app_id

    @property
    def channel(self) -> str:
        return "" if self._granted is None else self._granted.channel

    @property
    def live(self) -> Live:
        return Live.NO if self._reading is None else self._reading.live

    # -- what control says (control_link.Requester) --------------------------------------------------------

    def answered(self, flags: int, response: bytes) -> None:
        if not response.startswith(b"HTTP/1.1 200 "):
            if response.startswith(b"HTTP/1.1 503 ") and self._asks_again():
                return
            self._finish()
            self._peer.pass_on(flags, secured(response))
            return
        self._peer.recognised()
        try:
            self._granted = Granted.of_response(response)
            self._reading = self._asked.reading()
            self._app, _ = self._readable()
            self.grant = self._asked.grant_of(self._app, self._streams.grants.of(self.app_id), self.channel)
            if self.grant is not None:
                self._streams.carries_grant(self)
            self._streams.requests[self.live] += 1
            if self._asked.is_head or self.live is Live.NO:
                self._read_first()
            else:
                self._enter()
        except ApiError as error:
            self._refuse(error)

    def unanswered(self, sent: bool) -> None:
        if self._asks_again():
            return
        self._finish()
        self._peer.pass_unanswered(sent)

    def _readable(self) -> tuple[App, HistoryRule]:
        """The app and the rule that stores the channel, as this worker knows them. Raises ApiError."""
        app = self._streams.apps.get(self.app_id)
        if app is None:
            raise ApiError("unavailable", "this server doesn't know the app yet; send the request again")
        rule = app.history_rule(self.channel)
        if not app.enabled:
            raise ApiError("app_disabled", "this app is disabled")
        if rule is None:
            raise ApiError("no_history", "the channel has no history; add a rule with redpoll history rule add")
        return app, rule

    def _enter(self) -> None:
        """Count the connection, as a WebSocket is counted, and then read. Raises ApiError."""
        streams = self._streams
        assert self._app is not None
        streams.check_admits()
        slot = streams.addresses.enter(self._peer.peer, self._asked.forwarding(), named=streams.named_by_proxy)
        if slot is None:
            raise ApiError("too_many_connections", "your address has as many connections as this server allows")
        self._slot = slot
        if streams.admission.admits_at_once(self._app):
            self._admitted(None)
        else:
            self.state = ReaderState.ADMITTING
            streams.admission.ask(self._peer.stream, self._app, self._admitted)

    def _admitted(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            code = "too_many_connections" if refusal.code == Code.OVER_QUOTA else "unavailable"
            self._refuse(ApiError(code, refusal.message))
            return
        self._counted = True
        if self.state is ReaderState.OVER:
            self._finish()
            return
        try:
            # The app may have changed meanwhile.
            self._readable()
        except ApiError as error:
            self._refuse(error)
            return
        self._streams.entered(self)
        self._tail = self._streams.tail_of(self.app_id, self.channel)
        self._tail.readers[self] = None
        if not self._read_from_memory():
            self._read_first()

    # -- reading -------------------------------------------------------------------------------------------

    def _read_first(self) -> None:
        assert self._reading is not None
        start = self._reading.start
        if self._asked.is_head or start.now:
            # Nothing is after this: the page says only what the last offset is.
            self._read(MAX_OFFSET)
        else:
            self._read(start.offset)

    def _read(self, since: int) -> None:
        self.state = ReaderState.READING
        done = partial(self._page_read, since)
        self._streams.history.page(self.app_id, self.channel, since, MAX_PAGE_ROWS, done)

    def read_on(self) -> None:
        """The tail can be joined now, or soon: read what came meanwhile."""
        if self.state is not ReaderState.OVER:
            if self._epoch:
                self._read(self._at)
            else:
                self._read_first()

    def _read_from_memory(self) -> bool:
        """Begin at the tail, if it has all that the client lacks. False: read pages."""
        assert self._reading is not None
        assert self._tail is not None
        start, tail = self._reading.start, self._tail
        epoch, offset = (tail.epoch, tail.last) if start.now else (start.epoch or "", start.offset)
        messages = tail.after(epoch, offset) if epoch else None
        if messages is None:
            return False
        self._epoch, self._at, self._begin = epoch, offset, token_of(epoch, offset)
        self._take(messages, True, tail.ended)
        return True

    def _page_read(self, since: int, page: Any) -> None:
        if self.state is not ReaderState.READING:
            return
        try:
            if not isinstance(page, Page):
                raise ApiError("unavailable", f"Redis doesn't answer: {page}")
            if not page.epoch:
                self._begin_history()
            elif not self._epoch and not self._place(page, since):
                return
            else:
                rows = [row for row in page.rows if row.offset > self._at]
                if (rows[0].prev if rows else page.top) != self._at or page.epoch != self._epoch:
                    raise ApiError("offset_gone", _GONE)
                if not rows:
                    self._streams.at_end(self.app_id, self.channel, (page.epoch, page.top), page.top == page.base)
                self._take(messages_of(rows), not page.more, page.ended)
        except ApiError as error:
            self._refuse(error)

    def _place(self, page: Page, since: int) -> bool:
        """Find where to begin by the first page. False: another page is read first. Raises ApiError."""
        assert self._reading is not None
        start = self._reading.start
        if has_ended_since(start, page.epoch) and not self._asked.is_head:
            raise ApiError("offset_gone", _GONE)
        at = start.offset
        if self._asked.is_head or start.now:
            at = page.top
        elif start.epoch is None:
            # Messages of an earlier epoch, which a changed rule ended, aren't of this stream.
            rows = [row for row in page.rows if row.offset > page.base]
            if not rows and page.more and since < page.base:
                self._read(page.base)
                return False
            at = rows[0].prev if rows else page.top
        self._epoch, self._at, self._begin = page.epoch, at, token_of(page.epoch, at)
        return True

    def _begin_history(self) -> None:
        """Nothing was ever published: a history begins, so that there is a position. Raises ApiError."""
        assert self._reading is not None
        if self._epoch or self._reading.start.epoch is not None:
            raise ApiError("offset_gone", _GONE)
        app, rule = self._readable()
        self._streams.history.begin(app, self.channel, rule, self._begun)

    def _begun(self, outcome: Any) -> None:
        if self.state is not ReaderState.READING:
            return
        if isinstance(outcome, tuple):
            # Something may have been published meanwhile.
            self._read_first()
        elif outcome is None:
            text = "the app has as many channels with history as it may (max_history_channels)"
            self._refuse(ApiError("unavailable", text))
        else:
            self._refuse(ApiError("unavailable", f"Redis doesn't answer: {outcome}"))

    # -- messages ------------------------------------------------------------------------------------------

    def _take(self, messages: Sequence[Message], up_to_date: bool, ended: bool) -> None:
        """The next messages. `up_to_date`: there were no further ones a moment ago; `ended`: there never will be."""
        assert self._reading is not None
        if messages:
            self._at = messages[-1].offset
        ended = ended and up_to_date
        if self.live.is_stream and not self._asked.is_head:
            self._write(Batch(self._epoch, messages, self._at, up_to_date, ended))
            return
        self._messages += messages
        self._size += sum(len(message.data) for message in messages)
        if not up_to_date and len(self._messages) < _MAX_MESSAGES and self._size < _MAX_BYTES:
            self._read(self._at)
        elif self.live is Live.LONG_POLL and not (self._messages or ended or self._asked.is_head):
            self._join()
        else:
            self.answer(Batch(self._epoch, self._messages, self._at, up_to_date, ended))

    def answer(self, batch: Batch) -> None:
        """All of the answer, if it isn't a stream."""
        assert self._reading is not None
        assert self._granted is not None
        if self._asked.is_head:
            response = metadata(batch, self._granted)
        else:
            response = batch_answer(batch, self._begin, self._reading, self._granted, self._asked.known_etag)
        self._respond(response)

    def _write(self, batch: Batch) -> None:
        """The next part of a stream: stored messages, or, at first, perhaps none."""
        assert self._reading is not None
        assert self._granted is not None
        peer, form = self._peer, self.form
        if form is None:
            if batch.ended and not batch.messages and self.live is Live.EVENT_SOURCE:
                # An EventSource doesn't connect again after this.
                self.answer(batch)
                return
            chunked = not self._asked.flags & HTTP_1_0
            form = self.form = form_of(self._reading, chunked, time.time())
            peer.stream.write_http(stream_head(self._granted, chunked) + form.opening())
        peer.stream.write_http(form.written(batch, time.time()))
        if batch.ended:
            self.close()
        elif peer.stream.unsent_bytes >= WRITABLE_BELOW_BYTES:
            self.state = ReaderState.UNREAD
            self._streams.when_read(peer.stream, self._client_has_read)
        elif batch.up_to_date:
            self._join()
        else:
            self._read(self._at)

    def _client_has_read(self) -> None:
        if self.state is ReaderState.UNREAD:
            self._read(self._at)

    def _join(self) -> None:
        self.state = ReaderState.AT_TAIL
        assert self._tail is not None
        self._tail.join(self, self._epoch, self._at, self.form)

    # -- the end -------------------------------------------------------------------------------------------

    @property
    def is_timed(self) -> bool:
        """It reads live, so its time has begun (Streams.entered). Before that, a deadline is one of the connection's,
        and control or Redis will still answer."""
        return self._tail is not None

    def late(self) -> None:
        """Its time is over (Streams.entered)."""
        if self.grant is not None and self.grant.time_fault(self._streams.grants.clock()) is not None:
            self.end(ApiError("unauthorized", "the grant has expired"))
        elif self.form is not None or self.state is not ReaderState.AT_TAIL:
            self.close()
        elif self._tail is not None and self._tail.after(self._epoch, self._at) == []:
            self.answer(Batch(self._epoch, [], self._at, True))
        else:
            self._refuse(ApiError("unavailable", "this server can't say whether there are messages; ask again"))

    def close(self) -> None:
        """End now: the client continues where it is, perhaps at another server."""
        self._refuse(ApiError("unavailable", "the server is draining, or Redis doesn't answer; ask again"))

    def end(self, error: ApiError) -> None:
        """End now: the client may not read on."""
        self._refuse(error, b"" if self.form is None else self.form.failure(error))

    def dismiss(self) -> None:
        """The channel's history was cleared or lost, or the channel has ended, which the client knows."""
        self._refuse(ApiError("offset_gone", _GONE))

    # Its connection closes when its client sends no more (held_requests.Waiting): a client that reads leaves so.
    ends_with_client = True

    def left(self) -> None:
        """The client is gone."""
        self._finish()

    def _refuse(self, error: ApiError, last: bytes = b"") -> None:
        """The answer, or a stream's end after `last`: its client learns the error when it asks again."""
        if self.state is ReaderState.OVER:
            return
        if self.form is not None:
            self._finish()
            self._peer.finish(last + self.form.closing())
        elif error.status != 503 or not self._asks_again():
            self._respond(error_answer(error, self._granted))

    def _asks_again(self) -> bool:
        """There is a temporary error, after which an EventSource is to ask again. False: others get the error."""
        if not self._asked.is_event_source:
            return False
        self._finish()
        self._peer.finish(come_again())
        return True

    def _respond(self, response: bytes) -> None:
        self._finish()
        if self._asked.is_head:
            response = response[: response.index(b"\r\n\r\n") + 4]
        if self._asked.flags & HEAD_ONLY:
            # What comes next is a body that nobody reads.
            self._peer.finish(closing(response))
        else:
            self._peer.reply(response)

    def _finish(self) -> None:
        """Release what it holds. Idempotent."""
        if self.state is ReaderState.ADMITTING:
            # The next request of this connection may ask for a place, too.
            self._streams.admission.withdraw(self._peer.stream)
        self.state = ReaderState.OVER
        if self._tail is not None:
            self._tail.leave(self)
            self._tail = None
        self._streams.addresses.leave(self._slot)
        self._slot = 0
        if self._counted:
            self._counted = False
            self._streams.admission.give_back(self.app_id)
        self._streams.left(self)
