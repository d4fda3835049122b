"""Events on their way into Redis.

Both the HTTP API and client events go through here, so there is one path and one order. Nothing is repeated:
what Redis did not confirm is said to be unconfirmed, and the publisher decides. With a base key that stays the
same (`once`) it may repeat: what was done is not done twice.

What else an event leaves behind, it leaves in the same step: a cached event, a message of the channel's history, a
row that webhooks are made from. Reading history is history.py's.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

import hiredis
import msgspec

from redpoll import _frame
from redpoll.cluster.envelopes import cached_envelope, console_envelope, event_envelope, event_tail
from redpoll.cluster.keys import WATCHED, Keys, cap_of_shard
from redpoll.cluster.link import Done, Link, LinkDown
from redpoll.cluster.scripts import PUBLISH
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.channels import is_cache

__all__ = ["ONCE_S", "Bus", "Cached", "Outgoing", "Unavailable", "confirmed", "read_cached"]

# The answer that says so is to be with the publisher within 2 s.
CONFIRM_S: Final = 1.9

# How long a request with a correlation id, and each of its events, is known as done (cluster.md 2).
ONCE_S: Final = 120

_HELLO: Final = b"{}"

T = TypeVar("T")


class Unavailable(Exception):
    """Redis didn't confirm in time: HTTP 503, which means *not confirmed*, with `Retry-After`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"not confirmed: {self.reason}"


class Outgoing(NamedTuple):
    """One event for one channel. `skip` is a socket id; any tuple of this shape will do."""

    channel: str
    event: str
    data: str
    skip: str | None = None
    user: str | None = None


async def confirmed(link: Link, ask: Callable[[], Awaitable[T]], confirm_s: float = CONFIRM_S) -> T:
    """What Redis answers to `ask`, which is called once it is there. Raises Unavailable: no answer within
    `confirm_s`, or none that helps."""
    try:
        async with asyncio.timeout(confirm_s):
            if not link.up:
                await link.wait_up()
            return await ask()
    except TimeoutError:
        raise Unavailable(f"no answer from Redis within {confirm_s:g} s") from None
    except (LinkDown, hiredis.ReplyError) as error:
        raise Unavailable(str(error)) from None


class Cached(NamedTuple):
    """The event that a cache channel tells to whoever joins, and for how long still."""

    event: str
    data: str
    ttl_s: int


async def read_cached(link: Link, keys: Keys, app_id: str, channel: str) -> Cached | None:
    """What `info=cache` asks for. Raises Unavailable."""
    key = keys.cached(app_id, channel)
    tail, ttl_ms = await confirmed(link, lambda: asyncio.gather(link.ask(b"GET", key), link.ask(b"PTTL", key)))
    if tail is None or ttl_ms == -2:
        return None
    *_, event, data = _frame.envelope(cached_envelope(tail))
    return Cached(event.decode(), data.decode(), max(1, round(ttl_ms / 1000)))


def _row_detail(event: str, data: str, socket: str | None) -> bytes:
    return msgspec.json.encode({"event": event, "data": data, "socket_id": socket})


class _Answers:
    """Gathers the answers to the publishes of one call; the future's result is the receivers of each."""

    __slots__ = ("future", "left", "receivers")

    def __init__(self, count: int, future: "asyncio.Future[list[int]]") -> None:
        self.left = count
        self.future = future
        self.receivers: list[int] = []

    def __call__(self, reply: Any) -> None:
        if self.future.done():
            return
        if isinstance(reply, Exception):
            self.future.set_exception(Unavailable(str(reply)))
            return
        self.receivers.append(reply)
        self.left -= 1
        if self.left == 0:
            self.future.set_result(self.receivers)


