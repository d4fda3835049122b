"""Publishes events to Redis: those of the HTTP API and those of clients, in one order.

Publishes are never repeated here. If Redis doesn't confirm one, the publisher learns that it is unconfirmed, and
decides. With an idempotency nonce (`once`) the publisher may repeat it safely.

The script `publish` caches an event, stores it in the channel's history or writes its webhook row in the same step as
it publishes it. Events that need none of this are a plain PUBLISH. history.py reads what is stored here.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

import hiredis
import msgspec

from redpoll import _frame
from redpoll._publish import CACHED, RULED, Call, Commands
from redpoll.cluster.envelopes import cached_envelope, console_envelope, event_envelope, event_tail
from redpoll.cluster.hooks import Hook
from redpoll.cluster.publish_call import CacheTerms, Flag, PublishRefused, RowTerms, StoreTerms, decode, encode
from redpoll.cluster.redis.calls import Publishes, Refused
from redpoll.cluster.redis.keys import CONSOLE_TOPIC, Keys, cap_of_shard
from redpoll.cluster.redis.link import Done, Link, LinkDown
from redpoll.cluster.redis.primary import Checked, question_of
from redpoll.cluster.redis.scripts import PUBLISH
from redpoll.protocol.apps import App, HistoryRule

__all__ = ["MARKED_S", "ONCE_S", "Bus", "Cached", "Unavailable", "ask_within", "read_cached"]

# A publisher gets its answer within 2 s, also if Redis didn't confirm.
CONFIRM_S: Final = 1.9

# How long a request with a correlation id is remembered. What was done for it is longer, because a repetition at the
# last moment may take its time.
ONCE_S: Final = 120
MARKED_S: Final = ONCE_S + 10

T = TypeVar("T")


class Unavailable(Exception):
    """Redis didn't confirm in time. The HTTP API answers 503 with `Retry-After`: what was asked may have happened."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"not confirmed: {self.reason}"


async def ask_within(link: Link, ask: Callable[[], Awaitable[T]], confirm_s: float = CONFIRM_S) -> T:
    """The answer to `ask`, which is called when Redis is connected. Raises Unavailable: no answer within `confirm_s`,
    or an error. In a Cluster, `ask` is called at once while shards are lost, and again if its own is one of them."""
    try:
        async with asyncio.timeout(confirm_s):
            if not link.up and link.kept_shards:
                try:
                    return await ask()
                except LinkDown as error:
                    if error.sent:
                        raise
            if not link.up:
                await link.wait_up()
            return await ask()
    except TimeoutError:
        raise Unavailable(f"no answer from Redis within {confirm_s:g} s") from None
    except (LinkDown, hiredis.ReplyError) as error:
        raise Unavailable(str(error)) from None


class Cached(NamedTuple):
    """The event that a cache channel sends to joiners, and in how many seconds it expires."""

    event: str
    data: str
    ttl_s: int


async def read_cached(link: Link, keys: Keys, app_id: str, channel: str) -> Cached | None:
    """A channel's cached event, for `info=cache`. Raises Unavailable."""
    key = keys.cached(app_id, channel)
    tail, ttl_ms = await ask_within(link, lambda: asyncio.gather(link.ask(b"GET", key), link.ask(b"PTTL", key)))
    if tail is None or ttl_ms == -2:
        return None
    *_, event, data = _frame.envelope(cached_envelope(tail))
    return Cached(event.decode(), data.decode(), max(1, round(ttl_ms / 1000)))


def _row_detail(event: str, data: str, socket: str | None) -> bytes:
    return msgspec.json.encode({"event": event, "data": data, "socket_id": socket})


class _ScriptAnswer:
    """Passes on to `done` what a plain PUBLISH would answer."""

    __slots__ = ("bus", "done")

    def __init__(self, bus: "Bus", done: Done) -> None:
        self.bus = bus
        self.done = done

    @property
    def over(self) -> bool:
        return getattr(self.done, "over", False)

    def __call__(self, outcome: Any) -> None:
        if isinstance(outcome, list):
            try:
                reply = decode(outcome)
            except PublishRefused as refusal:
                self.done(refusal)
                return
            self.bus.unkept += reply.over_cap
            self.bus.unhooked += reply.dropped
            self.bus.uncached += reply.uncached
            self.done(reply.receivers)
        else:
            self.done(outcome)


