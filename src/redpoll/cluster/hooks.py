"""Which webhook events an app wants: the letters of `App.hooks`.

Control sets a letter when an enabled endpoint of the app wants that kind of event. Redis writes a webhook row only for
events whose letter is set, so apps without webhooks cost nothing. `hold` and `publish` have flags of their own for
these rows: membership/hold_call.py and publish_call.py translate.
"""

from typing import Final

__all__ = ["Hook"]


class Hook:
    OCCUPANCY: Final = "o"
    """channel.occupied and channel.vacated"""
    MEMBERS: Final = "m"
    """member.added and member.removed"""
    CLIENT_EVENTS: Final = "c"
    """client_event"""
    CACHE_MISSES: Final = "x"
    """cache.miss"""
    COUNTS: Final = "s"
    """subscription.count"""
