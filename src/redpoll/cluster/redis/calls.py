"""Calls of Redis: who gets their replies, and how they end without one."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Done", "LinkDown", "Publishes", "Refused", "Replies", "ShardCall", "Topics", "settle"]

# Takes a reply, a hiredis.ReplyError or a LinkDown. If it has an attribute `over` that is true, nobody waits for the
# reply any more, and a command that isn't written yet is left out.
Done = Callable[[Any], None]


class LinkDown(Exception):
    """A call ended without an answer. `sent` False: Redis did not carry it out. True: it may have."""

    def __init__(self, sent: bool) -> None:
        super().__init__(sent)
        self.sent = sent

    def __str__(self) -> str:
        return "the connection to Redis broke before the answer" if self.sent else "Redis is not connected"


class Refused(LinkDown):
    """A publish was refused at once, because it would not be confirmed in time."""

    def __init__(self, reason: str) -> None:
        super().__init__(sent=False)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def settle(future: "asyncio.Future[Any]", reply: Any) -> None:
    """`done` of a call that a coroutine awaits: its future gets the reply or the error."""
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


class Replies:
    """`done` for several commands: settles `whole` with their replies, in order, or with the first error."""

    __slots__ = ("count", "replies", "whole")

    def __init__(self, count: int, whole: "asyncio.Future[list[Any]]") -> None:
        self.count = count
        self.replies: list[Any] = []
        self.whole = whole

    def __call__(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            settle(self.whole, reply)
        self.replies.append(reply)
        if len(self.replies) == self.count:
            settle(self.whole, self.replies)


class ShardCall:
    """The `done` of a call for one shard of a Redis Cluster. `RedisConnection.abandon` ends those of single shards."""

    __slots__ = ("done", "shard")

    def __init__(self, shard: int, done: Done) -> None:
        self.shard = shard
        self.done = done

    @property
    def over(self) -> bool:
        return getattr(self.done, "over", False)

    def __call__(self, reply: Any) -> None:
        self.done(reply)


class Topics:
    """The entry of a SUBSCRIBE or UNSUBSCRIBE among the awaited answers. It ends with the last of `left` pushes, or
    with one error, which is a reply."""

    __slots__ = ("done", "kind", "left", "topics")

    def __init__(self, kind: bytes, topics: Sequence[bytes], done: Done) -> None:
        self.kind = kind
        self.topics = topics
        self.left = len(topics)
        self.done = done

    def is_confirmed_by(self, kind: bytes, topic: bytes) -> bool:
        return kind == self.kind and topic in self.topics

    def __call__(self, reply: Any) -> None:
        self.done(reply)


class Publishes(Protocol):
    """`done` of several publishes that were written together: called with the reply of each, in order. Where replies
    come from several masters, those of `of_each` are called instead, one for each publish."""

    def __call__(self, reply: Any) -> None: ...
    def of_each(self) -> Sequence[Done]: ...
