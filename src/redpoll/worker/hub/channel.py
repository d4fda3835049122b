"""A channel of this worker: its name on the wire and the connections that subscribe to it.

Most channels have only plain subscribers, and an event is posted to them in one call. Connections that replay history
or want offsets are kept apart, in `readers`, and so is what sends the events of a channel with a rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redpoll._fanout import Audience, Flusher
from redpoll.worker.replay.pacing import ChannelPacing, Pacing
from redpoll.worker.replay.replay import HistoryReaders

if TYPE_CHECKING:
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.protocol.joining import Pace
    from redpoll.worker.hub.connection import Connection

__all__ = ["Channel"]


class Channel(Audience):
    """The plain subscribers of one channel. `readers` holds its other subscribers; None while there are none."""

    __slots__ = ("name", "readers")

    def __init__(self, flusher: Flusher, name: bytes) -> None:
        super().__init__(flusher)
        self.name = name
        self.readers: HistoryReaders | None = None

    def make_readers(self) -> HistoryReaders:
        """Return `readers`, created if there are none."""
        if self.readers is None:
            self.readers = HistoryReaders(self.flusher)
        return self.readers

    def admit(self, connection: Connection) -> None:
        """Add a plain subscriber that has all events up to now, or doesn't want them."""
        if self.readers is None or self.readers.pacing is None:
            self.add(connection)
        else:
            self.readers.pacing.plain.admit(connection)

    def waits_since(self, connection: Connection) -> float | None:
        """Since when events of a channel with a rate have been waiting for this connection; None: none wait."""
        readers = self.readers
        pacing = readers.pacing if readers is not None else None
        return pacing.waits_since(connection) if pacing is not None else None

    def set_pace(self, local_channel: LocalChannel, pace: Pace | None, shared: Pacing) -> None:
        """This channel has that rate from now on; None: none. `shared` is the worker's."""
        before = self.readers.pacing if self.readers is not None else None
        if (before.pace if before is not None else None) == pace:
            return
        readers = self.make_readers()
        readers.pacing = None
        if before is not None:
            before.end()
        if pace is not None:
            readers.pacing = ChannelPacing(local_channel, pace, shared, readers.recovering)
        self.drop_idle_readers()

    def drop_idle_readers(self) -> None:
        """Delete `readers` once it is empty, so that events take the fast path again."""
        if self.readers is not None and self.readers.idle:
            self.readers = None
