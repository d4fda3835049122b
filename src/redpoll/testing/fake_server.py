"""A Pusher Channels server in the test's own process: `with FakeServer() as server:`.

It runs in a thread with an event loop of its own, so that tests with and without asyncio can use it, and clients in
other processes too. src/redpoll/testing/README.md says what it has, and what needs the real server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from redpoll.config.app_names import (
    APP_ID_RULE,
    APP_KEY_RULE,
    APP_SECRET_RULE,
    valid_app_id,
    valid_app_key,
    valid_app_secret,
)
from redpoll.protocol.apps import MAX_HISTORY_RULES, SETTINGS, App, HistoryRule, Key, history_fault, with_eras
from redpoll.protocol.auth import sign_channel, token_hash
from redpoll.protocol.errors import Code
from redpoll.protocol.limits import Limits
from redpoll.protocol.tokens import SCOPES, Token
from redpoll.testing.api import Api
from redpoll.testing.clock import Clock
from redpoll.testing.expectations import Expectations
from redpoll.testing.hub import Hub
from redpoll.testing.loop_thread import LoopThread
from redpoll.testing.port import Port
from redpoll.testing.space import Space
from redpoll.testing.suite_routes import suite_routes_of
from redpoll.testing.webhooks import Format, Webhook, Webhooks

__all__ = ["FakeServer"]

_T = TypeVar("_T")

# Settings of an app that need the real server.
_WITHOUT: Final = ("plan", "user_resume_s")


class FakeServer(Expectations):
    """A fake server with one app. `settings` are those of `redpoll app set`, such as `watchlist=True`.

    `port` 0 is any free port. `limits`: as the server's settings of the same names. `encryption_master_key`: 32 bytes.
    `webhooks` is the format of what `webhooks` records. `suite_routes`: as suite_routes.py says, for tests in other
    languages. Any thread may call the methods.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        app_id: str = "1",
        app_key: str = "fake-key",
        app_secret: str = "fake-secret",
        limits: Limits | None = None,
        activity_timeout_s: float = 120.0,
        pong_timeout_s: float = 30.0,
        max_message_bytes: int = 65_536,
        encryption_master_key: bytes | None = None,
        webhooks: Format = "pusher",
        suite_routes: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        for value, is_valid, rule, name in (
            (app_id, valid_app_id, APP_ID_RULE, "app_id"),
            (app_key, valid_app_key, APP_KEY_RULE, "app_key"),
            (app_secret, valid_app_secret, APP_SECRET_RULE, "app_secret"),
        ):
            if not is_valid(value):
                raise ValueError(f"{name} must be {rule}, not {value!r}")
        try:
            host.encode("idna")
        except UnicodeError:
            raise ValueError(f"host must be an address or a host name, not {host!r}") from None
        self.host, self.port = host, port
        self.app_id, self.app_key, self.app_secret = app_id, app_key, app_secret
        self.limits = Limits() if limits is None else limits
        self.activity_timeout_s = activity_timeout_s
        self.pong_timeout_s = pong_timeout_s
        self.max_message_bytes = max_message_bytes
        self._thread = LoopThread()
        self.clock = Clock(self._thread)
        self._webhooks = Webhooks(self.clock, self._recorder, webhooks, app_secret)
        self.hub = Hub(self.clock, self._recorder, self._webhooks)
        more = suite_routes_of(self._recorder, self.reset) if suite_routes else ()
        self._api = Api(self.hub, self.clock, encryption_master_key, more)
        self._ports: set[Port] = set()
        self._listener: asyncio.Server | None = None
        self._all_closed: asyncio.Event | None = None
        app = App(id=app_id, name="test", keys=(Key(key=app_key, secret=app_secret),))
        self.hub.add_app(_changed(app, settings))

    # -- start and stop

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begins to listen; `port` is set afterwards. Raises OSError, such as for a port that is in use."""
        self._thread.start(self._open, self._close)

    def stop(self) -> None:
        """Ends all connections, the thread and its loop. Idempotent."""
        self._thread.stop()

    async def _open(self) -> None:
        self._all_closed = asyncio.Event()
        none_left = self._all_closed.set
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: Port(self, self._api.answer, self._ports, none_left), self.host, self.port
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._listener is not None:
            # asyncio accepts a connection in a task of its own, which leaks the connection if the listener is closed
            # before the task has run.
            for listening in self._listener.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            accepting = asyncio.all_tasks() - {asyncio.current_task()}
            if accepting:
                await asyncio.wait(accepting)
            self._listener.close()
        self.clock.stop()
        if self._ports and self._all_closed is not None:
            self._all_closed.clear()
            for port in list(self._ports):
                port.transport.abort()
            await self._all_closed.wait()
        if self._listener is not None:
            await self._listener.wait_closed()
            self._listener = None

    # -- the app

    @property
    def app(self) -> App:
        """The app's present record."""
        return self._space.app

    @property
    def _space(self) -> Space:
        return self.hub.spaces[self.app_id]

    def app_of_key(self, key: str) -> App | None:
        """The app of a key; None if there is none."""
        return next((space.app for space in self.hub.spaces.values() for own in space.app.keys if own.key == key), None)

    def set(self, **settings: Any) -> None:
        """Changes settings of the app while clients are connected, as `redpoll app set` does. Raises ValueError."""
        self.change(_changed(self.app, settings))

    def change(self, app: App) -> None:
        """The app has this record from now on; for what `set` and `keep_history` can't change, such as its keys."""
        self._run(self.hub.change_app, app)

    def keep_history(
        self, name: str, *, prefix: bool = True, keep: int = 100, seconds: int = 3600, **more: Any
    ) -> None:
        """Adds a history rule, or replaces the one of this name, as `redpoll history rule add` does.

        `more` is `replay`, `replay_seconds`, `client_events`, `max_rate`, `latest`, `join` or `by`. Raises ValueError.
        """
        before = self.app.history
        others = [rule for rule in before if (rule.name, rule.prefix) != (name, prefix)]
        number = f"{len(before) + 1:06x}"
        rule = HistoryRule(id=number, name=name, prefix=prefix, keep=keep, seconds=seconds, **more)
        fault = history_fault(rule)
        if fault is None and len(others) >= MAX_HISTORY_RULES:
            fault = f"an app has at most {MAX_HISTORY_RULES} history rules"
        if fault is not None:
            raise ValueError(fault)
        self.change(msgspec.structs.replace(self.app, history=with_eras(before, [*others, rule], number)))

    def add_token(self, token: str, scopes: Sequence[str] = ("all",)) -> None:
        """The API accepts this bearer token from now on. Raises ValueError for an unknown scope."""
        for scope in scopes:
            if scope not in SCOPES:
                raise ValueError(f"there is no scope {scope!r}; the scopes are {', '.join(SCOPES)}")
        hashed = token_hash(token)
        record = Token(
            id=hashed[:6],
            app_id=self.app_id,
            name="test",
            hash=hashed,
            prefix=token[:8],
            scopes=tuple(scopes),
            created_at=self.clock.real_time_s(),
        )
        self._run(self._api.tokens.__setitem__, hashed, record)

    def sign(self, socket_id: str, channel: str, channel_data: str | None = None) -> str:
        """`KEY:SIGNATURE`, which lets the connection subscribe to a private or presence channel."""
        return f"{self.app_key}:{sign_channel(self.app_secret, socket_id, channel, channel_data)}"

    # -- what tests provoke

    def fail(self, status: int, times: int = 1) -> None:
        """The next `times` requests to the HTTP API get this status and do nothing. A status that the server never
        sends, such as 502, comes as a proxy's HTML page. Raises ValueError."""
        self._run(self._api.failures.add, status, times)

    def disconnect(self, code: int | None = Code.RECONNECT, message: str = "", *, socket_id: str | None = None) -> int:
        """Closes all connections, or the one with `socket_id`, with this code. None: the TCP connection ends without a
        close frame. Returns how many were closed."""
        if code is not None and not 4000 <= code <= 4999:
            raise ValueError(f"a close code of the protocol is from 4000 to 4999, not {code}")
        return self._run(self._disconnect, code, message, socket_id)

    def _disconnect(self, code: int | None, message: str, socket_id: str | None) -> int:
        text = message or f"the test closed the connection with {code}"
        count = 0
        for port in list(self._ports):
            socket = port.socket
            if socket is None or socket.socket_id is None or socket_id not in (None, socket.socket_id):
                continue
            count += 1
            if code is None:
                socket.cut()
            else:
                socket.shut(code, text)
        return count

    # -- what tests look at

    @property
    def webhooks(self) -> list[Webhook]:
        """The deliveries so far."""
        return list(self._webhooks.deliveries)

    def wait_for_webhook(self, event: str, channel: str | None = None, *, timeout_s: float = 5.0) -> Webhook:
        """Blocks until there is a delivery of this event, such as `channel.occupied`. Raises AssertionError at the
        deadline."""

        def matching() -> list[Webhook]:
            return [one for one in self.webhooks if one.event == event and channel in (None, one.channel)]

        if not self._recorder.wait(lambda: bool(matching()), timeout_s):
            came = ", ".join(f"{one.event} of {one.channel!r}" for one in self.webhooks) or "none"
            raise AssertionError(f"no webhook {event} within {timeout_s:g} s; deliveries: {came}")
        return matching()[0]

    @property
    def connections(self) -> list[str]:
        """The socket ids of the open connections."""
        return self._run(lambda: list(self._space.clients))

    def subscribers(self, channel: str) -> list[str]:
        """The socket ids of the channel's subscribers."""
        return self._run(lambda: [one.session.socket_id for one in self._space.channels.get(channel, ())])

    def members(self, channel: str) -> list[str]:
        """The ids of a presence channel's members, in the order in which they joined."""

        def ids() -> list[str]:
            entry = self._space.channels.get(channel)
            return list(entry.roster or ()) if entry is not None else []

        return self._run(ids)

    def reset(self) -> None:
        """Forgets what was published and recorded, and what `fail` asked for. Connections stay."""

        def forget() -> None:
            self._recorder.reset()
            self._webhooks.reset()
            self._api.reset()

        self._run(forget)

    def _run(self, function: Callable[..., _T], *args: Any) -> _T:
        """In the loop if the server runs, else at once."""
        return self._thread.call(function, *args) if self._thread.running else function(*args)


def _changed(app: App, settings: dict[str, Any]) -> App:
    for name in settings:
        if name not in SETTINGS:
            raise ValueError(f"there is no setting {name!r}; the settings are {', '.join(SETTINGS)}")
        if name in _WITHOUT:
            raise ValueError(f"the fake server doesn't have {name}; use redpoll.testing.Server")
    try:
        return msgspec.convert(msgspec.structs.asdict(app) | settings, App)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
