"""Every key and topic in Redis: one table, and the functions that build the names.

Shape, type and lifetime are said here and in cluster.md 2; what is done with a key is the business of the
scripts and of the modules beside this one.
"""

from binascii import crc_hqx
from typing import Final, NamedTuple
from zlib import crc32

__all__ = ["SHARDS", "TABLE", "TAGS", "WATCHED", "Key", "Keys", "cap_of_shard", "shard"]

SHARDS: Final = 64

# In the place of a channel: the topic that an app's console hears.
WATCHED: Final = "%console"


def _tags() -> tuple[bytes, ...]:
    # The smallest decimal number in each 64th of Redis Cluster's 16,384 slots, so that the shards spread
    # evenly over any number of masters; crc_hqx from 0 is Redis' CRC16.
    tags: dict[int, bytes] = {}
    number = 0
    while len(tags) < SHARDS:
        tag = b"%d" % number
        tags.setdefault((crc_hqx(tag, 0) % 16384) // 256, tag)
        number += 1
    return tuple(tags[at] for at in range(SHARDS))


TAGS: Final = _tags()


def shard(app_id: str, channel: str) -> int:
    """The shard (0 to 63) in which all keys and the topic of a channel lie; cluster.md rule 7."""
    return crc32(f"{app_id}:{channel}".encode()) & (SHARDS - 1)


def cap_of_shard(most: int) -> int:
    """How many channels with history an app that may have `most` may have in one shard: twice an even share, since
    channels don't fall evenly into the 64 of them, and at least one."""
    return max(1, -(-2 * most // SHARDS))


class Key(NamedTuple):
    """A row of the table. `{T}` is the literal hash tag of the shard, `{T0}` that of shard 0."""

    pattern: str
    type: str
    holds: str
    lives: str
    written_by: str
    deleted_by: str


TABLE: Final = (
    Key("{T}:clock", "string", "last stamp of the shard", "for ever", "hold", "–"),
    Key(
        "{T}:w:W",
        "hash",
        "gen; per channel held A:C → kind and count (c12)",
        "the incarnation",
        "register, hold",
        "bury",
    ),
    Key("{T}:c:A:C", "hash", "W → subscriptions; sum: subscription_count", "while held", "hold", "hold"),
    Key("{T}:n:A:C", "string", "subscription_count last told, and when (ms)", "60 s", "hold", "expiry"),
    Key("{T}:k:A:C", "string", "cached event (envelope tail)", "cache_ttl_s", "publish", "expiry"),
    Key("{T}:km:A:C", "string", "that nothing is cached was told", "60 s", "hold", "publish, expiry"),
    Key(
        "{T}:h:A:C",
        "stream",
        "stamp-0 → p offset before, d envelope tail",
        "rule's seconds",
        "publish",
        "clear, expiry",
    ),
    Key(
        "{T}:hm:A:C",
        "hash",
        "e epoch, s last offset, t seconds kept",
        "31 days after the last publish; made by hold: the rule's seconds + 1 day",
        "publish, hold, clear",
        "expiry, publish beyond the cap",
    ),
    Key(
        "{T}:ha:A",
        "zset",
        "channels with history, by the ms at which it expires",
        "60 days",
        "publish",
        "publish, clear",
    ),
    Key("{T}:out", "stream", "webhook rows: stamp-0 → k a c u t x i", "about 20,000", "hold, publish, drain", "drain"),
    Key(
        "{T}:left",
        "zset",
        "v:A:C and r:A:C:U: vacated and removed, by the ms of the leave",
        "the debounce",
        "hold",
        "hold (came back), drain",
    ),
    Key("{T}:p:A:C", "hash", "user id → W W…\\n<user_info or empty>", "while held", "hold", "hold"),
    Key("{T}:a:A", "set", "occupied channels", "while any", "hold", "hold"),
    Key(
        "{T}:y:A:U",
        "string",
        "offset from which a user's latest closed socket may have missed something",
        "user_resume_s",
        "worker",
        "expiry",
    ),
    Key("{T}:d:A:YYYYMMDD", "string", "messages of that UTC day", "3 days", "spend", "expiry"),
    Key(
        "{T}:i:A:%id:H",
        "string",
        "a request with a correlation id: its hash, nonce and answer",
        "120 s",
        "control",
        "expiry, control",
    ),
    Key("{T}:i:A:C:ONCE.INDEX", "string", "this event of that request is published", "120 s", "publish", "expiry"),
    Key("{T0}:beat", "hash", "W → beats", "until reaped or ended", "beat", "reaper, worker at a clean end"),
    Key("{T0}:dir", "hash", "app id → record as JSON", "for ever", "dir_put", "dir_put"),
    Key("{T0}:dirver", "string", "version of the directory", "for ever", "dir_put", "–"),
    Key("{T0}:stats:W", "string", "counters of a worker as JSON", "15 s", "worker", "expiry"),
    Key("{T0}:trace", "stream", "spans of traced events, in batches", "about 10,000", "worker", "MAXLEN"),
    Key("{T0}:ans:ID", "list", "answers of workers to a question", "10 s", "worker", "expiry"),
    Key("{T}:t:A:C", "topic", "events and member deltas of a channel", "–", "publishers, hold", "–"),
    Key("{T}:t:A:%console", "topic", "copies of an app's events, while somebody watches", "–", "publishers", "–"),
    Key("{T0}:sys", "topic", "messages to every worker, JSON", "–", "dir_put, control", "–"),
)


class Keys:
    """The names, under one prefix. Built as bytes, since that is what goes to Redis.

    Where a channel is asked for, `%u:U` (a signed-in user's connections) and `%conn` (an app's) will do: `%`
    can't occur in the name of a channel.

    `sharded` turns PUBLISH and SUBSCRIBE into their sharded twins, which Redis Cluster wants.
    """

    def __init__(self, prefix: str = "rp", *, sharded: bool = False) -> None:
        self.prefix = prefix
        self.sharded = sharded
        self.publish = b"SPUBLISH" if sharded else b"PUBLISH"
        self._heads = tuple(b"%b:{%b}:" % (prefix.encode(), tag) for tag in TAGS)
        zero = self._heads[0]
        self.beat = zero + b"beat"
        self.directory = zero + b"dir"
        self.directory_version = zero + b"dirver"
        self.sys = zero + b"sys"
        self.traces = zero + b"trace"

    def clock(self, at: int) -> bytes:
        return self._heads[at] + b"clock"

    def worker(self, at: int, w: str) -> bytes:
        return b"%bw:%b" % (self._heads[at], w.encode())

    def counts(self, app_id: str, channel: str) -> bytes:
        return b"%bc:%b:%b" % (self._heads[shard(app_id, channel)], app_id.encode(), channel.encode())

    def members(self, app_id: str, channel: str) -> bytes:
        return b"%bp:%b:%b" % (self._heads[shard(app_id, channel)], app_id.encode(), channel.encode())

    def told_count(self, app_id: str, channel: str) -> bytes:
        return b"%bn:%b:%b" % (self._heads[shard(app_id, channel)], app_id.encode(), channel.encode())

    def cached(self, app_id: str, channel: str) -> bytes:
        return b"%bk:%b:%b" % (self._heads[shard(app_id, channel)], app_id.encode(), channel.encode())

    def missed(self, app_id: str, channel: str) -> bytes:
        return b"%bkm:%b:%b" % (self._heads[shard(app_id, channel)], app_id.encode(), channel.encode())

    def history(self, app_id: str, channel: str) -> bytes:
        return b"%bh:%b:%b" % (self._heads[shard(app_id, channel)], app_id.encode(), channel.encode())

    def history_meta(self, app_id: str, channel: str) -> bytes:
        return b"%bhm:%b:%b" % (self._heads[shard(app_id, channel)], app_id.encode(), channel.encode())

    def histories(self, at: int, app_id: str) -> bytes:
        return b"%bha:%b" % (self._heads[at], app_id.encode())

    def outbox(self, at: int) -> bytes:
        return self._heads[at] + b"out"

    def left(self, at: int) -> bytes:
        return self._heads[at] + b"left"

    def published(self, app_id: str, channel: str, once: str, index: int) -> bytes:
        head = self._heads[shard(app_id, channel)]
        return b"%bi:%b:%b:%b.%d" % (head, app_id.encode(), channel.encode(), once.encode(), index)

    def request(self, app_id: str, hashed_id: str) -> bytes:
        pseudo = f"%id:{hashed_id}"
        return b"%bi:%b:%b" % (self._heads[shard(app_id, pseudo)], app_id.encode(), pseudo.encode())

    def resumed(self, app_id: str, user_id: str) -> bytes:
        head = self._heads[shard(app_id, f"%u:{user_id}")]
        return b"%by:%b:%b" % (head, app_id.encode(), user_id.encode())

    def spent(self, app_id: str, day: str) -> bytes:
        return b"%bd:%b:%b" % (self._heads[shard(app_id, "%day")], app_id.encode(), day.encode())

    def answers(self, question: str) -> bytes:
        return b"%bans:%b" % (self._heads[0], question.encode())

    def hold(self, w: str, app_id: str, channel: str, kind: str, flags: str) -> list[bytes]:
        """The keys of a call of `hold`, in its order."""
        at = shard(app_id, channel)
        names = [self.worker(at, w), self.counts(app_id, channel), self.occupied(at, app_id), self.clock(at)]
        names += (self.outbox(at), self.left(at))
        if kind == "p":
            names.append(self.members(app_id, channel))
        if "s" in flags:
            names.append(self.told_count(app_id, channel))
        if "c" in flags:
            names.append(self.cached(app_id, channel))
            if "X" in flags:
                names.append(self.missed(app_id, channel))
        if "h" in flags:
            names += (self.history_meta(app_id, channel), self.histories(at, app_id))
        return names

    def publishing(self, app_id: str, channel: str, flags: str, once: str, index: int) -> list[bytes]:
        """The keys of a call of `publish`, in its order."""
        at = shard(app_id, channel)
        head, tail = self._heads[at], f"{app_id}:{channel}".encode()
        names: list[bytes] = []
        if "c" in flags:
            names += (b"%bk:%b" % (head, tail), b"%bkm:%b" % (head, tail))
        if "h" in flags or "r" in flags:
            names.append(head + b"clock")
        if "h" in flags:
            names += (b"%bh:%b" % (head, tail), b"%bhm:%b" % (head, tail), b"%bha:%b" % (head, app_id.encode()))
        if "r" in flags:
            names.append(head + b"out")
        if "i" in flags:
            names.append(b"%bi:%b:%b.%d" % (head, tail, once.encode(), index))
        return names

    def occupied(self, at: int, app_id: str) -> bytes:
        return b"%ba:%b" % (self._heads[at], app_id.encode())

    def stats(self, w: str) -> bytes:
        return b"%bstats:%b" % (self._heads[0], w.encode())

    def topic(self, app_id: str, channel: str) -> bytes:
        return b"%bt:%b:%b" % (self._heads[shard(app_id, channel)], app_id.encode(), channel.encode())
