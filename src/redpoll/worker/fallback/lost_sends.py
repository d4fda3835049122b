"""Sessions that an xhr_send didn't reach: they are closed, because their clients don't look at its status.

A stream or poll needs no such care: its client sees that it has failed and connects again, and the old session ends
30 s later.

The worker that refused the request notes the session, and every 2 s, while it reaches Redis, looks for the session's
worker and tells it. If that worker can't be reached, the session is marked as ended in Redis; a worker looks there for
each of its sessions when it is back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from redpoll.cluster.mailbox import Mailbox
from redpoll.loop.slices import Slices
from redpoll.worker.fallback.claims import ENDED, SessionName
from redpoll.worker.fallback.messages import Missed, encode

if TYPE_CHECKING:
    from redpoll.worker.fallback.sessions import Sessions

__all__ = ["LostSends"]

log = structlog.get_logger()

_LOOK_TICKS: Final = 8
_MAX_NOTED: Final = 4_000
# Of one network, so that names which somebody invents leave room for others; private addresses have a multiple.
_MAX_OF_NETWORK: Final = 250
# After a break of the link. Redis may have lost who has which session, and workers write it again.
_UNSURE_S: Final = 30.0


class LostSends:
    """Call `link_lost` and `link_up` as the mailbox does, and `beat` four times a second.

    `noted`: the sessions, with the status that the request got and the network that the note counts for."""

    def __init__(self, mailbox: Mailbox, sessions: Sessions) -> None:
        self.unsure_s = _UNSURE_S
        self._mailbox = mailbox
        self._sessions = sessions
        self.noted: dict[SessionName, tuple[int, str]] = {}
        self._of_network: Counter[str] = Counter()
        # Networks of which one more was refused, since they last had none.
        self._full_networks: set[str] = set()
        self._unsure_until = 0.0
        self._tick = 0
        self._looking: deque[SessionName] = deque()
        self._slices = Slices(self._look_one)

    @property
    def unsure(self) -> bool:
        """Redis may not know of a session that there is."""
        return monotonic() < self._unsure_until

    def note(self, name: SessionName, status: int, network: tuple[str, int]) -> None:
        """An xhr_send of this session got this status. `network` as of Strangers.counted_as."""
        if name in self.noted:
            return
        counted, factor = network
        limit = factor * _MAX_OF_NETWORK
        if 0 < limit <= self._of_network[counted]:
            if counted not in self._full_networks:
                self._full_networks.add(counted)
                log.warning("xhr_sends of too many sessions of one network are lost", network=counted, remembered=limit)
            return
        if len(self.noted) >= _MAX_NOTED:
            return
        self.noted[name] = status, counted
        self._of_network[counted] += 1
        if len(self.noted) == _MAX_NOTED:
            log.error("xhr_sends of too many sessions are lost, further ones are not remembered", count=_MAX_NOTED)

    def link_lost(self) -> None:
        self._unsure_until = inf

    def link_up(self) -> None:
        if self._unsure_until == inf:
            self._unsure_until = monotonic() + self.unsure_s

    def beat(self) -> None:
        self._tick += 1
        if self.noted and self._tick % _LOOK_TICKS == 0:
            self._looking = deque(self.noted)
            self._slices.start()

    def _look_one(self) -> bool:
        if not self._looking or not self._mailbox.up:
            return False
        name = self._looking.popleft()
        self._sessions.claims.find(name, partial(self._owner_known, name))
        return True

    def _owner_known(self, name: SessionName, owner: str | None) -> None:
        if name not in self.noted or owner is None or (owner == "" and self.unsure):
            return
        if owner in ("", ENDED):
            self._forget(name)
        elif owner == self._mailbox.address:
            session = self._sessions.by_name.get(name)
            if session is not None:
                session.message_lost(self.noted[name][0])
            self._forget(name)
        else:
            self._tell(name, owner, partial(self._delivered, name))

    def _delivered(self, name: SessionName, arrived: bool) -> None:
        if arrived:
            self._forget(name)
        else:
            self._sessions.claims.end(name, partial(self._marked, name))

    def _marked(self, name: SessionName, owner: str | None) -> None:
        if owner and owner != ENDED:
            # It may be back, and have looked before it was marked.
            self._tell(name, owner, _ignore)
        if owner is not None:
            self._forget(name)

    def _tell(self, name: SessionName, owner: str, done: Callable[[bool], None]) -> None:
        if name in self.noted:
            message = Missed(0, self._mailbox.address, name.key, name.session, self.noted[name][0])
            self._mailbox.send(owner, encode(message), done)

    def _forget(self, name: SessionName) -> None:
        noted = self.noted.pop(name, None)
        if noted is not None:
            self._of_network[noted[1]] -= 1
            if not self._of_network[noted[1]]:
                del self._of_network[noted[1]]
                self._full_networks.discard(noted[1])


def _ignore(arrived: bool) -> None:
    pass
