"""The end of one channel's stream: what is published reaches all its readers from here.

A tail hears the channel's topic (cluster/listening.py) and knows its position. Each stored event names the offset of
the event before it; where the chain breaks, and after each break of the connection to Redis, the tail reads the pages
that it missed. One connection brings pages and events in Redis' order, so nothing is missed or repeated. If that isn't
possible, because the history was cleared or lost, all readers end: when they come again, they learn it (410).

A reader reads what is stored by itself (reader.py) and joins the tail at the moment when both are at the same position.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol

import structlog

from redpoll import _frame
from redpoll._fanout import Audience, Flusher, Sink
from redpoll.cluster.envelopes import Envelope, parse_ended
from redpoll.cluster.history import MAX_PAGE_ROWS, History, Page, Row
from redpoll.cluster.redis.link import LinkDown
from redpoll.worker.streams.formats import Batch, Form, Message, message_of

__all__ = ["Follower", "Tail", "TailState", "messages_of"]

log = structlog.get_logger()

_EVENT: Final = ord(Envelope.EVENT)
_CLEARED: Final = ord(Envelope.HISTORY_CLEARED)
_ENDED: Final = ord(Envelope.HISTORY_ENDED)
# When a page is asked for again after an error of Redis.
_RETRY_S: Final = 0.5
# The last messages, for readers who come again: most of them are at the end, or a few messages behind.
_MAX_RECENT: Final = 64
_MAX_RECENT_BYTES: Final = 64 * 1024


class Follower(Protocol):
    """A reader, as its tail sees it (reader.py). `form`: how its stream is written; None while it has none."""

    form: Form | None

    @property
    def stream(self) -> Sink: ...
    def answer(self, batch: Batch) -> None:
        """What it waited for; it is over then."""

    def read_on(self) -> None:
        """Read pages, from where it is, and join again."""

    def dismiss(self) -> None:
        """End: the position means nothing any more, or the channel has ended."""


class TailState(Enum):
    """What the tail waits for."""

    AWAY = "Redis, to subscribe the topic"
    UNPLACED = "a reader, to learn the position"
    CATCHING_UP = "a page of the history"
    LIVE = "events"


class Tail:
    """The tail of one channel. `epoch` and `last` are its position, while it is CATCHING_UP or LIVE. `readers` are all
    who read the channel live; `idle_since`: since when there is none, by the loop's time.

    `sent(app_id, count)` is called with the number of readers that got messages, times their number; `dismiss(reader)`
    has a reader end, later: there may be thousands.
    """

    def __init__(
        self,
        app_id: str,
        channel: str,
        topic: bytes,
        history: History,
        flusher: Flusher,
        sent: Callable[[str, int], None],
        dismiss: Callable[[Follower], None],
    ) -> None:
        self.app_id = app_id
        self.channel = channel
        self.topic = topic
        self.state = TailState.AWAY
        self.epoch = ""
        self.last = 0
        self.ended = False
        self.readers: dict[Follower, None] = {}
        self.idle_since = 0.0
        # Where a history begins in which nothing was published, as far as pages have shown one.
        self.unpublished: tuple[str, int] | None = None
        # When all streams got something the last time, by the loop's time.
        self._written_at = asyncio.get_running_loop().time()
        # Those of them who have joined, and get a stream or one answer; those who can't join yet.
        self._streaming: dict[Follower, None] = {}
        self._polls: dict[Follower, None] = {}
        self._waiting: dict[Follower, None] = {}
        # Those who may have asked for their page before the topic was subscribed.
        self._early: set[Follower] = set()
        self._forms: dict[Form, Audience] = {}
        self._recent: deque[Message] = deque()
        self._recent_bytes = 0
        self._history = history
        self._flusher = flusher
        self._sent = sent
        self._dismiss_later = dismiss

    def __repr__(self) -> str:
        return f"<Tail of {self.channel}: {self.state.value}, {len(self.readers)} readers, at {self.last}>"

    @property
    def is_unpublished(self) -> bool:
        """Nothing was published since the history began."""
        return self.state is TailState.LIVE and self.unpublished == (self.epoch, self.last)

    # -- readers -------------------------------------------------------------------------------------------

    def after(self, epoch: str, offset: int) -> list[Message] | None:
        """The messages after this position, if the tail is live and remembers all of them."""
        if self.state is not TailState.LIVE or epoch != self.epoch:
            return None
        if offset == self.last:
            return []
        if not self._recent or offset < self._recent[0].prev:
            return None
        missed = [message for message in self._recent if message.offset > offset]
        return missed if missed and missed[0].prev == offset else None

    def join(self, reader: Follower, epoch: str, at: int, form: Form | None) -> None:
        """A reader has everything up to `at`, by the last page, whose reply has just come, or by `after`. With a `form`
        it gets a stream, else one answer. If the tail isn't there yet, the reader reads again later
        (`read_on`)."""
        if self.state is TailState.UNPLACED and reader in self._early:
            # What was published between the page and the subscription is in neither.
            self._early.discard(reader)
            self._waiting[reader] = None
            self._resume_waiting()
            return
        if self.state is TailState.UNPLACED:
            self.state, self.epoch, self.last, self.ended = TailState.LIVE, epoch, at, False
            self._forget_recent()
            self._resume_waiting()
        if self.state is TailState.LIVE and (self.epoch, self.last) == (epoch, at):
            if form is None:
                self._polls[reader] = None
            else:
                self._streaming[reader] = None
                self._audience(form).add(reader.stream)
            return
        self._waiting[reader] = None
        if self.state is TailState.LIVE:
            # The page has more than this worker heard of, or a reader comes from another epoch.
            self._catch_up()

    def leave(self, reader: Follower) -> None:
        """The reader is over. Idempotent."""
        self.readers.pop(reader, None)
        self._polls.pop(reader, None)
        self._waiting.pop(reader, None)
        self._early.discard(reader)
        self._streaming.pop(reader, None)
        form = reader.form
        if form is not None and form in self._forms:
            self._forms[form].discard(reader.stream)
            if not len(self._forms[form]):
                del self._forms[form]
        if not self.readers:
            self.idle_since = asyncio.get_running_loop().time()

    def keep_alive(self, quiet_s: float) -> None:
        """Write a comment to the streams if nothing was written for this long."""
        now = asyncio.get_running_loop().time()
        if now - self._written_at >= quiet_s:
            self._written_at = now
            for form, audience in self._forms.items():
                audience.post(form.keep_alive())

    def _audience(self, form: Form) -> Audience:
        audience = self._forms.get(form)
        if audience is None:
            audience = self._forms[form] = Audience(self._flusher)
        return audience

    # -- what Redis says (cluster/listening.py) ------------------------------------------------------------

    def subscribed(self) -> None:
        if self.state is not TailState.AWAY:
            return
        if self.epoch and self.readers:
            self._catch_up()
        else:
            self._early = self.readers.keys() - self._waiting.keys()
            self._unplace()

    def lost(self) -> None:
        self.state = TailState.AWAY

    def pushed(self, payload: bytes) -> None:
        if self.state is not TailState.LIVE:
            # A page has it, or will have it.
            return
        letter = payload[0]
        if letter == _EVENT:
            offset, prev = _frame.offsets(payload)
            # Events without an offset aren't stored, so they aren't in the stream.
            if offset <= self.last:
                return
            if prev == self.last:
                self._deliver([message_of(payload)], True)
            else:
                self._catch_up()
        elif letter == _CLEARED:
            self._lose()
        elif letter == _ENDED and parse_ended(payload) == self.last:
            self._end()

    # -- messages ------------------------------------------------------------------------------------------

    def _deliver(self, messages: list[Message], up_to_date: bool, ended: bool = False) -> None:
        """Send messages that follow `last`."""
        if messages:
            self.last = messages[-1].offset
            self._remember(messages)
        batch = Batch(self.epoch, messages, self.last, up_to_date, ended)
        self._written_at = asyncio.get_running_loop().time()
        now_s = time.time()
        readers = len(self._polls)
        for form, audience in self._forms.items():
            readers += audience.post(form.written(batch, now_s))
        polls, self._polls = self._polls, {}
        for reader in polls:
            reader.answer(batch)
        if messages and readers:
            self._sent(self.app_id, len(messages) * readers)

    def _end(self) -> None:
        """An event has ended the channel, and all readers have it."""
        self.ended = True
        self._deliver([], True, ended=True)
        self._dismiss()

    def _lose(self) -> None:
        """The readers' position means nothing any more."""
        self._unplace()
        self._dismiss()

    def _dismiss(self) -> None:
        """End those who have joined; the others find out by the pages that they read."""
        for audience in self._forms.values():
            audience.finish_posts()
        # Those that haven't ended yet get nothing more.
        self._forms = {}
        for reader in (*self._streaming, *self._polls):
            self._dismiss_later(reader)
        self._streaming, self._polls = {}, {}

    def _unplace(self) -> None:
        self.state, self.epoch, self.ended = TailState.UNPLACED, "", False
        self._forget_recent()
        self._resume_waiting()

    def _resume_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        loop = asyncio.get_running_loop()
        for reader in waiting:
            loop.call_soon(reader.read_on)

    def _remember(self, messages: list[Message]) -> None:
        recent = self._recent
        recent.extend(messages)
        self._recent_bytes += sum(len(message.data) for message in messages)
        while recent and (len(recent) > _MAX_RECENT or self._recent_bytes > _MAX_RECENT_BYTES):
            self._recent_bytes -= len(recent.popleft().data)

    def _forget_recent(self) -> None:
        self._recent.clear()
        self._recent_bytes = 0

    # -- pages ---------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        self.state = TailState.CATCHING_UP
        self._read()

    def _read(self) -> None:
        # Only the page that was asked for last, at the present position, counts.
        asked = (self.epoch, self.last)
        self._history.page(self.app_id, self.channel, self.last, MAX_PAGE_ROWS, partial(self._page_read, asked))

    def _page_read(self, asked: tuple[str, int], outcome: Any) -> None:
        if self.state is not TailState.CATCHING_UP or (self.epoch, self.last) != asked or isinstance(outcome, LinkDown):
            return
        if not isinstance(outcome, Page):
            log.warning("history read failed", app=self.app_id, channel=self.channel, reason=str(outcome))
            asyncio.get_running_loop().call_later(_RETRY_S, self._retry, asked)
        elif not outcome.follows(self.epoch, self.last):
            self._lose()
        else:
            messages = messages_of(outcome.rows)
            if not outcome.more:
                self.state = TailState.LIVE
            if messages:
                self._deliver(messages, not outcome.more)
            if outcome.more:
                self._read()
                return
            if outcome.ended:
                self._end()
            self._resume_waiting()

    def _retry(self, asked: tuple[str, int]) -> None:
        if self.state is TailState.CATCHING_UP and (self.epoch, self.last) == asked:
            self._read()


def messages_of(rows: list[Row]) -> list[Message]:
    return [message_of(row.envelope()) for row in rows]
