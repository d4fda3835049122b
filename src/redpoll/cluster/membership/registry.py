"""Which channels this worker holds, and that Redis knows it: joins and leaves in, counts and rosters out.

Knows channels, users and tickets, no sockets: a `MembershipEvents` attaches those. What Redis is told and when is
cluster.md 5 and 6; the argument why a snapshot and the deltas around it agree stands there too, and leans on
everything here happening in the order in which the one connection brings it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import hiredis
import msgspec
import structlog

from redpoll.cluster.catchup import Catchup
from redpoll.cluster.connection_limit import ConnectionLimit
from redpoll.cluster.directory import Directory
from redpoll.cluster.envelopes import parse_added, parse_removed
from redpoll.cluster.history import History
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.membership.counts import Counts
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.local_channel import LocalChannel, Ticket
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.membership.reconnect import Reconnect
from redpoll.cluster.membership.replies import Replies
from redpoll.cluster.membership.sync import Sync
from redpoll.cluster.online import Online
from redpoll.cluster.signed_in import SignedIn, asked_for
from redpoll.protocol.apps import App

__all__ = ["LocalChannel", "MembershipEvents", "Registry", "Ticket"]

log = structlog.get_logger(__name__)

_EVENT: Final = ord("e")
# What of an app's record channels follow, besides what a join brings along: the rest changes often (console_until).
_FOLLOWED: Final = ("history", "hooks", "max_history_channels", "max_presence_members", "subscription_count")


def _no_message(message: dict[str, Any]) -> None:
    pass


class Registry:
    """One per worker. Takes over the link's callbacks.

    `on_sys(message)` gets what comes over `sys` for others than the directory. `ready` says whether clients
    may be let in. The times are those of cluster.md; tests shorten them. `debounced`: webhooks are told of leaves
    after a while, and not of those that came back.

    `sign_in(app, user_id)`, `sign_out(app_id, user_id)`: users.py. `watch(app_id, user_id)`, `unwatch`:
    watches.py. `admit(app, ticket)` for each connection, `depart(app_id)` for each admitted one: admissions.py.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        listener: MembershipEvents,
        directory: Directory,
        run: str,
        k: int,
        *,
        on_sys: Callable[[dict[str, Any]], None] = _no_message,
        beat_s: float = 1.0,
        unanswered_s: float = 10.0,
        away_s: float = 5.0,
        second_look_s: float = 5.0,
        offline_s: float = 3.0,
        admit_again_s: float = 0.5,
        admit_most_s: float = 7.0,
        join_wait_s: float = 30.0,
        retry_s: float = 0.05,
        greatest_retry_s: float = 1.0,
        debounced: bool = True,
    ) -> None:
        self.on_sys = on_sys
        self.history = History(link, keys)
        self._link = link
        self._keys = keys
        self._listener = listener
        self._event = listener.event
        self._directory = directory
        self._silent_s = away_s + beat_s
        self._join_wait_s = join_wait_s
        self._holdings = LocalChannels(keys, listener)
        self._by_topic = self._holdings.by_topic
        self._incarnation = Incarnation(
            link,
            keys,
            run,
            k,
            on_fenced=lambda: self._standing.fence(),
            on_beat=directory.saw,
            beat_s=beat_s,
            unanswered_s=unanswered_s,
        )
        self._commits = Sync(
            link,
            keys,
            self._incarnation,
            on_ok=lambda local_channel, call, reply: self._replies.apply(local_channel, call, reply),
            on_heard=lambda local_channel: self._replies.listening(local_channel),
            on_idle=self._drop,
            on_fenced=lambda: self._standing.fence(),
            on_settled=lambda: self._standing.settled(),
            retry_s=retry_s,
            greatest_retry_s=greatest_retry_s,
            debounced=debounced,
        )
        touch = self._commits.touch
        self._counts = Counts(touch, lambda local_channel, total: listener.counted(local_channel, total))
        self._catchup = Catchup(
            self.history,
            on_event=listener.event,
            on_lost=lambda local_channel: listener.lost(local_channel),
            retry_s=retry_s,
            greatest_retry_s=greatest_retry_s,
        )
        users = SignedIn(self._holdings.hold, touch)
        self.sign_in, self.sign_out, self._switch_users = users.sign_in, users.sign_out, users.switch
        self._watches = Online(
            link,
            keys,
            users.here,
            listener.user_state,
            offline_s=offline_s,
            second_look_s=second_look_s,
            retry_s=retry_s,
        )
        self.watch, self.unwatch = self._watches.watch, self._watches.unwatch
        self._admissions = ConnectionLimit(
            link,
            keys,
            self._holdings.hold,
            touch,
            lambda: self._incarnation.name,
            on_admitted=listener.admitted,
            on_turned_away=listener.turned_away,
            again_s=admit_again_s,
            most_s=admit_most_s,
            away_s=away_s,
        )
        self.admit, self.depart = self._admissions.admit, self._admissions.depart
        self._standing = Reconnect(
            link,
            keys,
            self._incarnation,
            self._holdings,
            self._commits,
            self._catchup,
            self._watches,
            self._follow_record,
        )
        self._replies = Replies(
            listener,
            self._standing,
            self._counts,
            self._catchup,
            self._admissions,
            touch,
            second_look_s=second_look_s,
        )
        # Subscribes without an answer, in order of arrival; some of them have it, or were withdrawn.
        self._pending: deque[Ticket] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        link.on_push = self.message
        link.on_up = self._standing.up
        link.on_down = self._standing.down

    @property
    def w(self) -> str:
        """This worker's name in Redis now; another one after it was fenced."""
        return self._incarnation.w

    @property
    def ready(self) -> bool:
        """Redis answers, or has been silent for less than `away_s`, and the directory is known."""
        silent_s = self._link.clock() - self._incarnation.heard_at
        return self._standing.risen and self._directory.complete and silent_s < self._silent_s

    @property
    def fenced(self) -> int:
        """How often Redis, or who reaps there, gave up our name."""
        return self._standing.fenced

    @property
    def errors(self) -> int:
        """Calls that Redis answered with an error, each of them repeated; for /metrics."""
        return self._commits.errors + self._incarnation.errors + self._watches.errors + self._catchup.errors

    @property
    def unhooked(self) -> int:
        """Rows for webhooks that were not written, as too many others wait to be fetched; for /metrics."""
        return self._commits.unhooked

    @property
    def catchups(self) -> int:
        """How often a channel was filled from its history; for /metrics."""
        return self._catchup.begun

    @property
    def histories_lost(self) -> int:
        """How often that, or whatever happened to a history, left a gap that subscribers were told of."""
        return self._catchup.lost

    @property
    def channels(self) -> int:
        """How many channels have a subscriber here, or are about to."""
        return len(self._by_topic)

    def local_channel(self, app_id: str, channel: str) -> LocalChannel | None:
        return self._holdings.by_name.get((app_id, channel))

    def local_channels(self) -> Iterable[LocalChannel]:
        """Channels and pseudo-channels; the former are those that listen."""
        return self._holdings.by_name.values()

    async def start(self) -> None:
        """The worker's start (cluster.md 6): returns when Redis knows this worker, however long that takes.
        The directory may still be on its way: see `ready`."""
        self._link.start()
        self._incarnation.start()
        self._expire()
        await self._standing.wait_risen()

    async def finish(self, timeout_s: float = 5.0) -> bool:
        """The clean end, when the listener has let go of every socket: waits until Redis knows, and takes
        this worker out of it. False: something is left, and the reaper will find it."""
        clean = False
        try:
            async with asyncio.timeout(timeout_s):
                self._commits.ending = True
                self._counts.hurry_all(self.local_channels())
                await self._holdings.wait_empty()
                clean = await self._incarnation.bury()
        except (TimeoutError, LinkDown, hiredis.ReplyError) as error:
            log.warning("not taken out of redis", w=self.w, reason=str(error) or "timeout")
        self.close()
        return clean

    def close(self) -> None:
        """Stops timers and tasks, and lets go of the link; what Redis has in our name stays there."""
        self._link.let_go()
        self._commits.lose()
        self._watches.close()
        self._admissions.close()
        for local_channel in self.local_channels():
            if local_channel.tally is not None:
                local_channel.tally.rest()
        self._incarnation.close()
        self._directory.close()
        self._standing.close()
        if self._expiry is not None:
            self._expiry.cancel()

    # What the worker says.

    def join(self, app: App, channel: str, ticket: Ticket) -> LocalChannel:
        """A subscribe. The outcome comes as `joined` or `refused` with this ticket, never from within this
        call. A user's channel is joined when its topic is heard; the rest follows from the app and the name."""
        local_channel = self._holdings.channel(app.id, channel)
        self._follow(local_channel, app)
        ticket.since = self._link.clock()
        local_channel.wait(ticket)
        self._pending.append(ticket)
        self._commits.touch(local_channel)
        return local_channel

    def cancel(self, ticket: Ticket) -> None:
        """Withdraws a subscribe or a connection that waits; without effect on one that was answered."""
        self._admissions.forget(ticket)
        local_channel = ticket.local_channel
        if local_channel is not None:
            local_channel.withdraw(ticket)
            self._commits.touch(local_channel)

    def leave(self, app_id: str, channel: str, user: str | None = None) -> None:
        """An attached socket is detached. `user` is the one it joined with, on presence channels."""
        local_channel = self._holdings.by_name[(app_id, channel)]
        local_channel.detach(user)
        self._commits.touch(local_channel)

    def app_changed(self, old: App | None, new: App | None) -> None:
        """An app's record changed: what it turned on is told with what is held, what it turned off is taken
        back (cluster.md 6). Of an app that is gone the listener closes the sockets."""
        if old is None or new is None:
            return
        self._switch_users(new.id, asked_for(new))
        self._admissions.limit(new.id, new.max_connections)
        if all(getattr(old, name) == getattr(new, name) for name in _FOLLOWED):
            return
        for local_channel in [
            local_channel for local_channel in self.local_channels() if local_channel.app_id == new.id
        ]:
            if self._follow(local_channel, new):
                self._counts.hurry(local_channel)
            elif local_channel.asks:
                self._commits.touch(local_channel)

    def _follow(self, local_channel: LocalChannel, app: App) -> bool:
        # True: subscribers of this channel are told their number from now on.
        local_channel.follow(app)
        return self._counts.switch(local_channel, app.subscription_count)

    def _follow_record(self, local_channel: LocalChannel) -> None:
        app = self._directory.by_id.get(local_channel.app_id)
        if app is not None:
            self._follow(local_channel, app)

    def _drop(self, local_channel: LocalChannel) -> None:
        self._commits.forget(local_channel)
        self._catchup.forget(local_channel)
        self._holdings.drop(local_channel)

    def _expire(self) -> None:
        # Joins wait for a Redis that is away, but not for ever: 4100 sends the client elsewhere.
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(min(1.0, self._join_wait_s / 4), self._expire)
        before = self._link.clock() - self._join_wait_s
        while self._pending:
            ticket = self._pending[0]
            local_channel = ticket.local_channel if not ticket.cancelled else None
            if local_channel is not None and ticket.since > before:
                return
            self._pending.popleft()
            if local_channel is not None:
                local_channel.withdraw(ticket)
                self._listener.refused(local_channel, ticket, "unavailable")
                self._commits.touch(local_channel)

    # What Redis says.

    def message(self, topic: bytes, payload: bytes) -> None:
        """A push. The hot path: events go on to the listener as they are."""
        local_channel = self._by_topic.get(topic)
        if local_channel is None:
            if topic == self._keys.sys:
                self._heard(payload)
            else:
                self._watches.message(topic, payload)
        elif payload[0] == _EVENT:
            kept = local_channel.history
            if kept is None:
                self._event(local_channel, payload)
            else:
                self._catchup.heard(local_channel, kept, payload)
        else:
            self._delta(local_channel, payload)

    def _heard(self, payload: bytes) -> None:
        message = msgspec.json.decode(payload)
        if "dir" in message:
            self._directory.heard(message["dir"])
        else:
            self.on_sys(message)

    def _delta(self, local_channel: LocalChannel, payload: bytes) -> None:
        roster = local_channel.roster
        if payload[:1] == b"n":
            self._counts.heard(local_channel, payload, self._incarnation.name)
            return
        if payload[:1] == b"c":
            self._listener.console(local_channel, payload)
            return
        if payload[:1] == b"x":
            self._catchup.cleared(local_channel, payload)
            return
        # Before the first roster there is nothing to apply it to. What we did ourselves the reply says, since
        # our own pushes come before it on one server and behind it on another (cluster.md rule 3).
        if roster is None or payload[2 : payload.index(b" ", 2)] == self._incarnation.name:
            return
        if payload[:1] == b"m":
            added = parse_added(payload)
            if roster.add(added.user, added.info):
                self._listener.member_added(local_channel, added.user, added.info)
        elif payload[:1] == b"r":
            user = parse_removed(payload).user
            if roster.remove(user):
                self._listener.member_removed(local_channel, user)