class Bus:
    """Publishes over a link. `confirm_s` bounds the wait for Redis' answer to a question.

    `published` counts events. `unkept` counts events that were sent but not stored, because their app
    has as many channels with history as it may. `uncached` counts those that were sent but not cached, because their
    app has as many channels with a cached event as it may. `unhooked` counts client events without a webhook row,
    because too many rows are unread.
    """

    def __init__(self, link: Link, keys: Keys) -> None:
        self.published = 0
        self.unkept = 0
        self.uncached = 0
        self.unhooked = 0
        # The caller names the epoch before it knows whether the history needs a new one, so each publish brings a name.
        self._run = secrets.token_hex(6)
        self._epochs = count(1)
        self.link = link
        self._keys = keys
        # After the events of `post`, `send` and `send_now`, Redis is asked whether it is the primary (primary.py), and
        # their `done` gets 1, or why they are not confirmed. Not in a Cluster: a former master of a slot forwards what
        # is published there to the present one.
        self.checks = not keys.sharded
        self._question = question_of(keys.nothing)

    def publish(
        self,
        app: App,
        channel: str,
        event: str,
        data: str,
        *,
        skip: str | None = None,
        trace: str | None = None,
        row_trace_id: str | None = None,
        user: str | None = None,
        done: Done,
    ) -> None:
        """A client's event. `trace` goes to the workers, if it is traced, and `row_trace_id` into its webhook row.

        It is never cached; it is stored only if the channel's history rule says so, and gets a webhook row if an
        endpoint wants it. `done` gets the number of receiving workers, a ReplyError or a LinkDown. While Redis is
        disconnected it gets LinkDown at once, and the client gets 4301.
        """
        rule = app.history_rule(channel) if app.history else None
        if rule is not None and not rule.client_events:
            rule = None
        if app.console_until:
            self._copy_to_console(app, channel, event, data, skip, user)
        hooked = Hook.CLIENT_EVENTS in app.hooks
        if rule is None and not hooked:
            self._plain(app, channel, event, data, skip, trace, user, done)
            return
        flags = (Flag.HISTORY if rule else "") + (Flag.ROW if hooked else "")
        tail = event_tail(event, data, skip=skip, trace=trace, user=user)
        row = RowTerms(user or "", row_trace_id or "", _row_detail(event, data, skip)) if hooked else None
        self._run_script(app, channel, flags, tail, rule, "", 0, row, done)

    def post(self, call: Call, trace: str | None = None, *, once: str | None = None, done: Publishes) -> None:
        """A server's events, in order. `done` gets the reply to each, or why there is none, and then the outcome of the
        check (`checks`).

        They are cached on cache channels and stored on channels with history. With `once` (idempotency.py), repetitions
        of the call with the same `once` publish each event only once. A `done` gets PublishRefused if nothing was
        published on its channel (publish_call.py).
        """
        app, keys = call.app, self._keys
        if once is None and not app.console_until and call.is_plain:
            self.send(call.pack(keys.publish, keys.shards, trace), done)
            return
        needs, of_each, index = call.needs(), done.of_each(), 0
        for at, (event, data, channels, skip) in enumerate(call.events_of()):
            ends = at in call.ends
            for channel in channels:
                self._post_one(
                    app,
                    channel,
                    event,
                    data,
                    skip,
                    needs[index],
                    trace,
                    ends=ends,
                    once=once,
                    index=index,
                    done=of_each[index],
                )
                index += 1
        self._check(done)

    def send(self, commands: Commands, done: Publishes) -> None:
        """Events that are commands already (`Call.pack`); `done` as in `post`."""
        self.published += commands.count
        self.link.publish(commands, done)
        self._check(done)

    def send_now(self, commands: Commands, done: Publishes) -> None:
        """As `send`, written now, not at the end of this pass of the loop."""
        if self.checks:
            self.published += commands.count
            self.link.publish_now(commands, done, self._question, Checked(done))
        else:
            self.send(commands, done)
            self.link.flush()

    def _check(self, done: Any) -> None:
        if self.checks:
            self.link.call_packed(self._question, Checked(done))

    def _post_one(
        self,
        app: App,
        channel: str,
        event: str,
        data: str,
        skip: str | None,
        needs: int,
        trace: str | None,
        *,
        ends: bool,
        once: str | None,
        index: int,
        done: Done,
    ) -> None:
        if self._keys.sharded:
            reason = self.link.refusal_of(self._keys.topic(app.id, channel))
            if reason:
                asyncio.get_running_loop().call_soon(done, Refused(reason))
                return
        if app.console_until:
            self._copy_to_console(app, channel, event, data, skip, None)
        rule = app.history_rule(channel) if needs & RULED else None
        flags = (
            (Flag.CACHE if needs & CACHED else "")
            + (Flag.HISTORY if rule else "")
            + (Flag.ONCE if once is not None else "")
            + (Flag.END if rule and ends else "")
        )
        if not flags:
            self._plain(app, channel, event, data, skip, trace, None, done)
            return
        tail = event_tail(event, data, skip=skip, trace=trace)
        self._run_script(app, channel, flags, tail, rule, once or "", index, None, done)

    def _copy_to_console(
        self, app: App, channel: str, event: str, data: str, skip: str | None, user: str | None
    ) -> None:
        # A copy for the dashboard's console while it is open. Its outcome doesn't matter.
        if app.console_until > time.time():
            copy = console_envelope(channel, event_envelope(event, data, skip=skip, user=user))
            self.link.call(self._keys.publish, self._keys.topic(app.id, CONSOLE_TOPIC), copy)

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
        keys = self._keys
        command = _frame.pack_publish(keys.publish, keys.shards, app.id, channel, event, data, skip, trace, user)
        self.published += 1
        self.link.call_packed(command, done)

    def shard(self, app_id: str, channel: str) -> int:
        """As `Keys.shard`."""
        return self._keys.shard(app_id, channel)

    @property
    def refusal(self) -> str:
        """Why `post`, `send` and `send_now` would not be confirmed (`Link.refusal`); "" if nothing is known."""
        return self.link.refusal

    def _run_script(
        self,
        app: App,
        channel: str,
        flags: str,
        tail: bytes,
        rule: HistoryRule | None,
        once: str,
        index: int,
        row: RowTerms | None,
        done: Done,
    ) -> None:
        store = None
        if rule is not None:
            epoch = f"{self._run}{next(self._epochs):x}"
            store = StoreTerms(rule.keep, rule.seconds, cap_of_shard(app.max_history_channels), epoch, rule.era)
        cache = None
        if Flag.CACHE in flags:
            cache = CacheTerms(app.cache_ttl_s, cap_of_shard(app.max_cached_channels))
        names, args = encode(self._keys, app.id, channel, flags, tail, cache, MARKED_S, store, row, once, index)
        self.published += 1
        self.link.run(PUBLISH, names, args, _ScriptAnswer(self, done))
