"""All readers of a worker's channels: where they begin, how many there are, and when they end."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from redpoll.loop.slices import Slices, walk
from redpoll.protocol.access import REVOKED
from redpoll.protocol.errors import ApiError
from redpoll.protocol.grants import LEEWAY_S, Grant
from redpoll.protocol.streams import Live
from redpoll.worker.streams.formats import KEEP_ALIVE_S, lifetime_s
from redpoll.worker.streams.pulls import Pulls
from redpoll.worker.streams.reader import Reader
from redpoll.worker.streams.tail import Follower, Tail

if TYPE_CHECKING:
    from redpoll.cluster.lifecycle import Life
    from redpoll.protocol.apps import App
    from redpoll.worker.hub.addresses import Addresses
    from redpoll.worker.hub.hub import Hub

__all__ = ["Streams"]

# A long poll without a message is answered after this time.
POLL_S: Final = 15.0
# A stream ends after its grant, never before.
_GRANT_MARGIN_S: Final = 0.5
# A tail without readers stays for those who come again.
_LINGER_S: Final = 10.0
_TICK_S: Final = 5.0
# After this time without events a stream gets a comment now, because the next tick may be too late.
_QUIET_S: Final = KEEP_ALIVE_S - _TICK_S
# A history in which nothing was published expires after 5 min, others a day after their messages.
_BEGIN_AGAIN_TICKS: Final = round(60 / _TICK_S)
_RENEW_TICKS: Final = round(3_600 / _TICK_S)
_DRAIN_STEP_S: Final = 0.05
# Bounds what lingers.
_MAX_IDLE_TAILS: Final = 1_000


class Streams:
    """`apps`: those of the directory, by id; not a copy. `named_by_proxy` and `addresses`: as Addresses.enter.
    `ready()`: Redis is connected. `pulls`: the requests that pull webhooks. Call `serve_by` first."""

    def __init__(
        self,
        hub: Hub,
        apps: Mapping[str, App],
        addresses: Addresses,
        life: Life,
        ready: Callable[[], bool],
        *,
        named_by_proxy: bool,
    ) -> None:
        self.apps = apps
        self.admission = hub.admission
        self.addresses = addresses
        self.named_by_proxy = named_by_proxy
        self.grants = hub.revoked_grants
        self.history = hub.registry.history
        # Requests that control allowed, by how they read, since the start.
        self.requests: dict[Live, int] = dict.fromkeys(Live, 0)
        self._listening = hub.registry.listening
        self.pulls = Pulls(self._listening, lambda: life.admits)
        self._flusher = hub.flusher
        self._sent = hub.sent
        self._life = life
        self._ready = ready
        self._tails: dict[tuple[str, str], Tail] = {}
        # Those that read live, and those that carry a grant, by app.
        self._live: dict[str, dict[Reader, None]] = {}
        self._granted: dict[str, dict[Reader, None]] = {}
        self._ending: deque[Callable[[], None]] = deque()
        self._slices = Slices(self._end_one)
        # Tails that this tick has yet to look at, and those that it found without readers.
        self._unseen: deque[Tail] = deque()
        self._idle_tails = 0
        self._looks = Slices(self._look_at_one)
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        # Grows with each drain: an earlier one then ends.
        self._drains = 0
        self.when_read: Callable[[Any, Callable[[], None]], None]
        self.wait: Callable[[Any, float], None]

    def serve_by(
        self, when_read: Callable[[Any, Callable[[], None]], None], wait: Callable[[Any, float], None]
    ) -> None:
        """The connections' server, which needs this first: `when_read` and `wait` are those of HttpServer."""
        self.when_read, self.wait = when_read, wait
        self.pulls.when_read = when_read

    def __len__(self) -> int:
        """How many clients read live."""
        return sum(map(len, self._live.values()))

    @property
    def by_app(self) -> Mapping[str, int]:
        """The clients that read live, by app id."""
        return {app_id: len(readers) for app_id, readers in self._live.items()}

    def count(self, app_id: str, channel: str = "") -> int:
        """The clients that read live, of an app ("" for all) or of one of its channels."""
        if channel:
            tail = self._tails.get((app_id, channel))
            return 0 if tail is None else len(tail.readers)
        return len(self._live.get(app_id, ())) if app_id else len(self)

    @property
    def tails(self) -> int:
        """How many channels are read, or were a moment ago."""
        return len(self._tails)

    # -- readers -------------------------------------------------------------------------------------------

    def check_admits(self) -> None:
        """Raises ApiError `unavailable` while this worker admits no clients."""
        if not self._life.admits or not self._ready():
            raise ApiError("unavailable", "this server isn't ready, or is draining; send the request again")

    def carries_grant(self, reader: Reader) -> None:
        """The reader ends when its grant does."""
        self._granted.setdefault(reader.app_id, {})[reader] = None

    def entered(self, reader: Reader) -> None:
        """A client reads live from now on: its time begins."""
        self._live.setdefault(reader.app_id, {})[reader] = None
        seconds = lifetime_s() if reader.live.is_stream else POLL_S
        if reader.grant is not None:
            left_s = reader.grant.expires_at + LEEWAY_S - self.grants.clock()
            seconds = min(seconds, max(0, left_s) + _GRANT_MARGIN_S)
        self.wait(reader.stream, seconds)

    def left(self, reader: Reader) -> None:
        """The reader is over. Idempotent."""
        for table in (self._live, self._granted):
            readers = table.get(reader.app_id)
            if readers is not None:
                readers.pop(reader, None)
                if not readers:
                    del table[reader.app_id]

    def tail_of(self, app_id: str, channel: str) -> Tail:
        """The tail of a channel, which hears its topic from now on."""
        tail = self._tails.get((app_id, channel))
        if tail is None:
            topic = self._listening.topic(app_id, channel)
            tail = Tail(app_id, channel, topic, self.history, self._flusher, self._sent, self._dismiss)
            self._tails[app_id, channel] = tail
            self._listening.add(tail)
            self._start_timer()
        return tail

    def at_end(self, app_id: str, channel: str, position: tuple[str, int], is_empty: bool) -> None:
        """A page shows a reader that nothing was published after this position; `is_empty`: nor since the history
        began. A history without messages expires unless it is begun again: now, and from time to time while the
        channel's tail is there."""
        tail = self._tails.get((app_id, channel))
        if is_empty and tail is not None:
            tail.unpublished = position
        # An offset is the time of its message in µs.
        self._begin_again(app_id, channel, math.inf if is_empty else time.time() - position[1] / 1_000_000)

    def _begin_again(self, app_id: str, channel: str, quiet_s: float = math.inf) -> None:
        app = self.apps.get(app_id)
        rule = None if app is None else app.history_rule(channel)
        if app is not None and rule is not None and quiet_s > rule.seconds:
            # If Redis doesn't answer now, it does when this is repeated.
            self.history.begin(app, channel, rule, lambda outcome: None)

    # -- ends ----------------------------------------------------------------------------------------------

    def end_app(self, app_id: str, error: ApiError) -> None:
        """The app's clients read no longer: it was deleted, or disabled."""
        for reader in self._live.get(app_id, ()):
            self._ending.append(partial(reader.end, error))
        self._slices.start()

    async def end_granted(self, app_id: str, is_over: Callable[[str, Grant], bool]) -> int:
        """End the readers for whose channel and grant `is_over` is true. Returns how many."""
        ended = 0

        def look(reader: Reader) -> None:
            nonlocal ended
            is_open = reader in self._granted.get(app_id, ())
            if is_open and reader.grant is not None and is_over(reader.channel, reader.grant):
                ended += 1
                reader.end(ApiError("unauthorized", REVOKED))

        await walk(list(self._granted.get(app_id, ())), look)
        return ended

    def _dismiss(self, reader: Follower) -> None:
        self._ending.append(reader.dismiss)
        self._slices.start()

    def _end_one(self) -> bool:
        if self._ending:
            self._ending.popleft()()
        return bool(self._ending)

    def _each_live(self) -> Iterator[Reader]:
        for readers in self._live.values():
            yield from readers

    async def drain(self, within_s: float) -> None:
        """End all streams and long polls, evenly over this time: their clients read on elsewhere. A few take less time.
        At most one drain runs; a new one replaces it."""
        self._drains = number = self._drains + 1
        self.pulls.drain()
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        readers = deque(self._each_live())
        while readers and number == self._drains:
            left_s = until - loop.time()
            for _ in range(max(1, round(len(readers) * _DRAIN_STEP_S / left_s)) if left_s > 0 else len(readers)):
                if readers:
                    readers.popleft().close()
            if readers:
                await asyncio.sleep(_DRAIN_STEP_S)

    def keep(self) -> None:
        """Leave the streams and long polls that no drain has ended yet."""
        self._drains += 1

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- time ----------------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._ticks += 1
        if not self._unseen:
            self._unseen.extend(self._tails.values())
            self._idle_tails = 0
            self._looks.start()
        if self._tails:
            self._start_timer()

    def _look_at_one(self) -> bool:
        if self._unseen:
            self._look_at(self._unseen.popleft())
        return bool(self._unseen)

    def _look_at(self, tail: Tail) -> None:
        if not tail.readers:
            lingered_s = asyncio.get_running_loop().time() - tail.idle_since
            if lingered_s >= _LINGER_S or self._idle_tails >= _MAX_IDLE_TAILS:
                self._listening.remove(tail)
                del self._tails[tail.app_id, tail.channel]
                return
            self._idle_tails += 1
        tail.keep_alive(_QUIET_S)
        if self._ticks % (_BEGIN_AGAIN_TICKS if tail.is_unpublished else _RENEW_TICKS) == 0:
            self._begin_again(tail.app_id, tail.channel)
