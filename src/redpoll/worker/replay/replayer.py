"""Replays carried out: who subscribes is told of the past, page by page, before live events reach them (cluster.md 8).

By the rule of the channel's history, by what the client asks for, or because the user was here a moment ago. Sockets
of a channel share pages (readings.py); one that reads slowly leaves that, and goes on when it owes less (parking.py):
nobody waits for it. What one replay knows stands in replays.py.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from redpoll import _frame
from redpoll.cluster.history import MOST_ROWS
from redpoll.protocol import frames
from redpoll.protocol.history import Rewind
from redpoll.worker.replay.parking import AGAIN_S, LOOK_S, MOST_OWED_BYTES, Parking
from redpoll.worker.replay.replay import (
    ASKING,
    GONE,
    NOWHERE,
    READY,
    Past,
    Replay,
    Sheet,
    Wants,
    past_of,
    position_of,
    tidy,
)
from redpoll.worker.replay.shared_pages import SharedPages, complain

if TYPE_CHECKING:
    from redpoll.cluster.history import History
    from redpoll.cluster.membership.registry import LocalChannel, Ticket
    from redpoll.worker.connection import Connection
    from redpoll.worker.hub import Channel, Hub

__all__ = ["Past", "Replayer", "Wants"]

# Messages a replay may need beyond all that is kept: a publisher faster than the reader is not waited for.
_MORE_ROWS = 8 * MOST_ROWS
# Of a channel whose rule is gone: the most that a rule keeps.
_MOST_KEPT = 10_000

_NOTHING = Wants(None, False)


class Replayer:
    """All replays of a worker. `begun` and `replayed`, the messages sent by them, are for /metrics."""

    def __init__(self, hub: Hub) -> None:
        self.begun = 0
        self.replayed = 0
        self._hub = hub
        self._parking = Parking(self._go)
        self._readings = SharedPages(self._parking, self._serve, self._end)

    @property
    def parked(self) -> int:
        """Replays that wait for their socket, or for Redis."""
        return len(self._parking)

    def attach_history(self, history: History) -> None:
        self.history = self._readings.history = history

    # -- how it begins -------------------------------------------------------------------------------------

    def attach(
        self, local_channel: LocalChannel, ticket: Ticket, cached: bytes | None, total: int | None, success: bytes
    ) -> None:
        """A subscriber of a channel with history, or one who asked for the past, is in it now: answered and among the
        others, or on the way there. `success`: the frame for those who aren't told where they are, one for all."""
        connection: Connection = ticket.owner
        rewind, recovers = ticket.wants or _NOTHING
        replay = Replay(local_channel, connection, asyncio.get_running_loop().time())
        replay.since = rewind is not None and rewind.epoch is not None
        # Who names a place has been told of one: it recovers, whatever else it says.
        replay.recovers = recovers or replay.since
        replay.cached, replay.total, replay.success = cached, total, success
        kept = local_channel.history
        if kept is None:
            self._attach_live(replay, recovered=False)
        elif rewind is not None and rewind.epoch is not None:
            self._go_on(replay, rewind.epoch, rewind.offset)
        else:
            self._look_back(replay, rewind)

    def _attach_live(self, replay: Replay, recovered: bool) -> None:
        self._succeed(
            replay, replay.local_channel.history.last if replay.local_channel.history is not None else 0, recovered
        )
        self._join_others(replay)
        self._joined(replay)

    def _go_on(self, replay: Replay, epoch: str, offset: int) -> None:
        kept = replay.local_channel.history
        assert kept is not None
        if epoch != kept.epoch or (offset > kept.last and kept.live):
            self._attach_live(replay, recovered=False)
            return
        if replay.cached:
            # It has seen that one, or is about to.
            replay.cached = None
        if offset == kept.last:
            self._attach_live(replay, recovered=True)
        else:
            # Perhaps ahead of the channel, which catches up after a break, if another worker told it.
            replay.at, replay.exact = offset, True
            self._open(replay)
            self._make_ready(replay)

    def _look_back(self, replay: Replay, rewind: Rewind | None) -> None:
        local_channel, rule = replay.local_channel, replay.local_channel.rule
        if rewind is not None:
            replay.last = rewind.count, rewind.seconds
        elif rule is not None:
            replay.last = rule.replay, rule.replay_seconds
        # Who recovers goes on by itself.
        returned = self._hub.resume.returned(replay.connection) if rewind is None and not replay.recovers else None
        if returned is None and not any(replay.last):
            assert local_channel.history is not None
            self._note_place(replay, local_channel.history.last)
            self._attach_live(replay, recovered=True)
            return
        self._open(replay)
        if not replay.recovers:
            self._succeed(replay, 0, False)
            self._joined(replay)
        locates = any(replay.last)
        replay.pending = locates + (returned is not None)
        if locates:
            self._locate(replay)
        if returned is not None:
            returned.tell(partial(self._begins_at, replay))

    def _open(self, replay: Replay) -> None:
        past = past_of(replay.local_channel.audience)
        replay.late = len(past.late)
        past.replays[replay.connection] = replay
        self.begun += 1

    def _locate(self, replay: Replay) -> None:
        local_channel, (count, seconds) = replay.local_channel, replay.last
        self.history.locate(
            local_channel.app_id, local_channel.channel, partial(self._located, replay), count=count, seconds=seconds
        )

    def _located(self, replay: Replay, outcome: Any) -> None:
        if replay.state == GONE:
            return
        if isinstance(outcome, int):
            self._begins_at(replay, outcome)
        else:
            complain(replay.local_channel, outcome)
            self._parking.put(replay, AGAIN_S)

    def _begins_at(self, replay: Replay, offset: int | None) -> None:
        """One of the answers that it waits for; None: no reason to begin earlier. The least counts."""
        if replay.state == GONE:
            return
        if offset is not None:
            replay.at = min(replay.at, offset)
        replay.pending -= 1
        if replay.pending == 0:
            kept = replay.local_channel.history
            if kept is None or replay.at >= kept.last:
                self._catch(replay, kept.last if kept is not None else 0)
            else:
                self._make_ready(replay)

    def fill(self, local_channel: LocalChannel, connection: Connection, since: int, upto: int) -> None:
        """Tell a socket that hears live events already what lies between two offsets, the second included."""
        past = past_of(local_channel.audience)
        if since >= upto or connection in past.fills:
            return
        replay = Replay(local_channel, connection, asyncio.get_running_loop().time())
        replay.told = True
        replay.at, replay.upto = since, upto
        past.fills[connection] = replay
        self.begun += 1
        self._make_ready(replay)

    def bring_forward(self, local_channel: LocalChannel, connection: Connection, since: int) -> None:
        """A replay that has told nothing yet is to begin here, if not earlier."""
        past: Past | None = local_channel.audience.past if local_channel.audience is not None else None
        replay = past.replays.get(connection) if past is not None else None
        if replay is not None and not replay.recovers and not replay.exact:
            replay.at = min(replay.at, since)

    # -- pages ---------------------------------------------------------------------------------------------

    def _make_ready(self, replay: Replay) -> None:
        replay.state = READY
        self._readings.go_on(replay.local_channel)

    def _serve(self, replay: Replay, past: Past, sheet: Sheet) -> None:
        kept = replay.local_channel.history
        if kept is None:
            self._catch(replay, 0)
            return
        unbroken = sheet.unbroken(replay.at)
        if unbroken is None:
            return
        if replay.exact and not unbroken and replay.recovers:
            self._give_up(replay)
            return
        # No further than the channel itself has got: the rest comes live.
        end = kept.last if replay.upto is None else replay.upto
        start, stop = sheet.start(replay.at), sheet.start(end)
        if not replay.told:
            if not replay.exact:
                replay.at, replay.exact = sheet.page.rows[start].prev if start < stop else kept.last, True
            self._succeed(replay, replay.at, True)
            self._joined(replay)
        if start < stop and replay.connection.bytes_owed >= MOST_OWED_BYTES:
            # Other channels were faster: what all of them replay is not to cost the socket its life.
            self._parking.put(replay, LOOK_S)
            return
        self._send(replay, past, sheet, start, stop)
        if stop == len(sheet.offsets) and sheet.page.more:
            self._go_further(replay, end)
        elif replay.at > end:
            # It knows more than the channel, which has yet to get there.
            self._parking.put(replay, LOOK_S)
        else:
            self._catch(replay, end)

    def _send(self, replay: Replay, past: Past, sheet: Sheet, start: int, stop: int) -> None:
        if start >= stop:
            return
        connection, with_offset = replay.connection, replay.recovers
        parts: list[bytes] = []
        begin = start
        while replay.upto is None and replay.late < len(past.late):
            place = sheet.start(past.late[replay.late].after)
            if place >= stop:
                break
            parts += sheet.frames(connection, begin, max(begin, place), with_offset)
            begin = max(begin, place)
            parts += past.take_late(replay, sheet.offsets[begin])
        parts += sheet.frames(connection, begin, stop, with_offset)
        connection.send(parts[0] if len(parts) == 1 else b"".join(parts))
        self.replayed += stop - start
        replay.rows += stop - start
        if not replay.exact and replay.upto is None:
            self._note_place(replay, sheet.page.rows[start].prev)
        replay.at, replay.exact = sheet.offsets[stop - 1], True
        if replay.cached and sheet.has_server_event(start, stop):
            # The cached event is among them, or will be: it is the last that a server published.
            replay.cached = None

    def _go_further(self, replay: Replay, end: int) -> None:
        rule = replay.local_channel.rule
        if replay.at >= end:
            self._catch(replay, end)
        elif replay.rows > (rule.keep if rule is not None else _MOST_KEPT) + _MORE_ROWS:
            self._give_up(replay)
        elif replay.connection.bytes_owed >= MOST_OWED_BYTES:
            self._parking.put(replay, LOOK_S)

    # -- how it ends ---------------------------------------------------------------------------------------

    def _catch(self, replay: Replay, end: int) -> None:
        """It has everything up to where the others are, or there is nothing to be had."""
        if not replay.exact and replay.upto is None:
            self._note_place(replay, end)
        untold = not replay.told
        if untold:
            self._succeed(replay, end, replay.local_channel.history is not None)
        self._join_others(replay)
        if untold:
            self._joined(replay)

    def _give_up(self, replay: Replay) -> None:
        """There is a gap before what comes next: it goes on with the others, and knows it if it recovers."""
        kept, untold = replay.local_channel.history, not replay.told
        if untold:
            self._succeed(replay, kept.last if kept is not None else 0, False)
        elif replay.recovers and kept is not None:
            replay.connection.send(position_of(replay.local_channel))
        self._join_others(replay)
        if untold:
            self._joined(replay)

    def _end(self, past: Past) -> None:
        # The history is gone, or is another. Of a channel that still has one lost() tells the others.
        for replay in list(past.replays.values()):
            if replay.exact and replay.recovers:
                self._give_up(replay)
            else:
                self._catch(
                    replay, replay.local_channel.history.last if replay.local_channel.history is not None else 0
                )
        for fill in list(past.fills.values()):
            self._join_others(fill)

    def _join_others(self, replay: Replay) -> None:
        connection, channel = replay.connection, replay.local_channel.audience
        past: Past | None = channel.past
        self._parking.forget(replay)
        if replay.upto is None:
            behind = past.take_late(replay, NOWHERE) if past is not None else []
            if replay.cached:
                behind.append(_frame.frame_of(replay.cached, channel.name)[0])
            if behind:
                connection.send(b"".join(behind))
            if replay.recovers and replay.local_channel.rule is not None:
                past = past_of(channel)
                past.recovering.add(connection)
            else:
                channel.add(connection)
        if past is not None:
            past.finish(replay)
            tidy(channel)
        replay.state = GONE

    def _succeed(self, replay: Replay, offset: int, recovered: bool) -> None:
        """The success frame and what goes with it, in one piece."""
        local_channel, connection = replay.local_channel, replay.connection
        if replay.recovers:
            epoch = local_channel.history.epoch if local_channel.history is not None else None
            answer = _frame.text(
                frames.subscription_succeeded(
                    local_channel.channel,
                    local_channel.roster.snapshot() if local_channel.roster is not None else None,
                    epoch=epoch,
                    offset=offset if epoch is not None else None,
                    recovered=recovered if replay.since else None,
                )
            )
        else:
            # Told in the moment of attaching, so that the roster is still the same.
            answer = replay.success
        replay.success = b""
        if replay.cached == b"":
            answer += _frame.text(frames.cache_miss(local_channel.channel))
        if replay.total is not None:
            answer += _frame.text(frames.subscription_count(local_channel.channel, replay.total))
        replay.told = True
        connection.send(answer)
        channel: Channel = local_channel.audience
        if channel.past is not None and connection in channel.past.replays:
            channel.past.replaying.add(connection)

    def _joined(self, replay: Replay) -> None:
        """It counts as subscribed. Behind its success, and where it hears from: who asked again meanwhile is told that
        place as well."""
        effects = replay.connection.session.joined(replay.local_channel.channel)
        if effects:
            self._hub.perform(replay.connection, effects)

    def _note_place(self, replay: Replay, place: int) -> None:
        if not replay.recovers:
            self._hub.resume.attached(replay.connection, replay.local_channel, place)

    # -- what happens in the channel meanwhile -------------------------------------------------------------

    def event(self, local_channel: LocalChannel, payload: bytes) -> int:
        """A live event of a channel with a past: who replays gets it from a page, unless no page has it. Returns how
        many sockets it went to now."""
        channel: Channel = local_channel.audience
        past = channel.past
        assert past is not None
        if past.replays:
            if local_channel.history is None:
                self._end(past)
            elif _frame.offsets(payload)[0] == 0:
                past.put_behind(payload, channel.name, local_channel.history.last)
        frame, skip_hi, skip_lo = _frame.frame_of(payload, channel.name)
        written = channel.post(frame, skip_hi, skip_lo)
        if len(past.recovering):
            frame, _, _ = _frame.frame_of(payload, channel.name, True)
            written += past.recovering.post(frame, skip_hi, skip_lo)
        return written

    def counted(self, past: Past, total: int) -> None:
        """Those who wait for their success frame are told then."""
        for replay in past.replays.values():
            if not replay.told and replay.total is not None:
                replay.total = total

    def lost(self, local_channel: LocalChannel) -> None:
        """The channel begins anew at `local_channel.history`: those who recover are told where that is."""
        past: Past | None = local_channel.audience.past
        if past is None or local_channel.history is None:
            return
        past.recovering.post(position_of(local_channel))
        # In the same epoch a replay goes on with what there is, and finds out by itself if something is missing.
        for replay in [*past.replays.values(), *past.fills.values()]:
            if replay.epoch != local_channel.history.epoch:
                self._give_up(replay)

    def leave(self, channel: Channel, connection: Connection) -> bool:
        """A socket leaves the channel; whether it was among those that are told more than others, or later."""
        past = channel.past
        assert past is not None
        for replay in (past.replays.get(connection), past.fills.get(connection)):
            if replay is not None:
                self._parking.forget(replay)
        found = past.discard(connection)
        tidy(channel)
        return found

    def place_of(self, local_channel: LocalChannel, connection: Connection) -> int | None:
        """The offset behind which a recovering socket's frames follow; None for those who aren't told."""
        channel: Channel = local_channel.audience
        past, kept = channel.past, local_channel.history
        if past is None or kept is None:
            return None
        replay = past.replays.get(connection)
        if replay is not None:
            return min(replay.at, kept.last) if replay.recovers else None
        return kept.last if connection in past.recovering else None

    def _go(self, replay: Replay) -> None:
        """It was parked, and may go on."""
        if replay.pending:
            replay.state = ASKING
            self._locate(replay)
        else:
            self._make_ready(replay)
