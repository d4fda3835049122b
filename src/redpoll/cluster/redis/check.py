"""Checks whether redpoll can rely on this Redis, once, before clients are admitted.

It says what is wrong and what to do, and changes nothing (cluster/redis/README.md "Checking Redis").
"""

import re
from typing import Any, Final, NamedTuple

import hiredis

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link

__all__ = ["RedisCheck", "examine"]

_MIN_VERSION: Final = (7, 0)
# Less than this, and Redis may close a worker's connection while the worker reads many rosters or history pages
# (cluster/README.md "Bounds"). Hard limit, and the soft one that may be exceeded for some time.
_MIN_PUBSUB_BYTES: Final = 256 * 1024 * 1024, 64 * 1024 * 1024
_VERSION: Final = re.compile(rb"^(?:valkey|redis)_version:(\d+)\.(\d+)", re.MULTILINE)


class RedisCheck(NamedTuple):
    """Sentences. `faults`: redpoll can't work with this Redis. `warnings`: it works, at a risk."""

    faults: list[str]
    warnings: list[str]


async def examine(link: Link, keys: Keys) -> RedisCheck:
    """Checks the version, the eviction policy, the output buffers of subscribed connections, and the ACL rights for our
    keys, topics and scripts.

    Raises LinkDown. Questions that the ACL forbids are skipped: only a missing right that redpoll needs is a fault.
    """
    faults: list[str] = []
    warnings: list[str] = []
    info = await _ask(link, b"INFO", b"server")
    if isinstance(info, bytes):
        # Valkey also reports the Redis version that it is compatible with.
        versions = [(int(major), int(minor)) for major, minor in _VERSION.findall(info)]
        if versions and max(versions) < _MIN_VERSION:
            version = ".".join(map(str, max(versions)))
            faults.append(f"Redis {version} is too old: use Redis 7.0 or later, or Valkey")
    policy = await _ask(link, b"CONFIG", b"GET", b"maxmemory-policy")
    if isinstance(policy, dict) and policy.get(b"maxmemory-policy", b"noeviction") != b"noeviction":
        name = policy[b"maxmemory-policy"].decode()
        warnings.append(
            f"maxmemory-policy is {name}: Redis may evict counts and members; set maxmemory-policy noeviction"
        )
    buffers = await _ask(link, b"CONFIG", b"GET", b"client-output-buffer-limit")
    if isinstance(buffers, dict) and _is_too_small(buffers.get(b"client-output-buffer-limit", b"")):
        warnings.append(
            "client-output-buffer-limit pubsub is less than 256mb 64mb 60: Redis may close workers' connections while "
            'they read large member lists; set client-output-buffer-limit "pubsub 256mb 64mb 60"'
        )
    probe = keys.stats("probe")
    for needed in (
        (b"SET", probe, b"1", b"PX", 1000),
        (b"EVAL", b"return redis.call('GET', KEYS[1])", 1, probe),
        (keys.publish, keys.sys, b""),
        (b"PUBSUB", b"SHARDNUMSUB" if keys.sharded else b"NUMSUB", keys.sys),
    ):
        answer = await _ask(link, *needed)
        if isinstance(answer, hiredis.ReplyError) and str(answer).startswith("NOPERM"):
            rules = f"~{keys.prefix}:* &{keys.prefix}:* +@all"
            command = needed[0].decode()
            faults.append(f"the Redis user may not use {command} on our keys or topics; give it the ACL rules {rules}")
            break
    return RedisCheck(faults, warnings)


def _is_too_small(limits: bytes) -> bool:
    """`limits` as CONFIG GET shows them: class, hard limit, soft limit, seconds, for each class. 0 is no limit."""
    words = limits.split()
    if b"pubsub" not in words:
        return False
    at = words.index(b"pubsub")
    return any(
        0 < int(limit) < minimum for limit, minimum in zip(words[at + 1 : at + 3], _MIN_PUBSUB_BYTES, strict=True)
    )


async def _ask(link: Link, *command: Any) -> Any:
    """The reply, or the ReplyError."""
    try:
        return await link.ask(*command)
    except hiredis.ReplyError as error:
        return error
