"""Whether a Redis is one that redpoll can rely on: asked once, before clients are let in (cluster.md 9).

Says what is wrong and what to do about it; changes nothing.
"""

import re
from typing import Any, Final, NamedTuple

import hiredis

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link

__all__ = ["RedisCheck", "examine"]

_OLDEST: Final = (7, 0)
_VERSION: Final = re.compile(rb"^(?:valkey|redis)_version:(\d+)\.(\d+)", re.MULTILINE)


class RedisCheck(NamedTuple):
    """`faults`: it can't work. `warnings`: it will, until something goes wrong. Sentences, both."""

    faults: list[str]
    warnings: list[str]


async def examine(link: Link, keys: Keys) -> RedisCheck:
    """Asks this Redis for its version, its eviction policy, and leave to use our keys and topics.

    Raises LinkDown. What the user may not ask (ACL) is passed over: only what is needed is a fault.
    """
    faults: list[str] = []
    warnings: list[str] = []
    info = await _ask(link, b"INFO", b"server")
    if isinstance(info, bytes):
        # Valkey names the Redis that it is compatible with as well; either is new enough.
        versions = [(int(major), int(minor)) for major, minor in _VERSION.findall(info)]
        if versions and max(versions) < _OLDEST:
            found = ".".join(map(str, max(versions)))
            faults.append(f"Redis {found} is too old: scripts need Redis 7.0, or any Valkey")
    policy = await _ask(link, b"CONFIG", b"GET", b"maxmemory-policy")
    if isinstance(policy, dict) and policy.get(b"maxmemory-policy", b"noeviction") != b"noeviction":
        name = policy[b"maxmemory-policy"].decode()
        warnings.append(
            f"maxmemory-policy is {name}: Redis may evict counts and members; set maxmemory-policy noeviction"
        )
    probe = keys.stats("probe")
    for needed in (
        (b"SET", probe, b"1", b"PX", 1000),
        (b"EVAL", b"return redis.call('GET', KEYS[1])", 1, probe),
        (keys.publish, keys.sys, b"{}"),
    ):
        answer = await _ask(link, *needed)
        if isinstance(answer, hiredis.ReplyError) and str(answer).startswith("NOPERM"):
            rules = f"~{keys.prefix}:* &{keys.prefix}:* +@all"
            faults.append(f"the Redis user may not {needed[0].decode()} our keys or topics; give it {rules}")
            break
    return RedisCheck(faults, warnings)


async def _ask(link: Link, *command: Any) -> Any:
    """The answer, an error included: a refusal is what we want to know."""
    try:
        return await link.ask(*command)
    except hiredis.ReplyError as error:
        return error
