"""What one call of `hold` says: the kinds of what is held, the flags that webhooks call for, and the call itself.

Values only. When there is one, and what is in it, held.py decides; what a flag means stands at the head of hold.lua.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from redpoll.protocol.channels import OWN_PREFIX, is_cache

if TYPE_CHECKING:
    from redpoll.cluster.membership.local_channel import Ticket

__all__ = ["CHANNEL", "CONNECTIONS", "PRESENCE", "SIGNED_IN", "TOPIC", "HoldCall", "hook_flags"]

# Kinds, as `hold` is told them; of the last it is told nothing.
CHANNEL: Final = "c"
PRESENCE: Final = "p"
SIGNED_IN: Final = "u"
CONNECTIONS: Final = "q"
TOPIC: Final = "t"


def hook_flags(wanted: str, channel: str, kind: str) -> str:
    """The flags with which `hold` writes what webhooks want to hear (`App.hooks`) of a channel or pseudo-channel."""
    # The console's channel is nobody's business.
    if not wanted or kind not in (CHANNEL, PRESENCE) or channel.startswith(OWN_PREFIX):
        return ""
    flags = "o" if "o" in wanted else ""
    if kind == PRESENCE:
        flags += "m" if "m" in wanted else ""
    elif "s" in wanted:
        flags += "S"
    return flags + "X" if "x" in wanted and is_cache(channel) else flags


class HoldCall(NamedTuple):
    """One `hold`: what it carries, and what its reply is to be read as.

    `joins` pairs users with infos (presence); `tickets` are the subscribes behind them, none in a
    re-assertion. `last`: with it the channel is asserted whole. `look`: users missing from its roster are
    gone for good.
    """

    base: int
    cap: int
    flags: str
    gone: Sequence[str]
    joins: Sequence[tuple[str, bytes]]
    tickets: Sequence[Ticket]
    last: bool
    look: bool

    @property
    def roster(self) -> bool:
        return "r" in self.flags

    @property
    def brings(self) -> str:
        """What of its reply may be big: `r` a roster, `c` a cached event, or neither."""
        return "r" if self.roster else "c" if "c" in self.flags else ""

    @property
    def joining(self) -> int:
        """How many subscriptions it asks for: joins without a ticket stand for attached sockets."""
        return len(self.joins) or len(self.tickets)
