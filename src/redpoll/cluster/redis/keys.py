"""The names of all keys and topics in Redis.

cluster/redis/README.md "Keys" says what each holds, how long it lives, and which script or process writes and deletes
it; a test compares the names with that table.
"""

import copy
from binascii import crc_hqx
from typing import Any, Final

from redpoll._shards import Shards

__all__ = [
    "CONSOLE_TOPIC",
    "COUNTS_SUM",
    "PULLS_TOPIC",
    "SHARDS",
    "TAGS",
    "Keys",
    "cap_of_shard",
    "shard_of_name",
    "shard_of_slot",
    "share_of_limit",
    "user_pseudo",
]

SHARDS: Final = 64

# Takes the place of a channel in the topic on which the dashboard's console gets an app's events.
CONSOLE_TOPIC: Final = "%console"
# The same, in the topic on which workers hear of the webhook deliveries that the app's back end pulls.
PULLS_TOPIC: Final = "%pulls"

# In the hash of a channel's counts by worker: their sum. It is there if the channel's subscription_count is announced,
# and for an app's connections.
COUNTS_SUM: Final = b"sum"


def _tags() -> tuple[bytes, ...]:
    # The smallest decimal number in each 64th of Redis Cluster's 16,384 slots, so that the shards are spread evenly
    # over any number of masters. crc_hqx with a start of 0 is the CRC16 of Redis.
    tags: dict[int, bytes] = {}
    number = 0
    while len(tags) < SHARDS:
        tag = b"%d" % number
        tags.setdefault((crc_hqx(tag, 0) % 16384) // 256, tag)
        number += 1
    return tuple(tags[at] for at in range(SHARDS))


TAGS: Final = _tags()
_SHARD_OF_TAG: Final = {tag: at for at, tag in enumerate(TAGS)}


def shard_of_name(name: Any) -> int:
    """The shard of a key or topic, or of a command in RESP whose first brace begins its hash tag; 0 for a word without
    one, because any master will do then."""
    if not isinstance(name, bytes):
        return 0
    begin = name.find(b"{") + 1
    return _SHARD_OF_TAG.get(name[begin : name.find(b"}", begin)], 0)


def shard_of_slot(slot: int) -> int:
    """The shard that may have its keys in this slot of Redis Cluster. Others of our keys aren't there."""
    return slot * SHARDS // 16384


def user_pseudo(user_id: str) -> str:
    """The pseudo-channel of a user's signed-in connections."""
    return f"%u:{user_id}"


def cap_of_shard(most: int) -> int:
    """How many channels with history, or with a cached event, an app may have in one shard if it may have `most` of
    them: twice an even share, because channels don't spread evenly over the shards, and at least one."""
    return max(1, -(-2 * most // SHARDS))


# Below this limit a channel that becomes occupied is always compared with the app's total.
_MIN_SHARED_LIMIT: Final = 6_400


def share_of_limit(max_occupied: int, *, signed: bool) -> int:
    """How many occupied channels an app may have in one shard before another one is compared with the app's total
    (membership/places.py): half of an even share, for channels that need no signature a quarter; 0 if the limit is
    small, since one shard then has too few."""
    if max_occupied < _MIN_SHARED_LIMIT:
        return 0
    return max_occupied // SHARDS // (2 if signed else 4)


class Keys:
    """Builds the names, under one prefix, as bytes.

    Where a method takes a channel, a pseudo-channel will do: `%u:U` (a signed-in user's connections) or `%conn` (an
    app's connections). `%` can't occur in the name of a channel.

    `sharded` replaces PUBLISH by SPUBLISH, which Redis Cluster needs (`Link` does the same for SUBSCRIBE). `shard_key`
    is the record store's (store/shard_key.py): 16 bytes, or none. None: `shards.use` will be called with it; before
    that, names of channels raise RuntimeError.
    """

    def __init__(self, prefix: str = "rp", *, sharded: bool = False, shard_key: bytes | None = b"") -> None:
        self.prefix = prefix
        self.sharded = sharded
        self.publish = b"SPUBLISH" if sharded else b"PUBLISH"
        # The beginning of each shard's keys.
        self.heads = tuple(b"%b:{%b}:" % (prefix.encode(), tag) for tag in TAGS)
        self.shards = Shards(self.heads, shard_key)
        zero = self.heads[0]
        self.beat = zero + b"beat"
        self.nodes = zero + b"nodes"
        self.leader = zero + b"leader"
        self.drained = zero + b"drained"
        self.directory = zero + b"dir"
        self.directory_version = zero + b"dirver"
        self.sys = zero + b"sys"
        self.news = zero + b"news"
        self.records = zero + b"records"
        self.revoked = zero + b"revoked"
        self.revoked_grants = zero + b"ungranted"
        self.controls = zero + b"controls"
        self.nothing = zero + b"nothing"

    def head(self, at: int) -> bytes:
        """The prefix of all keys of a shard."""
        return self.heads[at]

    def shard(self, app_id: str, channel: str) -> int:
        """The shard (0 to 63) of a channel: all its keys and its topic are in it."""
        return self.shards.of(app_id, channel)

    def in_shard(self, at: int) -> "Keys":
        """The names as if every channel was in this shard."""
        made = copy.copy(self)
        made.shards = self.shards.fixed(at)
        return made

    def clock(self, at: int) -> bytes:
        return self.heads[at] + b"clock"

    def worker(self, at: int, w: str) -> bytes:
        return b"%bw:%b" % (self.heads[at], w.encode())

    def counts(self, app_id: str, channel: str) -> bytes:
        return b"%bc:%b:%b" % (self.shards.head(app_id, channel), app_id.encode(), channel.encode())

    def members(self, app_id: str, channel: str) -> bytes:
        return b"%bp:%b:%b" % (self.shards.head(app_id, channel), app_id.encode(), channel.encode())

    def cached(self, app_id: str, channel: str) -> bytes:
        return b"%bk:%b:%b" % (self.shards.head(app_id, channel), app_id.encode(), channel.encode())

    def cache_miss(self, app_id: str, channel: str) -> bytes:
        return b"%bkm:%b:%b" % (self.shards.head(app_id, channel), app_id.encode(), channel.encode())

    def cached_channels(self, at: int, app_id: str) -> bytes:
        return b"%bka:%b" % (self.heads[at], app_id.encode())

    def history(self, app_id: str, channel: str) -> bytes:
        return b"%bh:%b:%b" % (self.shards.head(app_id, channel), app_id.encode(), channel.encode())

    def history_meta(self, app_id: str, channel: str) -> bytes:
        return b"%bhm:%b:%b" % (self.shards.head(app_id, channel), app_id.encode(), channel.encode())

    def histories(self, at: int, app_id: str) -> bytes:
        return b"%bha:%b" % (self.heads[at], app_id.encode())

    def outbox(self, at: int) -> bytes:
        return self.heads[at] + b"out"

    def left(self, at: int) -> bytes:
        return self.heads[at] + b"left"

    def published(self, app_id: str, channel: str, once: str, index: int) -> bytes:
        head = self.shards.head(app_id, channel)
        return b"%bi:%b:%b:%b.%d" % (head, app_id.encode(), channel.encode(), once.encode(), index)

    def request(self, app_id: str, hashed_id: str) -> bytes:
        pseudo = f"%id:{hashed_id}"
        return b"%bi:%b:%b" % (self.shards.head(app_id, pseudo), app_id.encode(), pseudo.encode())

    def resumed(self, app_id: str, user_id: str) -> bytes:
        head = self.shards.head(app_id, user_pseudo(user_id))
        return b"%by:%b:%b" % (head, app_id.encode(), user_id.encode())

    def spent(self, app_id: str, day: str) -> bytes:
        return b"%bd:%b:%b" % (self.shards.head(app_id, "%day"), app_id.encode(), day.encode())

    def counted(self, app_id: str, once: str) -> bytes:
        pseudo = "%day"
        return b"%bi:%b:%b:%b" % (self.shards.head(app_id, pseudo), app_id.encode(), pseudo.encode(), once.encode())

    def rate(self, address: str) -> bytes:
        return b"%brate:%b" % (self.shards.head("", address), address.encode())

    def answers(self, question: str) -> bytes:
        return b"%bans:%b" % (self.heads[0], question.encode())

    def debug(self, app_id: str) -> bytes:
        return b"%bdebug:%b" % (self.heads[0], app_id.encode())

    def occupied(self, at: int, app_id: str) -> bytes:
        return b"%ba:%b" % (self.heads[at], app_id.encode())

    def ticket_key(self, period: int) -> bytes:
        """`period` counts host/ticket_keys.py's periods since 1970."""
        return b"%btickets:%d" % (self.heads[0], period)

    def places(self, app_id: str) -> bytes:
        return b"%bpl:%b" % (self.shards.head(app_id, "%places"), app_id.encode())

    def here_of(self, at: int, process: str) -> bytes:
        """`process` is a worker process, `RUN.K`."""
        return b"%bhere:%b" % (self.heads[at], process.encode())

    def roll_call(self, call: str) -> bytes:
        return b"%bcalled:%b" % (self.shards.head("", call), call.encode())

    def canary(self, at: int, run: str, k: int) -> bytes:
        return b"%bcanary:%b.%d" % (self.heads[at], run.encode(), k)

    def mailbox(self, run: str, k: int) -> bytes:
        return b"%bbox:%b.%d" % (self.shards.head("", f"{run}.{k}"), run.encode(), k)

    def fallback(self, app_key: str, session: str) -> bytes:
        """`session` is N/SESSION of the path."""
        return b"%bfb:%b:%b" % (self.shards.head("", session), app_key.encode(), session.encode())

    def traces(self, run: str) -> bytes:
        return b"%btrace:%b" % (self.shards.head("", run), run.encode())

    def stats(self, process: str) -> bytes:
        """`process` as in `here_of`."""
        return b"%bstats:%b" % (self.heads[0], process.encode())

    def stats_by_app(self, process: str) -> bytes:
        """`process` as in `here_of`."""
        return b"%b:apps" % self.stats(process)

    def topic(self, app_id: str, channel: str) -> bytes:
        return b"%bt:%b:%b" % (self.shards.head(app_id, channel), app_id.encode(), channel.encode())
