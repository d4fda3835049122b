"""Requests to read a channel over HTTP, or to pull webhooks (worker/streams), as their connections see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redpoll.http.messages import AUTHENTICATED
from redpoll.worker.ingress.held_requests import HoldingConnection
from redpoll.worker.streams.asked import wants_events
from redpoll.worker.streams.pull_stream import PullStream
from redpoll.worker.streams.pulls import LongPull
from redpoll.worker.streams.reader import Reader

if TYPE_CHECKING:
    from redpoll.http.reader import ParsedRequest
    from redpoll.worker.streams.asked import Asked
    from redpoll.worker.streams.owner import Owner
    from redpoll.worker.streams.pulls import Pull, Pulls

__all__ = ["ReadingConnection"]


class ReadingConnection(HoldingConnection):
    """A connection whose request may be one to read a channel, or to pull webhooks. It is the `Peer` of its reader, and
    the `PullPeer` of its pull."""

    def read_channel(self, asked: Asked, request: ParsedRequest, streams: Owner) -> Reader:
        """The reader that answers the request once control has allowed it."""
        reader = Reader(streams, self, asked)
        self.hold(reader, request)
        return reader

    def pull_webhooks(self, request: ParsedRequest, pulls: Pulls) -> Pull:
        """The pull that answers the request once control has allowed it."""
        pull = PullStream(pulls, self, request) if wants_events(request) else LongPull(pulls, self, request)
        self.hold(pull, request)
        return pull

    def ask(self, pull: Pull) -> None:
        """Ask control again (pulls.PullPeer)."""
        raise NotImplementedError

    def recognised(self) -> None:
        """The caller has a right credential."""
        if not self.authenticated:
            self._judge(AUTHENTICATED)

    def pass_on(self, flags: int, response: bytes) -> None:
        """Control answers the request instead."""
        self.waiting = None
        self.answered(flags, response)

    def pass_unanswered(self, sent: bool) -> None:
        """Control doesn't answer (control_link.Requester)."""
        self.waiting = None
        self.unanswered(sent)

    def unanswered(self, sent: bool) -> None:
        raise NotImplementedError

    def late(self) -> None:
        if isinstance(self.waiting, Reader) and self.waiting.is_timed:
            self.waiting.late()
        else:
            super().late()
