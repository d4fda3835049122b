"""Who is in which channel, as Redis says: what the API's GET endpoints and `info` are answered from.

Reads only, pipelined on control's one connection; the workers' scripts write (cluster.md 2 and 5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

import hiredis

from redpoll.cluster.bus import Cached, Unavailable, read_cached
from redpoll.cluster.keys import SHARDS, Keys
from redpoll.cluster.link import Link, LinkDown

__all__ = ["Occupancy"]

# One SSCAN's share, and how many channels' counts are asked for in one write: big lists must not hold up publishes.
_SCAN_COUNT: Final = 500
_CHANNELS_A_WRITE: Final = 500


class Occupancy:
    """Raises Unavailable when Redis answers with an error, or not within `answer_s` (long lists: each share)."""

    def __init__(self, link: Link, keys: Keys, *, answer_s: float = 2.0) -> None:
        self._link = link
        self._keys = keys
        self._answer_s = answer_s

    async def subscription_counts(self, app_id: str, channels: Sequence[str]) -> list[int]:
        """Subscriptions of each channel, over all workers."""
        counts = self._keys.counts
        held = await self._ask_all([(b"HVALS", counts(app_id, channel)) for channel in channels])
        return [sum(map(int, values)) for values in held]

    async def user_counts(self, app_id: str, channels: Sequence[str]) -> list[int]:
        """Distinct users of each presence channel, over all workers."""
        members = self._keys.members
        return await self._ask_all([(b"HLEN", members(app_id, channel)) for channel in channels])

    async def user_ids(self, app_id: str, channel: str) -> list[str]:
        """The users of a presence channel, in no order."""
        (users,) = await self._ask_all([(b"HKEYS", self._keys.members(app_id, channel))])
        return sorted(user.decode() for user in users)

    async def members(self, app_id: str, channel: str, most: int = 500) -> list[tuple[str, bytes]]:
        """Users of a presence channel with their user_info (JSON, b"" without), by id; about `most` of them."""
        found: dict[bytes, bytes] = {}
        cursor: Any = b"0"
        while len(found) < most:
            command = (b"HSCAN", self._keys.members(app_id, channel), cursor, b"COUNT", _SCAN_COUNT)
            ((cursor, flat),) = await self._ask_all([command])
            found.update(zip(flat[::2], flat[1::2], strict=True))
            if not int(cursor):
                break
        # W W…\n<user_info> (cluster.md 2, key p).
        return [(user.decode(), held.partition(b"\n")[2]) for user, held in sorted(found.items())[:most]]

    async def with_history(self, app_id: str, most: int = 500) -> list[str]:
        """Channels of which messages were kept, in order of name; at most `most`, any of them where there are more."""
        share = [(b"ZREVRANGE", self._keys.histories(at, app_id), 0, most - 1) for at in range(SHARDS)]
        names = {name.decode() for shard in await self._ask_all(share) for name in shard}
        return sorted(names)[:most]

    async def cached(self, app_id: str, channel: str) -> Cached | None:
        """The event that a cache channel tells to whoever joins; None while there is none."""
        return await read_cached(self._link, self._keys, app_id, channel)

    async def channels(self, app_id: str, prefix: str) -> list[str]:
        """The occupied channels whose names begin with `prefix`, in order of name."""
        wanted = prefix.encode()
        found: set[bytes] = set()
        cursors: dict[int, Any] = dict.fromkeys(range(SHARDS), b"0")
        while cursors:
            pages = await self._ask_all(
                [
                    (b"SSCAN", self._keys.occupied(at, app_id), cursor, b"COUNT", _SCAN_COUNT)
                    for at, cursor in cursors.items()
                ]
            )
            for at, (cursor, names) in zip(list(cursors), pages, strict=True):
                found.update(name for name in names if name.startswith(wanted))
                if int(cursor):
                    cursors[at] = cursor
                else:
                    del cursors[at]
        return sorted(name.decode() for name in found)

    async def _ask_all(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        commands = list(commands)
        answers: list[Any] = []
        try:
            for at in range(0, len(commands), _CHANNELS_A_WRITE):
                share = commands[at : at + _CHANNELS_A_WRITE]
                async with asyncio.timeout(self._answer_s):
                    answers += await asyncio.gather(*(self._link.ask(*command) for command in share))
        except (LinkDown, hiredis.ReplyError) as error:
            raise Unavailable(str(error)) from error
        except TimeoutError:
            raise Unavailable(f"no answer from Redis within {self._answer_s:g} s") from None
        return answers
