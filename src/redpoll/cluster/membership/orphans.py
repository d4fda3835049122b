"""Finds workers that Redis has something of, but that its beat table doesn't name, so that no reaper would see them.

A fail-over that loses writes leaves them: the removal of a worker's hash in one master is undone, while its beat stays
removed in another. A worker adds its beat before its hashes, and removes them before its beat. So what was in a shard
before the beat table was read, and isn't in that table, is left over.
"""

import re
from typing import Final

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link

__all__ = ["orphans"]

_WORKER: Final = re.compile(rb":w:([0-9a-f]{12}\.\d+\.\d+)\Z")


async def orphans(link: Link, keys: Keys) -> set[bytes]:
    """The names of these workers. Reads all key names of Redis, a thousand at a time. Raises hiredis.ReplyError or
    LinkDown."""
    heads = set(keys.heads)
    found: set[bytes] = set()
    for name in await link.scan(b"%b:{*}:w:*" % keys.prefix.encode()):
        match = _WORKER.search(name)
        if match is not None and name[: match.start() + 1] in heads:
            found.add(match[1])
    return found.difference(await link.ask(b"HKEYS", keys.beat)) if found else found
