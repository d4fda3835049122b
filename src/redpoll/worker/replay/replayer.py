"""Sends subscribers the earlier messages of a channel, page by page, before live events.

A replay starts because the channel's history rule says so, because the client asks for it (`rewind`, `since`), or
because its user was connected a moment ago (`user_resume.py`). The replays of a channel share pages
(`shared_pages.py`). A connection that reads slowly waits (`waiting.py`) and delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from redpoll import _frame
from redpoll.cluster.history import MAX_PAGE_ROWS, History
from redpoll.loop.writable import WRITABLE_BELOW_BYTES, WritableSignal
from redpoll.protocol.effects import Effect
from redpoll.protocol.history import MAX_STORED_MESSAGES, Rewind
from redpoll.worker.replay.cached_events import CachedEvents
from redpoll.worker.replay.locating import Locating
from redpoll.worker.replay.page_frames import PageFrames
from redpoll.worker.replay.replay import (
    MAX_OFFSET,
    Answer,
    HistoryReaders,
    Kind,
    Replay,
    State,
    Wants,
    position_frame,
)
from redpoll.worker.replay.shared_pages import SharedPages, log_failure
from redpoll.worker.replay.waiting import WaitingReplays

if TYPE_CHECKING:
    from redpoll.cluster.membership.join import Join
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.worker.hub.channel import Channel
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.replay.user_resume import UserResume

__all__ = ["Replayer"]

# Messages that a replay may need beyond all that are stored. After that the publisher is faster than the client, and
# the replay gives up.
_MAX_EXTRA_ROWS: Final = 8 * MAX_PAGE_ROWS

_NOTHING = Wants(None, False)


class Replayer:
    """All replays of a worker. `begun`, `replayed`, the messages sent by them, and `positions_sent`, the notices
    that messages are missing or the history is another one, are for /metrics.

    `perform` carries out a session's effects (`Hub.perform`).
    """

    def __init__(
        self,
        history: History,
        perform: Callable[[Connection, Sequence[Effect]], None],
        user_resume: UserResume,
        writable: WritableSignal,
    ) -> None:
        self.begun = 0
        self.replayed = 0
        self.positions_sent = 0
        self._perform = perform
        self._user_resume = user_resume
        self._waiting = WaitingReplays(writable, self._go_on)
        self.pages = SharedPages(history, self._waiting, self._serve, self._end_all)
        self._locating = Locating(history)
        self._cached_events = CachedEvents(history, self._wait_for_page, self._waiting.wait_retry)

    @property
    def waiting(self) -> int:
        """Replays that wait for their client to read, or for a retry."""
        return len(self._waiting)

    # -- how a replay begins -------------------------------------------------------------------------------

    def attach(
        self, local_channel: LocalChannel, join: Join, cached: bytes | None, total: int | None, success: bytes
    ) -> None:
        """Answer a subscriber of a channel with history, or one that asked for earlier messages.

        It is among the live subscribers afterwards, or has a replay. `success` is the frame for connections that don't
        recover; `cached` and `total` as in `Hub.joined`.
        """
        connection: Connection = join.owner
        rewind, recovers = join.wants or _NOTHING
        # A client that names an offset can handle offsets, whatever else it says.
        continues = rewind is not None and rewind.epoch is not None
        kind = Kind.CONTINUING if continues else Kind.RECOVERING if recovers else Kind.STOCK
        now = asyncio.get_running_loop().time()
        replay = Replay(local_channel, connection, now, kind, Answer(success, total))
        replay.cached = cached
        channel: Channel = local_channel.audience
        if channel.readers is not None:
            # Those that wait for other replays were sent before this subscribe.
            replay.next_unstored = len(channel.readers.unstored)
        if local_channel.history is None:
            self._attach_live(replay, recovered=False)
        elif rewind is not None and rewind.epoch is not None:
            self._continue_from(replay, rewind.epoch, rewind.offset)
        else:
            self._look_back(replay, rewind)

    def _attach_live(self, replay: Replay, recovered: bool) -> None:
        self._send_answer(replay, _last_offset(replay.local_channel), recovered)
        self._join_live(replay)
        self._joined(replay)

    def _continue_from(self, replay: Replay, epoch: str, offset: int) -> None:
        history = replay.local_channel.history
        assert history is not None
        if epoch != history.epoch or (offset > history.last and history.live):
            self._attach_live(replay, recovered=False)
            return
        if offset == history.last:
            if replay.cached:
                # The client has it already.
                replay.cached = None
            self._attach_live(replay, recovered=True)
        else:
            # The offset may be beyond the channel's: another worker sent it, and this one still catches up.
            replay.at, replay.exact = offset, True
            self._open(replay)
            self._wait_for_page(replay)

    def _look_back(self, replay: Replay, rewind: Rewind | None) -> None:
        rule = replay.local_channel.rule
        if rewind is not None:
            replay.look_back = rewind.count, rewind.seconds
        elif rule is not None:
            replay.look_back = rule.replay, rule.replay_seconds
        # Clients that recover need no user resume: they name the offset themselves.
        stock_without_rewind = rewind is None and replay.kind is Kind.STOCK
        returned = self._user_resume.returned(replay.connection) if stock_without_rewind else None
        locates = any(replay.look_back)
        if returned is None and not locates:
            self._note_offset(replay, _last_offset(replay.local_channel))
            self._attach_live(replay, recovered=True)
            return
        self._open(replay)
        if replay.cached:
            # It comes with the answer, unless the first page has it.
            assert replay.answer is not None
            replay.answer = replay.answer._replace(success=b"")
        elif replay.kind is Kind.STOCK:
            self._send_answer(replay, 0, False)
            self._joined(replay)
        replay.awaited = locates + (returned is not None)
        if locates:
            self._locate(replay)
        if returned is not None:
            returned.when_known(partial(self._missed, replay))

    def _open(self, replay: Replay) -> None:
        channel: Channel = replay.local_channel.audience
        readers = channel.make_readers()
        readers.replays[replay.connection] = replay
        self.begun += 1

    def _locate(self, replay: Replay) -> None:
        replay.state = State.LOCATING
        self._locating.locate(replay, partial(self._located, replay))

    def _located(self, replay: Replay, outcome: Any) -> None:
        if replay.over:
            return
        if isinstance(outcome, int):
            self._first_offset_known(replay, outcome)
        else:
            log_failure(replay.local_channel, outcome)
            self._waiting.wait_retry(replay)

    def _missed(self, replay: Replay, offset: int | None) -> None:
        if offset is not None:
            replay.miss_since(offset)
        self._first_offset_known(replay, offset)

    def _first_offset_known(self, replay: Replay, offset: int | None) -> None:
        """One of the awaited answers. None: no reason to begin earlier. The smallest offset wins."""
        if replay.over:
            return
        if offset is not None:
            replay.at = min(replay.at, offset)
        replay.awaited -= 1
        if replay.awaited == 0:
            history = replay.local_channel.history
            if history is None or replay.at >= history.last:
                self._catch_up(replay, _last_offset(replay.local_channel))
            else:
                self._wait_for_page(replay)

    def replay_missed(
        self, local_channel: LocalChannel, connection: Connection, since: int, attached_at: int | None
    ) -> None:
        """User resume found that the user missed messages from the offset `since` on, after the connection subscribed.

        `attached_at` is the offset from which the connection hears the channel; None if its replay hasn't begun yet.
        """
        if attached_at is not None:
            self._fill(local_channel, connection, since, attached_at)
            return
        channel: Channel | None = local_channel.audience
        readers = channel.readers if channel is not None else None
        replay = readers.replays.get(connection) if readers is not None else None
        if replay is not None and replay.kind is Kind.STOCK and not replay.exact:
            replay.miss_since(since)

    def _fill(self, local_channel: LocalChannel, connection: Connection, since: int, stop_at: int) -> None:
        """Send a connection that hears live events the messages after `since`, up to and including `stop_at`."""
        if since >= stop_at:
            return
        channel: Channel = local_channel.audience
        readers = channel.make_readers()
        if connection in readers.fills or readers.recovers(connection):
            return
        replay = Replay(local_channel, connection, asyncio.get_running_loop().time(), Kind.FILL)
        replay.at, replay.stop_at = since, stop_at
        readers.fills[connection] = replay
        self.begun += 1
        self._wait_for_page(replay)

    # -- pages ---------------------------------------------------------------------------------------------

    def _wait_for_page(self, replay: Replay) -> None:
        replay.state = State.WAITING_FOR_PAGE
        self.pages.read_next(replay.local_channel)

    def _go_on(self, replay: Replay) -> None:
        """`replay` waited, and may continue."""
        if replay.awaited:
            self._locate(replay)
        else:
            self._wait_for_page(replay)

    def _serve(self, replay: Replay, readers: HistoryReaders, page: PageFrames) -> None:
        history = replay.local_channel.history
        if history is None:
            self._catch_up(replay, 0)
            return
        unbroken = page.unbroken(replay.at)
        if unbroken is None:
            return
        if replay.exact and not unbroken and replay.recovers:
            self._give_up(replay)
            return
        # Not beyond the channel's own offset: what follows comes as live events.
        end = history.last if replay.stop_at is None else replay.stop_at
        start, stop = page.start(replay.at), page.start(end)
        if replay.answer is not None:
            if not self._cached_events.decided(replay, page, start, stop):
                return
            if replay.recovers and not replay.exact:
                replay.at, replay.exact = page.page.rows[start].prev if start < stop else history.last, True
            self._send_answer(replay, replay.at, True)
            self._joined(replay)
        if start < stop and replay.connection.unsent_bytes >= WRITABLE_BELOW_BYTES:
            # Replays of other channels filled the connection meanwhile. All of them together must not overflow it.
            self._waiting.wait_writable(replay)
            return
        self._send(replay, readers, page, start, stop)
        if stop == len(page.offsets) and page.page.more:
            self._after_page(replay, end)
        elif replay.at > end:
            # The client knows a later offset than the channel, which still catches up.
            self._waiting.wait_retry(replay)
        else:
            self._catch_up(replay, end)

    def _send(self, replay: Replay, readers: HistoryReaders, page: PageFrames, start: int, stop: int) -> None:
        if start >= stop:
            return
        parts = readers.frames_of(replay, page, start, stop)
        if parts:
            replay.connection.send(parts[0] if len(parts) == 1 else b"".join(parts))
        self.replayed += stop - start
        replay.sent += stop - start
        if not replay.exact and replay.kind is not Kind.FILL:
            self._note_offset(replay, page.page.rows[start].prev)
        replay.at, replay.exact = page.offsets[stop - 1], True

    def _after_page(self, replay: Replay, end: int) -> None:
        """There are more messages after this page."""
        rule = replay.local_channel.rule
        if replay.at >= end:
            self._catch_up(replay, end)
        elif replay.sent > (rule.keep if rule is not None else MAX_STORED_MESSAGES) + _MAX_EXTRA_ROWS:
            self._give_up(replay)
        elif replay.connection.unsent_bytes >= WRITABLE_BELOW_BYTES:
            self._waiting.wait_writable(replay)

    # -- how a replay ends ---------------------------------------------------------------------------------

    def _catch_up(self, replay: Replay, end: int) -> None:
        """The connection has everything up to the offset `end`, where the channel is, or nothing is stored."""
        if not replay.exact and replay.kind is not Kind.FILL:
            self._note_offset(replay, end)
        unanswered = replay.answer is not None
        if unanswered:
            self._send_answer(replay, end, replay.local_channel.history is not None)
        self._join_live(replay)
        if unanswered:
            self._joined(replay)

    def _give_up(self, replay: Replay) -> None:
        """Messages before the next live event are missing. Tells recovering clients."""
        local_channel, unanswered = replay.local_channel, replay.answer is not None
        replay.send_gathered()
        if unanswered:
            self._send_answer(replay, _last_offset(local_channel), False)
        elif replay.recovers and local_channel.history is not None:
            self.positions_sent += replay.connection.send(position_frame(local_channel))
        self._join_live(replay)
        if unanswered:
            self._joined(replay)

    def _end_all(self, readers: HistoryReaders) -> None:
        """The history is gone or has another epoch. If there is another one, `lost` tells recovering clients."""
        for replay in list(readers.replays.values()):
            if replay.exact and replay.recovers:
                self._give_up(replay)
            else:
                self._catch_up(replay, _last_offset(replay.local_channel))
        for fill in list(readers.fills.values()):
            self._join_live(fill)

    def _join_live(self, replay: Replay) -> None:
        connection = replay.connection
        channel: Channel = replay.local_channel.audience
        readers = channel.readers
        self._waiting.forget(replay)
        replay.send_gathered()
        if replay.kind is not Kind.FILL:
            following = readers.take_unstored(replay, MAX_OFFSET) if readers is not None else []
            if following:
                connection.send(b"".join(following))
            if replay.recovers:
                # Without a rule as well: one that is added later gives the channel a position, which `lost` sends them.
                readers = channel.make_readers()
                readers.admit(connection)
            else:
                channel.admit(connection)
        if readers is not None:
            readers.finish(replay)
            channel.drop_idle_readers()
        replay.state = State.LIVE
        self._waiting.advance(connection)

    def _send_answer(self, replay: Replay, offset: int, recovered: bool) -> None:
        connection = replay.connection
        connection.send(replay.take_answer(offset, recovered))
        channel: Channel = replay.local_channel.audience
        if channel.readers is not None and connection in channel.readers.replays:
            channel.readers.replaying.add(connection)

    def _joined(self, replay: Replay) -> None:
        """Tell the session that it is subscribed.

        Comes after the success frame and after the replay has its offset: a second subscribe, sent meanwhile, is
        answered from here with the same offset.
        """
        effects = replay.connection.session.joined(replay.local_channel.channel)
        if effects:
            self._perform(replay.connection, effects)

    def _note_offset(self, replay: Replay, offset: int) -> None:
        if not replay.recovers:
            self._user_resume.attached(replay.connection, replay.local_channel, offset)

    # -- what happens in the channel meanwhile -------------------------------------------------------------

    def event(self, local_channel: LocalChannel, payload: bytes) -> int:
        """Send a live event of a channel that has readers. Returns the number of connections it went to now; with a
        rate, it is counted when it is sent.

        Connections that replay get it from a page, or after the earlier messages if it isn't stored.
        """
        channel: Channel = local_channel.audience
        readers = channel.readers
        assert readers is not None
        if readers.replays:
            if local_channel.history is None:
                self._end_all(readers)
            elif _frame.offsets(payload)[0] == 0:
                readers.queue_unstored(payload, channel.name, local_channel.history.last)
        if readers.pacing is not None:
            readers.pacing.event(payload)
            return 0
        frame, skip_hi, skip_lo = _frame.frame_of(payload, channel.name)
        written = channel.post(frame, skip_hi, skip_lo)
        if len(readers.recovering):
            if _frame.offsets(payload)[0]:
                frame, _, _ = _frame.frame_of(payload, channel.name, True)
            written += readers.recovering.post(frame, skip_hi, skip_lo)
        return written

    def lost(self, local_channel: LocalChannel) -> None:
        """The channel's history begins again at `local_channel.history`. Tells recovering clients."""
        channel: Channel = local_channel.audience
        readers = channel.readers
        if readers is None or local_channel.history is None:
            return
        self.positions_sent += readers.post_position(position_frame(local_channel))
        # In the same epoch a replay continues, and finds out by itself whether messages are missing.
        for replay in [*readers.replays.values(), *readers.fills.values()]:
            if replay.epoch != local_channel.history.epoch:
                self._give_up(replay)

    def leave(self, channel: Channel, connection: Connection) -> bool:
        """A connection leaves the channel. False if it is a plain subscriber."""
        readers = channel.readers
        if readers is None:
            return False
        for replay in (readers.replays.get(connection), readers.fills.get(connection)):
            if replay is not None:
                self._waiting.forget(replay)
        was_reading = readers.discard(connection)
        channel.drop_idle_readers()
        self._waiting.advance(connection)
        return was_reading

    def closed(self, connection: Connection) -> None:
        """A connection closed, after it has left all channels."""
        self._waiting.closed(connection)

    def offset_of(self, local_channel: LocalChannel, connection: Connection) -> int | None:
        """The offset after which a recovering connection's next frames come; None for other connections."""
        channel: Channel = local_channel.audience
        readers, history = channel.readers, local_channel.history
        if readers is None or history is None:
            return None
        replay = readers.replays.get(connection)
        if replay is not None:
            replay.send_gathered()
            return min(replay.at, history.last) if replay.recovers else None
        if readers.pacing is not None and (connection in readers.recovering or connection in readers.pacing.recovering):
            readers.pacing.settle(connection)
        return history.last if connection in readers.recovering else None


def _last_offset(local_channel: LocalChannel) -> int:
    return local_channel.history.last if local_channel.history is not None else 0
