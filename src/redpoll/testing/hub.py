"""Carries out what sessions ask for, in memory and in one process.

The rules are those of `redpoll.protocol`. What the real server keeps in Redis is in `channel`, `histories` and
`online`. Everything happens at once, so no subscribe waits, and nothing is refused because Redis is away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from redpoll.protocol import frames
from redpoll.protocol.apps import App, CurrentApp
from redpoll.protocol.channels import Kind, is_cache, kind_of
from redpoll.protocol.effects import (
    Acknowledge,
    AskHistory,
    Close,
    Effect,
    Join,
    Leave,
    Publish,
    Send,
    SendUrgent,
    SignedIn,
)
from redpoll.protocol.errors import CLOSE_TEXTS, Code
from redpoll.protocol.grants import AppGrants
from redpoll.protocol.history import InvalidOffset, Position, UnknownEpoch, bounded
from redpoll.protocol.users import TERMINATED
from redpoll.testing.channel import Channel, Client
from redpoll.testing.clock import Clock
from redpoll.testing.histories import ChannelHistory, Histories, Stored
from redpoll.testing.online import Group, SignedInUsers
from redpoll.testing.rates import joined_frames, last_joined, part_of
from redpoll.testing.recorder import Published, Recorder
from redpoll.testing.space import Cached, Space
from redpoll.testing.webhooks import Webhooks
from redpoll.worker.hub.watchlists import Watchlists

__all__ = ["Hub"]


class _Start(NamedTuple):
    """Where a new subscriber of a channel begins: earlier messages, and what its success frame says. `has_cached`: it
    needs no cached event."""

    replayed: Sequence[Stored] = ()
    epoch: str | None = None
    offset: int | None = None
    recovered: bool | None = None
    has_cached: bool = False


class Hub:
    """`spaces` by app id. `recorder` gets every event, `webhooks` every change that webhooks report."""

    def __init__(self, clock: Clock, recorder: Recorder, webhooks: Webhooks) -> None:
        self.spaces: dict[str, Space] = {}
        self._clock = clock
        self._recorder = recorder
        self._webhooks = webhooks
        self._moment = 0
        self._signed_in = SignedInUsers(clock, self._user_state)
        self._watchlists = Watchlists(Group, self._signed_in, bytes)
        self._carry_out: dict[type, Callable[[Client, Space, Effect], None]] = {
            Send: self._send,
            SendUrgent: self._send,
            Join: self._join,
            Leave: self._leave,
            Acknowledge: self._acknowledge,
            Publish: self._client_event,
            AskHistory: self._history,
            SignedIn: self._sign_in,
        }

    # -- apps

    def add_app(self, app: App) -> None:
        # Back ends sign grants by the real time, as they do their requests.
        current = CurrentApp(app, AppGrants(self._clock.real_time_s))
        self.spaces[app.id] = Space(current, Histories(self._clock.time_s))

    def change_app(self, app: App) -> None:
        """The app has this record from now on; its open connections follow."""
        space = self.spaces[app.id]
        before = space.app
        space.current.record = app
        if app.history != before.history or app.max_data_bytes != before.max_data_bytes:
            for channel in space.channels.values():
                channel.rates.end()
                if before.history_rule(channel.name) is None:
                    self._send_position(channel, space.histories.begin(app, channel.name))
        if not app.enabled:
            for client in list(space.clients.values()):
                client.shut(Code.APP_DISABLED, CLOSE_TEXTS[Code.APP_DISABLED])
        elif app.user_authentication_timeout_s != before.user_authentication_timeout_s:
            for client in space.clients.values():
                self._expect_sign_in(space, client)
        if app.subscription_count and not before.subscription_count:
            for channel in space.channels.values():
                self._count_changed(space, channel)

    # -- connections

    def opened(self, client: Client) -> None:
        space = self._space(client)
        space.clients[client.session.socket_id] = client
        space.since[client.session.socket_id] = self.moment()
        self._expect_sign_in(space, client)

    def closed(self, client: Client) -> None:
        """Releases everything that the connection held. Idempotent."""
        space, session = self._space(client), client.session
        if space.clients.pop(session.socket_id, None) is None:
            return
        del space.since[session.socket_id]
        self._forget_sign_in(space, client)
        for channel, subscription in list(session.channels.items()):
            self._leave_channel(client, space, channel, subscription.user_id)
        session.channels.clear()
        if session.user_id is not None:
            self._watchlists.drop(client)
            self._signed_in.discard(space.app.id, session.user_id, client)

    def perform(self, client: Client, effects: Sequence[Effect]) -> None:
        """Carries out `effects` in order. After a Close the rest is dropped."""
        space = self._space(client)
        for effect in effects:
            if isinstance(effect, Close):
                client.shut(effect.code, effect.message)
                return
            self._carry_out[type(effect)](client, space, effect)

    def moment(self) -> int:
        """A number greater than all before: what came first, where a clock would say the same second."""
        self._moment += 1
        return self._moment

    def _space(self, client: Client) -> Space:
        return self.spaces[client.session.app.id]

    def _expect_sign_in(self, space: Space, client: Client) -> None:
        self._forget_sign_in(space, client)
        within_s = space.app.user_authentication_timeout_s

        def late() -> None:
            if not client.session.authorised:
                client.shut(Code.UNAUTHORIZED, f"neither signed in nor in a private channel within {within_s:g} s")

        if within_s > 0 and not client.session.authorised:
            space.sign_in_timers[client] = self._clock.call_later(within_s, late)

    @staticmethod
    def _forget_sign_in(space: Space, client: Client) -> None:
        timer = space.sign_in_timers.pop(client, None)
        if timer is not None:
            timer.cancel()

    # -- effects

    @staticmethod
    def _send(client: Client, space: Space, effect: Effect) -> None:
        assert isinstance(effect, Send | SendUrgent)
        client.send(effect.payload)

    def _join(self, client: Client, space: Space, effect: Effect) -> None:
        assert isinstance(effect, Join)
        name, member, app = effect.channel, effect.member, space.app
        channel = space.channels.get(name)
        if member is not None and space.was_removed(client, name, member.user_id):
            self.perform(client, client.session.remove(name))
            return
        reason = ""
        is_listed = kind_of(name) is not Kind.USER
        if channel is None and is_listed and not app.has_place(name, len(space.occupied)):
            reason = "channels"
        elif channel is not None and not channel.has_room(member, app.max_presence_members):
            reason = "members"
        if reason:
            self.perform(client, client.session.refused(name, reason, self._clock.now()))
            return
        if channel is None:
            channel = space.channels[name] = Channel(name, self._clock)
            if is_listed:
                self._webhooks.occupied(app, name, 1)
        if member is not None and channel.member_joined(member):
            channel.post(frames.member_added(name, member.user_id, member.user_info))
            self._webhooks.member_added(app, name, member)
        recovers = effect.recovers or (effect.rewind is not None and effect.rewind.epoch is not None)
        channel.subscribers[client] = recovers
        self._count_changed(space, channel, newcomer=client)
        self._answer(client, space, channel, effect)
        self.perform(client, client.session.joined(name))

    def _answer(self, client: Client, space: Space, channel: Channel, join: Join) -> None:
        """Success, the cached event or its miss, the count, earlier messages (protocol/README.md "Subscribing")."""
        app, name = space.app, channel.name
        cached, missed = self._cached(space, name), False
        if is_cache(name) and app.cache_ttl_s > 0:
            missed = cached is None
        start = self._start(space, name, join)
        if start.has_cached or not all(row.by_client for row in start.replayed):
            # The cached event is the last that a server published, so it is among these messages.
            cached = None
        parts = [
            frames.subscription_succeeded(
                name, channel.presence(), epoch=start.epoch, offset=start.offset, recovered=start.recovered
            )
        ]
        if missed:
            parts.append(frames.cache_miss(name))
            self._webhooks.cache_miss(app, name)
        if cached is not None:
            parts.append(frames.event(name, cached.event, cached.data, cached.user_id))
        if self._counts(app, channel):
            parts.append(frames.subscription_count(name, len(channel.subscribers)))
        pace = app.pace(name)
        if pace is not None:
            socket_id, recovers = client.session.socket_id, channel.subscribers[client]
            parts += joined_frames(name, pace, start.replayed, socket_id, recovers)
        for row in start.replayed if pace is None else ():
            if row.skip != client.session.socket_id:
                number = row.offset if channel.subscribers[client] else None
                parts.append(frames.event(name, row.event, row.data, row.user_id, number))
        for part in parts:
            client.send(part)

    @staticmethod
    def _start(space: Space, name: str, join: Join) -> _Start:
        """Where a new subscriber begins, as worker/replay/replayer.py decides it."""
        app, rewind = space.app, join.rewind
        histories, history, rule = space.histories, space.histories.begin(app, name), app.history_rule(name)
        if rewind is not None and rewind.epoch is not None:
            if history is None:
                return _Start(recovered=False)
            following = histories.missed(app, name, rewind.epoch, rewind.offset)
            if following is None:
                return _Start((), history.epoch, history.top, recovered=False)
            # The client has the cached event already, or gets it with these messages.
            return _Start(following, history.epoch, rewind.offset, recovered=True, has_cached=True)
        if history is None or rule is None:
            return _Start()
        count, seconds = (rule.replay, rule.replay_seconds) if rewind is None else (rewind.count, rewind.seconds)
        pace = app.pace(name)
        if count and pace is not None:
            replayed = last_joined(pace, histories.stored(app, name), count, join.recovers)
        else:
            replayed = histories.last(app, name, count, seconds)
        if not join.recovers:
            return _Start(replayed)
        return _Start(replayed, history.epoch, replayed[0].before if replayed else history.top)

    def _leave(self, client: Client, space: Space, effect: Effect) -> None:
        assert isinstance(effect, Leave)
        self._leave_channel(client, space, effect.channel, effect.user_id)

    def _leave_channel(self, client: Client, space: Space, name: str, user_id: str | None) -> None:
        channel, app = space.channels.get(name), space.app
        if channel is None or client not in channel.subscribers:
            return
        del channel.subscribers[client]
        channel.rates.forget(client)
        if user_id is not None and channel.member_left(user_id):
            channel.post(frames.member_removed(name, user_id))
            self._webhooks.member_removed(app, name, user_id)
        self._count_changed(space, channel)
        if not channel.subscribers:
            del space.channels[name]
            if channel.kind is not Kind.USER:
                self._webhooks.vacated(app, name)

    def _acknowledge(self, client: Client, space: Space, effect: Effect) -> None:
        assert isinstance(effect, Acknowledge)
        channel = space.channels.get(effect.channel)
        if channel is None or client not in channel.subscribers:
            return
        if channel.subscribers[client]:
            channel.rates.flush(client)
        history = space.histories.find(space.app, channel.name) if channel.subscribers[client] else None
        client.send(
            frames.subscription_succeeded(
                channel.name,
                channel.presence(),
                epoch=history.epoch if history is not None else None,
                offset=history.top if history is not None else None,
            )
        )

    def _client_event(self, client: Client, space: Space, effect: Effect) -> None:
        assert isinstance(effect, Publish)
        sender = client.session.socket_id
        self._webhooks.client_event(space.app, effect, sender)
        # First: a test may ask as soon as its client has the event.
        self._recorder.add(Published(effect.event, effect.channel, effect.data, sender=sender, user_id=effect.user_id))
        self._deliver(space, effect.channel, effect.event, effect.data, effect.user_id, sender, by_client=True)

    def _history(self, client: Client, space: Space, effect: Effect) -> None:
        assert isinstance(effect, AskHistory)
        before, since = effect.before, effect.since
        position = since or before
        fault: str | None = None
        try:
            page = space.histories.read(
                space.app,
                effect.channel,
                limit=effect.limit,
                before=before.offset if before is not None else None,
                since=since.offset if since is not None else None,
                epoch=position.epoch if position is not None else None,
            )
        except (UnknownEpoch, InvalidOffset) as error:
            fault = str(error)
        else:
            if not page.epoch:
                fault = str(UnknownEpoch(""))
            elif position is not None and position.offset > page.top:
                fault = str(InvalidOffset(page.top))
        if fault is not None:
            self.perform(client, client.session.history_refused(effect.channel, fault, self._clock.now()))
            return
        messages, cut = bounded([row.message for row in page.rows], newest=since is None)
        following = None
        if (page.more or cut) and messages:
            following = str(Position(page.epoch, messages[0 if since is None else -1].offset))
        client.send(frames.history(effect.channel, page.epoch, messages, following))

    def _sign_in(self, client: Client, space: Space, effect: Effect) -> None:
        assert isinstance(effect, SignedIn)
        # Before the watchlist, so that users who watch themselves are online.
        self._signed_in.add(space.app.id, effect.user_id, client)
        if space.app.watchlist:
            self._watchlists.replace(client, space.app.id, effect.watchlist)

    def _user_state(self, app_id: str, user_id: str, online: bool) -> None:
        self._watchlists.user_state(app_id, user_id, online)

    # -- events

    def publish(
        self, space: Space, channel: str, event: str, data: str, excluded: str | None, correlation_id: str | None
    ) -> None:
        """An event of the HTTP API."""
        if is_cache(channel) and space.app.cache_ttl_s > 0:
            self._cache(space, channel, Cached(event, data, None, self._clock.now() + space.app.cache_ttl_s))
        self._recorder.add(Published(event, channel, data, excluded, correlation_id))
        self._deliver(space, channel, event, data, None, excluded)

    def _deliver(
        self,
        space: Space,
        name: str,
        event: str,
        data: str,
        user_id: str | None,
        skip: str | None,
        *,
        by_client: bool = False,
    ) -> None:
        stored = space.histories.store(space.app, name, event, data, user_id, skip, by_client=by_client)
        channel = space.channels.get(name)
        pace = space.app.pace(name)
        offset = stored.offset if stored is not None else None
        if channel is not None and pace is not None:
            channel.post_paced(pace, part_of(pace, event, data, user_id, skip, offset or 0))
        elif channel is not None:
            channel.post_event(event, data, user_id, skip, offset)

    def _cache(self, space: Space, channel: str, entry: Cached) -> None:
        """Caches an event, unless as many other channels as the app may have have one."""
        if self._cached(space, channel) is None and len(space.cache) >= space.app.max_cached_channels:
            now = self._clock.now()
            space.cache = {name: other for name, other in space.cache.items() if other.until > now}
            if len(space.cache) >= space.app.max_cached_channels:
                return
        space.cache[channel] = entry
        self._webhooks.cached(space.app, channel)

    def _cached(self, space: Space, channel: str) -> Cached | None:
        cached = space.cache.get(channel)
        if cached is not None and cached.until <= self._clock.now():
            del space.cache[channel]
            return None
        return cached

    def cached(self, space: Space, channel: str) -> tuple[str, int] | None:
        """The data that new subscribers of a cache channel get, and for how many seconds more."""
        entry = self._cached(space, channel)
        return None if entry is None else (entry.data, max(1, round(entry.until - self._clock.now())))

    def clear_history(self, space: Space, name: str) -> str:
        """Deletes the channel's messages and tells those who recover. Returns the new epoch, "" without history."""
        history = space.histories.clear(space.app, name)
        if history is None:
            return ""
        channel = space.channels.get(name)
        if channel is not None:
            self._send_position(channel, history)
        return history.epoch

    @staticmethod
    def _send_position(channel: Channel, history: ChannelHistory | None) -> None:
        """Tells those who recover that the channel has this history now."""
        for client, recovers in list(channel.subscribers.items()):
            if recovers and history is not None:
                channel.rates.flush(client)
                client.send(frames.position(channel.name, history.epoch, history.top, False))

    # -- counts

    @staticmethod
    def _counts(app: App, channel: Channel) -> bool:
        """Whether subscribers of the channel get its subscription count."""
        return app.subscription_count and channel.kind not in (Kind.PRESENCE, Kind.USER)

    def _count_changed(self, space: Space, channel: Channel, newcomer: Client | None = None) -> None:
        if not self._counts(space.app, channel):
            return
        due_s = channel.count_due_s(self._clock.now())
        if due_s is None:
            if channel.count_timer is not None:
                channel.count_timer.cancel()
                channel.count_timer = None
        elif due_s > 0:
            if channel.count_timer is None:
                channel.count_timer = self._clock.call_later(due_s, lambda: self._count_due(space, channel))
        else:
            channel.count_announced(self._clock.now())
            payload = frames.subscription_count(channel.name, len(channel.subscribers))
            self._webhooks.counted(space.app, channel.name, len(channel.subscribers))
            for client in channel:
                # A newcomer's own answer has the count.
                if client is not newcomer:
                    client.send(payload)

    def _count_due(self, space: Space, channel: Channel) -> None:
        channel.count_timer = None
        self._count_changed(space, channel)

    # -- what operators and the API ask for

    def terminate(self, space: Space, user_id: str) -> None:
        """Closes the connections that are signed in as this user."""
        for client in self._signed_in.of(space.app.id, user_id):
            client.shut(Code.UNAUTHORIZED, TERMINATED)
