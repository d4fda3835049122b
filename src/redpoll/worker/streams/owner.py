"""What a reader is given (reader.py): its connection, and what all readers of a worker share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from redpoll.cluster.history import History
    from redpoll.protocol.apps import App
    from redpoll.protocol.grants import RevokedGrants
    from redpoll.protocol.streams import Live
    from redpoll.worker.hub.addresses import Addresses
    from redpoll.worker.hub.admission import Admission
    from redpoll.worker.streams.tail import Tail

__all__ = ["Owner", "Peer"]


class Peer(Protocol):
    """The HTTP connection of a reader (ingress/http_requests.py)."""

    @property
    def stream(self) -> Any: ...
    @property
    def peer(self) -> str: ...

    def recognised(self) -> None:
        """The caller has a right credential."""

    def pass_on(self, flags: int, response: bytes) -> None:
        """Control's answer; flags as in http/messages.py."""

    def pass_unanswered(self, sent: bool) -> None:
        """Control doesn't answer; as of control_link.Requester."""

    def reply(self, response: bytes) -> None:
        """The whole answer."""

    def finish(self, last: bytes) -> None:
        """The end of the answer. The connection closes."""


class Owner(Protocol):
    """What all readers of a worker share (streams.py)."""

    apps: Mapping[str, App]
    history: History
    admission: Admission
    addresses: Addresses
    grants: RevokedGrants
    named_by_proxy: bool
    requests: dict[Live, int]
    when_read: Callable[[Any, Callable[[], None]], None]

    def check_admits(self) -> None: ...
    def carries_grant(self, reader: Any) -> None: ...
    def entered(self, reader: Any) -> None: ...
    def left(self, reader: Any) -> None: ...
    def tail_of(self, app_id: str, channel: str) -> Tail: ...
    def at_end(self, app_id: str, channel: str, position: tuple[str, int], is_empty: bool) -> None: ...
