"""One channel of a fake server: its subscribers, its members, and the count that was announced last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from redpoll.protocol import frames
from redpoll.protocol.channels import Kind, kind_of
from redpoll.protocol.presence import Member, Roster
from redpoll.testing.rates import Rates

if TYPE_CHECKING:
    from redpoll.protocol.joining import Pace, Part
    from redpoll.protocol.session import Session
    from redpoll.testing.clock import Clock, Timer

__all__ = ["Channel", "Client"]

# Between two announcements of a count; above so many subscribers it is the longer one (hold.lua has the same).
_COUNT_EVERY_S, _LARGE_COUNT_EVERY_S, _LARGE = 0.25, 5.0, 100
# After so long, the next count is announced at once whatever was announced before.
_COUNT_FORGOTTEN_S = 60.0


class Client(Protocol):
    """A connection as the hub sees it."""

    @property
    def session(self) -> Session: ...
    def send(self, payload: bytes) -> None: ...
    def shut(self, code: int, message: str) -> None: ...


class Channel:
    """`subscribers` maps connections to whether they get offsets. `roster` has the members of a presence channel, and
    None is on others."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.kind = kind_of(name)
        self.subscribers: dict[Any, bool] = {}
        self.roster = Roster() if self.kind is Kind.PRESENCE else None
        self.rates = Rates(name, clock)
        # Connections by member.
        self._held: dict[str, int] = {}
        self._announced: tuple[int, float] | None = None
        self.count_timer: Timer | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.subscribers))

    # -- members

    def has_room(self, member: Member | None, limit: int) -> bool:
        return self.roster is None or member is None or member.user_id in self.roster or len(self.roster) < limit

    def member_joined(self, member: Member) -> bool:
        """True: the user is new."""
        assert self.roster is not None
        self._held[member.user_id] = self._held.get(member.user_id, 0) + 1
        return self.roster.add(member.user_id, member.user_info)

    def member_left(self, user_id: str) -> bool:
        """True: it was the user's last connection."""
        assert self.roster is not None
        self._held[user_id] -= 1
        if self._held[user_id]:
            return False
        del self._held[user_id]
        return self.roster.remove(user_id)

    def presence(self) -> bytes | None:
        """The members for a success frame; None on other channels."""
        return None if self.roster is None else self.roster.snapshot()

    # -- sending

    def post(self, payload: bytes) -> None:
        for client in self:
            client.send(payload)

    def post_event(self, event: str, data: str, user_id: str | None, skip: str | None, offset: int | None) -> None:
        plain = frames.event(self.name, event, data, user_id)
        numbered = plain if offset is None else frames.event(self.name, event, data, user_id, offset)
        for client, recovers in list(self.subscribers.items()):
            if client.session.socket_id != skip:
                client.send(numbered if recovers else plain)

    def post_paced(self, pace: Pace, part: Part) -> None:
        """An event of a channel with a rate."""
        for client, recovers in list(self.subscribers.items()):
            high, _, low = client.session.socket_id.partition(".")
            if part.skip != (int(high), int(low)):
                self.rates.event(client, pace, part, recovers)

    # -- counts

    def count_due_s(self, now: float) -> float | None:
        """In how many seconds the present count may be announced, 0 for now; None: it was announced."""
        total = len(self.subscribers)
        if not total:
            self._announced = None
            return None
        if self._announced is None or now - self._announced[1] >= _COUNT_FORGOTTEN_S:
            return 0.0
        announced, at = self._announced
        if announced == total:
            return None
        return max(0.0, at + (_LARGE_COUNT_EVERY_S if total > _LARGE else _COUNT_EVERY_S) - now)

    def count_announced(self, now: float) -> None:
        self._announced = (len(self.subscribers), now)
