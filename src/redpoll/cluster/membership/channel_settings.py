"""What an app's record says about a channel."""

from functools import lru_cache
from typing import Final, NamedTuple

from redpoll.cluster.membership.hold_call import PRESENCE, hook_flags
from redpoll.cluster.redis.keys import cap_of_shard, share_of_limit
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.channels import is_cache, needs_auth
from redpoll.protocol.joining import Pace

__all__ = ["NO_SETTINGS", "ChannelSettings", "settings_of"]


class ChannelSettings(NamedTuple):
    """`cap`: most members. `caches`: joiners get the cached event. `hooks`: the flags of `hold` for webhook rows.
    `rule`: the history rule, None without history. `max_histories`: cap on the app's channels with history in this
    shard. `share`: while fewer of the app's channels are occupied there, this one may become so without a place
    (places.py); None: always. `pace`: frames a second, at most; None: each event is sent at once."""

    cap: int = 0
    caches: bool = False
    hooks: str = ""
    rule: HistoryRule | None = None
    max_histories: int = 0
    share: int | None = None
    pace: Pace | None = None


NO_SETTINGS: Final = ChannelSettings()


def settings_of(app: App, channel: str, kind: str) -> ChannelSettings:
    """The settings of a channel of this app; `kind` is CHANNEL or PRESENCE."""
    cap = app.max_presence_members if kind == PRESENCE else 0
    hooks = hook_flags(app.hooks, channel, kind)
    rule = app.history_rule(channel)
    caps = app.max_history_channels, app.max_occupied_channels
    return _shared(cap, is_cache(channel), hooks, rule, *caps, needs_auth(channel), app.pace(channel))


# Channels with the same settings share one object.
@lru_cache(maxsize=1024)
def _shared(
    cap: int,
    caches: bool,
    hooks: str,
    rule: HistoryRule | None,
    histories: int,
    occupied: int,
    signed: bool,
    pace: Pace | None,
) -> ChannelSettings:
    share = share_of_limit(occupied, signed=signed) if occupied else None
    return ChannelSettings(cap, caches, hooks, rule, cap_of_shard(histories), share, pace)
