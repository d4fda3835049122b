"""A channel of this worker: its name on the wire and the connections that subscribe to it.

Most channels have only plain subscribers, and an event is posted to them in one call. Connections that replay history
or want offsets are kept apart, in `readers`.
"""

from __future__ import annotations

from redpoll._fanout import Audience, Flusher
from redpoll.worker.replay.replay import HistoryReaders

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

    def drop_idle_readers(self) -> None:
        """Delete `readers` once it is empty, so that events take the fast path again."""
        if self.readers is not None and self.readers.idle:
            self.readers = None