class Bus:
    """Publishes over a link. `confirm_s`: how long a publish may wait for Redis, being away included.

    `unkept` counts events that were sent live only, because their app has as many channels with history as it may
    have; `unhooked` client events that no webhook is told of, because too many rows wait to be fetched.
    """

    def __init__(self, link: Link, keys: Keys, *, confirm_s: float = CONFIRM_S) -> None:
        self.published = 0
        self.unconfirmed = 0
        self.unkept = 0
        self.unhooked = 0
        # An epoch is named before it is known whether there has to be a new one, so each publish brings a name.
        self._run = secrets.token_hex(6)
        self._epochs = count(1)
        self._link = link
        self._keys = keys
        self._confirm_s = confirm_s

    def publish(
        self,
        app: App,
        channel: str,
        event: str,
        data: str,
        *,
        skip: str | None = None,
        trace: str | None = None,
        user: str | None = None,
        done: Done,
    ) -> None:
        """A client's event, which is never cached, kept only where the rule of its channel's history says so, and
        told to webhooks where one wants it. `done` gets the number of receiving workers, a ReplyError or a LinkDown;
        the last at once while Redis is away, which for a client event is 4301."""
        rule = app.history_rule(channel) if app.history else None
        if rule is not None and not rule.client_events:
            rule = None
        if app.console_until:
            self._show(app, channel, event, data, skip, user)
        hooked = "c" in app.hooks
        if rule is None and not hooked:
            self._plain(app, channel, event, data, skip, trace, user, done)
            return
        flags = ("h" if rule else "") + ("r" if hooked else "")
        tail = event_tail(event, data, skip=skip, trace=trace, user=user)
        row = (user or "", trace or "", _row_detail(event, data, skip)) if hooked else ()
        self._whole(app, channel, flags, tail, rule, "", 0, row, done)

    def post(
        self,
        app: App,
        item: Outgoing | tuple[str, str, str, str | None, str | None],
        trace: str | None = None,
        *,
        once: str | None = None,
        index: int = 0,
        done: Done,
    ) -> None:
        """A server's event, for callers that gather the answers themselves; `done` as in `publish`.

        It is cached where the channel caches. With `once` (idempotency.py) it is published once, however often
        this is called with the same `once` and `index`, the event's place in its request.
        """
        channel, event, data, skip, user = item
        if app.console_until:
            self._show(app, channel, event, data, skip, user)
        caches = is_cache(channel) and app.cache_ttl_s > 0
        rule = app.history_rule(channel) if app.history else None
        if not caches and rule is None and once is None:
            self._plain(app, channel, event, data, skip, trace, user, done)
            return
        flags = ("c" if caches else "") + ("h" if rule else "") + ("i" if once is not None else "")
        tail = event_tail(event, data, skip=skip, trace=trace, user=user)
        self._whole(app, channel, flags, tail, rule, once or "", index, (), done)

    def _show(self, app: App, channel: str, event: str, data: str, skip: str | None, user: str | None) -> None:
        # A copy for the dashboard's console while somebody watches; nobody waits for it.
        if app.console_until > time.time():
            copy = console_envelope(channel, event_envelope(event, data, skip=skip, user=user))
            self._link.call(self._keys.publish, self._keys.topic(app.id, WATCHED), copy)

    def _plain(
        self,
        app: App,
        channel: str,
        event: str,
        data: str,
        skip: str | None,
        trace: str | None,
        user: str | None,
        done: Done,
    ) -> None:
        envelope = event_envelope(event, data, skip=skip, trace=trace, user=user)
        self.published += 1
        self._link.call(self._keys.publish, self._keys.topic(app.id, channel), envelope, done=done)

    def _whole(
        self,
        app: App,
        channel: str,
        flags: str,
        tail: bytes,
        rule: HistoryRule | None,
        once: str,
        index: int,
        row: Sequence[bytes | str],
        done: Done,
    ) -> None:
        keys = self._keys
        args: list[bytes | str | int] = [keys.publish, keys.topic(app.id, channel), flags, tail, app.cache_ttl_s]
        args += (ONCE_S, app.id, channel)
        if rule is not None:
            args += (
                rule.keep,
                rule.seconds,
                cap_of_shard(app.max_history_channels),
                f"{self._run}{next(self._epochs):x}",
                rule.era,
            )
        elif row:
            args += (0, 0, 0, "", "")
        args += row
        self.published += 1
        names = keys.publishing(app.id, channel, flags, once, index)
        self._link.run(PUBLISH, names, args, partial(self._published, done))

    def _published(self, done: Done, reply: Any) -> None:
        # The script's answer as a plain PUBLISH would give it.
        if isinstance(reply, list):
            if len(reply) > 2:
                self.unkept += reply[4]
                self.unhooked += reply[5]
            done(reply[1])
        else:
            done(reply)

    async def publish_all(
        self,
        app: App,
        items: Sequence[Outgoing | tuple[str, str, str, str | None, str | None]],
        trace: str | None = None,
        once: str | None = None,
    ) -> list[int]:
        """All events in one write and in the order given, as `post` publishes them; returns the number of
        receiving workers of each.

        Raises Unavailable when Redis hasn't confirmed every one of them within `confirm_s`. Some of them may
        have been delivered then; the same call with the same `once` delivers the others.
        """
        if not items:
            return []
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._confirm_s):
                if not self._link.up:
                    await self._link.wait_up()
                answers = _Answers(len(items), future)
                for index, item in enumerate(items):
                    self.post(app, item, trace, once=once, index=index, done=answers)
                return await future
        except TimeoutError:
            self.unconfirmed += len(items)
            raise Unavailable(f"no answer from Redis within {self._confirm_s:g} s") from None
        except Unavailable:
            self.unconfirmed += len(items)
            raise

    async def workers_listening(self) -> int:
        """How many workers would hear a message on `sys` now: after a break, publishes wait until that is
        all of them (cluster.md 6). 0 while Redis is away."""
        if not self._link.up:
            return 0
        try:
            async with asyncio.timeout(self._confirm_s):
                return int(await self._link.ask(self._keys.publish, self._keys.sys, _HELLO))
        except (TimeoutError, LinkDown, hiredis.ReplyError):
            return 0
