"""What Redis stores for an app beyond its connections, removed with the app: its id may be used again.

Counts and members aren't removed here: they go with the app's connections, which workers close. Daily counters stay,
so that a deleted and repeated app has no second day's limit.
"""

from __future__ import annotations

import re
from typing import Final

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link

__all__ = ["remove_app_data"]

# Cached events, histories, points of user resume, correlation ids (cluster/redis/README.md "Keys").
_KINDS: Final = (b"k", b"km", b"h", b"hm", b"y", b"i")
_PER_WRITE: Final = 500


async def remove_app_data(link: Link, keys: Keys, app_id: str) -> int:
    """Deletes the keys of a deleted app, and returns how many there were. Raises LinkDown or hiredis.ReplyError."""
    app, prefix = app_id.encode(), keys.prefix.encode()
    pattern = b"%b:{*}:*:%b:*" % (_literal(prefix), _literal(app))
    starts = tuple(b"%b%b:%b:" % (head, kind, app) for head in keys.heads for kind in _KINDS)
    names = [name for name in await link.scan(pattern) if name.startswith(starts)]
    for at in range(len(keys.heads)):
        names += (keys.cached_channels(at, app_id), keys.histories(at, app_id))
    removed = 0
    for at in range(0, len(names), _PER_WRITE):
        removed += sum(await link.ask_all([(b"DEL", name) for name in names[at : at + _PER_WRITE]]))
    return removed


def _literal(text: bytes) -> bytes:
    """`text` in a pattern of SCAN."""
    return re.sub(rb"[*?\[\]^\\]", rb"\\\g<0>", text)
