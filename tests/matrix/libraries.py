"""The columns of the matrix: the official libraries behind two small interfaces, one for clients, one for backends.

Each implementation calls a library as its user would, and returns what the library reports, in the same form for all.
`Column.kind` says which of the two a library is.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pusher
import pusher.errors
import pysher
from pusher.requests import RequestsBackend

from clients.node import Node, NodeError
from matrix.world import MASTER_KEY, App, Visitor, World

WITHIN_S = 60.0


@dataclass(frozen=True)
class Column:
    """One library: how the page calls it, and where its version is written."""

    id: str
    title: str
    kind: str  # "client" or "backend"


PUSHER_JS = Column("pusher_js", "pusher-js, Node", "client")
CHROMIUM = Column("chromium", "pusher-js, Chromium", "client")
ECHO = Column("echo", "laravel-echo", "client")
PYSHER = Column("pysher", "pysher", "client")
NPM = Column("npm", "`pusher`, npm", "backend")
PYPI = Column("pypi", "`pusher`, PyPI", "backend")
COLUMNS = (PUSHER_JS, CHROMIUM, ECHO, PYSHER, NPM, PYPI)

News = dict[str, Any]


class Client(abc.ABC):
    """One connection of one library, belonging to one visitor of the application."""

    # Whether the library tells a listener who sent a client event.
    tells_sender = False

    def __init__(self, world: World, name: str, visitor: Visitor) -> None:
        self.world, self.name, self.visitor = world, name, visitor
        self.app = visitor.app
        self.socket_id = ""

    @abc.abstractmethod
    async def begin(self, *, tls: bool = False, by_token: bool = False) -> None:
        """Starts to connect. `by_token`: channels are signed by redpoll's own `/auth`, with a token of scope auth."""

    @abc.abstractmethod
    async def wait_connected(self) -> None: ...

    @abc.abstractmethod
    async def is_connected(self) -> bool: ...

    @abc.abstractmethod
    async def ask(self, channel: str, *events: str) -> None:
        """Asks to be subscribed; `events` are those it will listen for."""

    @abc.abstractmethod
    async def wait_subscribed(self, channel: str) -> None: ...

    @abc.abstractmethod
    async def wait_refused(self, channel: str) -> News:
        """The library's error for a refused subscription."""

    @abc.abstractmethod
    async def heard(self, channel: str, event: str, count: int = 1, **fields: object) -> News:
        """Waits for the event; `data` as the library's user has it, and `user_id` where the library tells it."""

    @abc.abstractmethod
    def heard_so_far(self, channel: str, event: str) -> list[Any]:
        """The `data` of each, in order."""

    @abc.abstractmethod
    async def trigger(self, channel: str, event: str, data: object) -> None: ...

    @abc.abstractmethod
    async def send_event(self, channel: str, event: str, data: object) -> None:
        """Any event, unlike `trigger`."""

    @abc.abstractmethod
    async def unsubscribe(self, channel: str) -> None: ...

    @abc.abstractmethod
    async def members(self, channel: str) -> set[str]:
        """The users in the channel at the time of the subscription."""

    @abc.abstractmethod
    async def wait_joined(self, channel: str, user: str) -> None: ...

    @abc.abstractmethod
    async def wait_left(self, channel: str, user: str) -> None: ...

    @abc.abstractmethod
    async def wait_error(self, code: int) -> None: ...

    @abc.abstractmethod
    async def wait_gave_up(self, code: int) -> None:
        """Waits until the library got the code and decided not to reconnect."""

    @abc.abstractmethod
    async def close(self) -> None: ...

    def has_heard(self, channel: str, event: str) -> int:
        return len(self.heard_so_far(channel, event))

    async def connect(self, **how: bool) -> None:
        await self.begin(**how)
        await self.wait_connected()

    async def subscribe(self, channel: str, *events: str) -> None:
        await self.ask(channel, *events)
        await self.wait_subscribed(channel)


class PusherJs(Client):
    """pusher-js, in Node or on the page in Chromium."""

    tells_sender = True
    in_browser: bool | None = None
    # The transports that `without_websockets` chose.
    transports: tuple[str, ...] | None = None

    @property
    def node(self) -> Node:
        return self.world.node

    async def call(self, command: str, **parameters: object) -> Any:
        more = {"in_browser": True} if self.in_browser else {}
        return await self.node.call(command, client=self.name, **parameters, **more)

    def options(self, tls: bool, by_token: bool) -> dict[str, object]:
        """The options that the README recommends."""
        options: dict[str, object] = {
            "cluster": "any",
            "wsHost": "127.0.0.1",
            "wsPort": self.app.port,
            "wssPort": self.app.tls_port,
            "forceTLS": tls,
            "enabledTransports": ["ws", "wss"],
            "channelAuthorization": {"endpoint": self.world.endpoint("/auth", self.visitor), "transport": "ajax"},
            "userAuthentication": {"endpoint": self.world.endpoint("/user-auth", self.visitor), "transport": "ajax"},
        }
        if self.transports is not None:
            options |= {"httpHost": "127.0.0.1", "httpPort": self.app.port, "httpsPort": self.app.tls_port}
            options["enabledTransports"] = list(self.transports) or None
        if by_token:
            options["channelAuthorization"] = {
                "endpoint": f"http://127.0.0.1:{self.app.port}/apps/{self.app.app_id}/auth",
                "transport": "ajax",
                "headers": {"Authorization": f"Bearer {self.world.page_token}"},
                "params": {"channel_data": json.dumps(self.visitor.member())},
            }
        if self.visitor.grant:
            # The page makes a `customHandler` of it, or Echo's `authorizer`.
            options["grant"] = {"auth": self.visitor.grant, "user_id": self.visitor.user}
        return options

    async def begin(self, *, tls: bool = False, by_token: bool = False) -> None:
        await self.call("connect", key=self.app.app_key, options=self.options(tls, by_token))

    def without_websockets(self, *transports: str) -> None:
        """Connect by these transports of HTTP; none: by what the library chooses."""
        self.transports = transports

    async def wait_connected(self) -> None:
        await self.node.seen(client=self.name, state="connected")
        self.socket_id = await self.call("socket_id")

    async def is_connected(self) -> bool:
        return bool(await self.call("state") == "connected")

    async def transport(self) -> str:
        """The name of the transport, as the library has it."""
        return str(await self.call("transport"))

    async def uses_tls(self) -> bool:
        return bool(await self.call("uses_tls"))

    async def ask(self, channel: str, *events: str) -> None:
        await self.call("subscribe", channel=channel, events=events)

    async def wait_subscribed(self, channel: str) -> None:
        await self.node.seen(client=self.name, channel=channel, event="pusher:subscription_succeeded")

    async def wait_refused(self, channel: str) -> News:
        news = await self.node.seen(client=self.name, channel=channel, event="pusher:subscription_error")
        return dict(news["data"])

    async def heard(self, channel: str, event: str, count: int = 1, **fields: object) -> News:
        return await self.node.seen(count, client=self.name, channel=channel, event=event, **fields)

    def heard_so_far(self, channel: str, event: str) -> list[Any]:
        return [news["data"] for news in self.node.matching(client=self.name, channel=channel, event=event)]

    async def trigger(self, channel: str, event: str, data: object) -> None:
        await self.call("trigger", channel=channel, event=event, data=data)

    async def send_event(self, channel: str, event: str, data: object) -> None:
        await self.call("send_event", channel=channel, event=event, data=data)

    async def unsubscribe(self, channel: str) -> None:
        await self.call("unsubscribe", channel=channel)

    async def members(self, channel: str) -> set[str]:
        members = await self.call("members", channel=channel)
        assert members["count"] == len(members["all"])
        # The library reads it from the signed data, where it may be a number.
        assert str(members["me"]["id"]) in members["all"]
        return set(members["all"])

    async def wait_joined(self, channel: str, user: str) -> None:
        member = {"id": user, "info": {"name": f"name of {user}"}}
        await self.heard(channel, "pusher:member_added", data=member)

    async def wait_left(self, channel: str, user: str) -> None:
        member = {"id": user, "info": {"name": f"name of {user}"}}
        await self.heard(channel, "pusher:member_removed", data=member)

    async def wait_error(self, code: int) -> None:
        await self.node.seen(client=self.name, error_code=code)

    async def wait_gave_up(self, code: int) -> None:
        await self.wait_error(code)
        await self.node.seen(client=self.name, state="disconnected")

    async def close(self) -> None:
        await self.call("disconnect")

    # -- what other clients have not

    async def switch(self, app: App) -> None:
        """Goes to another server by `switchCluster`, and waits until it is connected there."""
        options = {"wsPort": app.port, "wssPort": app.tls_port}
        await self.call("switch_cluster", key=app.app_key, options=options)
        await self.node.seen(2, client=self.name, state="connected")

    async def wait_subscribed_again(self, channel: str) -> None:
        await self.node.seen(2, client=self.name, channel=channel, event="pusher:subscription_succeeded")

    async def begin_signin(self) -> None:
        await self.call("signin")

    async def signin(self) -> Any:
        """Signs the visitor in; the user's data as the library has it."""
        await self.begin_signin()
        data = (await self.node.seen(client=self.name, channel="(user)", event="signed in"))["data"]
        async with asyncio.timeout(WITHIN_S):
            while not await self.call("hears_user_events"):
                await asyncio.sleep(0.005)
        return data

    async def heard_as_user(self, event: str) -> News:
        return await self.heard("(user)", event)

    async def heard_of_friends(self, event: str, count: int = 1) -> News:
        return await self.heard("(watchlist)", event, count)


class PusherJsInChromium(PusherJs):
    in_browser = True


class Echo(PusherJs):
    """laravel-echo with its `reverb` broadcaster, by Echo's own methods where it has any."""

    tells_sender = False
    _KINDS = (("presence-", "presence"), ("private-encrypted-", "encrypted"), ("private-", "private"), ("", "public"))

    def _echo_name(self, channel: str) -> tuple[str, str]:
        """Echo's kind and name of a channel: it writes the prefix itself."""
        prefix, kind = next(pair for pair in self._KINDS if channel.startswith(pair[0]))
        return kind, channel.removeprefix(prefix)

    @staticmethod
    def _echo_event(event: str) -> str:
        return f"whisper {event.removeprefix('client-')}" if event.startswith("client-") else f".{event}"

    def options(self, tls: bool, by_token: bool) -> dict[str, object]:
        options = super().options(tls, by_token)
        channel = options.pop("channelAuthorization")
        assert isinstance(channel, dict)
        options |= {"broadcaster": "reverb", "key": self.app.app_key, "authEndpoint": channel["endpoint"]}
        if by_token:
            options["auth"] = {"headers": channel["headers"], "params": channel["params"]}
        return options

    async def begin(self, *, tls: bool = False, by_token: bool = False) -> None:
        await self.call("echo", options=self.options(tls, by_token))

    async def wait_connected(self) -> None:
        await self.node.seen(client=self.name, state="connected")
        self.socket_id = await self.call("echo_socket_id")

    async def ask(self, channel: str, *events: str) -> None:
        kind, name = self._echo_name(channel)
        # For a listener, two channels that differ only in the prefix have one name, and events don't say which was
        # meant.
        assert not self.node.matching(client=self.name, channel=name)
        listened = [f".{event}" for event in events if not event.startswith("client-")]
        whispers = [event.removeprefix("client-") for event in events if event.startswith("client-")]
        await self.call("echo_listen", channel=name, kind=kind, events=listened, whispers=whispers)

    async def wait_subscribed(self, channel: str) -> None:
        await self.node.seen(client=self.name, channel=self._echo_name(channel)[1], event="subscribed")

    async def wait_refused(self, channel: str) -> News:
        news = await self.node.seen(client=self.name, channel=self._echo_name(channel)[1], event="error")
        return dict(news["data"])

    async def heard(self, channel: str, event: str, count: int = 1, **fields: object) -> News:
        if channel.startswith("("):
            return await super().heard(channel, event, count, **fields)
        name = self._echo_name(channel)[1]
        return await self.node.seen(count, client=self.name, channel=name, event=self._echo_event(event), **fields)

    def heard_so_far(self, channel: str, event: str) -> list[Any]:
        return super().heard_so_far(self._echo_name(channel)[1], self._echo_event(event))

    async def trigger(self, channel: str, event: str, data: object) -> None:
        name = event.removeprefix("client-")
        await self.call("echo_whisper", channel=self._echo_name(channel)[1], event=name, data=data)

    async def unsubscribe(self, channel: str) -> None:
        await self.call("echo_leave", channel=self._echo_name(channel)[1])

    async def members(self, channel: str) -> set[str]:
        here = await self.node.seen(client=self.name, channel=self._echo_name(channel)[1], event="here")
        return {info["name"].removeprefix("name of ") for info in here["data"]}

    async def wait_joined(self, channel: str, user: str) -> None:
        name = self._echo_name(channel)[1]
        await self.node.seen(client=self.name, channel=name, event="joining", data={"name": f"name of {user}"})

    async def wait_left(self, channel: str, user: str) -> None:
        name = self._echo_name(channel)[1]
        await self.node.seen(client=self.name, channel=name, event="leaving", data={"name": f"name of {user}"})

    async def wait_subscribed_again(self, channel: str) -> None:
        await self.node.seen(2, client=self.name, channel=self._echo_name(channel)[1], event="subscribed")

    async def begin_signin(self) -> None:
        await self.call("echo_signin")

    async def close(self) -> None:
        await self.call("echo_disconnect")


class Pysher(Client):
    """pysher calls back from its own thread; its events are collected here.

    It passes `data` on as text; its users decode it, and so does this class.
    """

    def __init__(self, world: World, name: str, visitor: Visitor) -> None:
        super().__init__(world, name, visitor)
        self._news: list[News] = []
        self._todo: list[Callable[[], None]] = []
        self._changed = threading.Condition()

    async def begin(self, *, tls: bool = False, by_token: bool = False) -> None:
        app = self.visitor.signing()
        how: dict[str, Any] = {"secret": app.app_secret}
        if by_token:
            how = {
                "auth_endpoint": f"http://127.0.0.1:{app.port}/apps/{app.app_id}/auth",
                "auth_endpoint_headers": {"Authorization": f"Bearer {self.world.page_token}"},
            }
        self._client = pysher.Pusher(
            app.app_key,
            secure=tls,
            custom_host="127.0.0.1",
            port=app.tls_port if tls else app.port,
            user_data=self.visitor.member(),
            **how,
        )
        connection = self._client.connection
        connection.bind("pusher:connection_established", lambda _: self._note(event="connected"))
        connection.bind("pusher:error", lambda data: self._note(event="error", code=data["code"]))
        connection.bind("pusher:pong", lambda _: self._do())
        await asyncio.to_thread(self._client.connect)

    def _note(self, **news: Any) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()

    def _do(self) -> None:
        while self._todo:
            self._todo.pop(0)()

    def _in_its_thread(self, action: Callable[[], None]) -> None:
        """pysher binds after it has subscribed: a frame that comes between is lost, unless its own thread does both."""
        self._todo.append(action)
        self._client.connection.send_ping()

    def _told(self, **fields: object) -> list[News]:
        return [news for news in self._news if all(news.get(name) == value for name, value in fields.items())]

    async def _seen(self, count: int = 1, **fields: object) -> News:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: len(self._told(**fields)) >= count, WITHIN_S)

        if not await asyncio.to_thread(wait):
            raise TimeoutError(f"not within {WITHIN_S} s: {count} × {fields}; last: {self._news[-5:]}")
        return self._told(**fields)[count - 1]

    async def wait_connected(self) -> None:
        await self._seen(event="connected")
        self.socket_id = self._client.connection.socket_id

    async def is_connected(self) -> bool:
        return bool(self._client.connection.state == "connected")

    async def ask(self, channel: str, *events: str) -> None:
        internal = ("subscription_succeeded", "member_added", "member_removed", "subscription_count")
        listened = [*events, *(f"pusher_internal:{name}" for name in internal), "pusher:subscription_error"]

        def subscribe() -> None:
            subscribed = self._client.subscribe(channel, self.visitor.grant or None)
            for event in listened:
                subscribed.bind(event, heard, event)

        def heard(data: Any, event: str) -> None:
            with contextlib.suppress(ValueError):
                data = json.loads(data)
            self._note(channel=channel, event=event, data=data)

        self._in_its_thread(subscribe)

    async def wait_subscribed(self, channel: str) -> None:
        await self._seen(channel=channel, event="pusher_internal:subscription_succeeded")

    async def wait_refused(self, channel: str) -> News:
        return dict((await self._seen(channel=channel, event="pusher:subscription_error"))["data"])

    async def heard(self, channel: str, event: str, count: int = 1, **fields: object) -> News:
        if event == "pusher:subscription_count":  # pusher-js renames it, pysher passes it on unchanged.
            event = "pusher_internal:subscription_count"
        return await self._seen(count, channel=channel, event=event, **fields)

    def heard_so_far(self, channel: str, event: str) -> list[Any]:
        return [news["data"] for news in self._told(channel=channel, event=event)]

    async def trigger(self, channel: str, event: str, data: object) -> None:
        self._client.channel(channel).trigger(event, data)

    async def send_event(self, channel: str, event: str, data: object) -> None:
        self._client.connection.send_event(event, data, channel)

    async def unsubscribe(self, channel: str) -> None:
        self._client.unsubscribe(channel)

    async def members(self, channel: str) -> set[str]:
        success = await self._seen(channel=channel, event="pusher_internal:subscription_succeeded")
        return set(success["data"]["presence"]["ids"])

    async def wait_joined(self, channel: str, user: str) -> None:
        member = {"user_id": user, "user_info": {"name": f"name of {user}"}}
        await self._seen(channel=channel, event="pusher_internal:member_added", data=member)

    async def wait_left(self, channel: str, user: str) -> None:
        await self._seen(channel=channel, event="pusher_internal:member_removed", data={"user_id": user})

    async def wait_error(self, code: int) -> None:
        await self._seen(event="error", code=code)

    async def wait_gave_up(self, code: int) -> None:
        await self.wait_error(code)
        await asyncio.to_thread(self._client.connection.join, WITHIN_S)
        assert not self._client.connection.is_alive(), "pysher still tries to connect"

    async def close(self) -> None:
        """In its own thread too: while that one waits for something to read, it doesn't see that another one closed."""
        connection = self._client.connection

        def disconnect() -> None:
            with contextlib.suppress(RuntimeError):  # It waits for the end of its thread, which is this one.
                connection.disconnect()

        if connection.is_alive():
            self._in_its_thread(disconnect)
            await asyncio.to_thread(connection.join, WITHIN_S)
            assert not connection.is_alive()


CLIENTS: dict[str, type[Client]] = {
    PUSHER_JS.id: PusherJs,
    CHROMIUM.id: PusherJsInChromium,
    ECHO.id: Echo,
    PYSHER.id: Pysher,
}


class Refused(Exception):
    """The HTTP API refused a call; the library threw."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


class Backend(abc.ABC):
    """One server library, configured for one app."""

    def __init__(self, world: World, app: App, *, tls: bool = False) -> None:
        self.world, self.app, self.tls = world, app, tls

    @abc.abstractmethod
    async def trigger(self, channels: str | Sequence[str], event: str, data: object, **more: str) -> Any: ...

    @abc.abstractmethod
    async def batch(self, items: list[dict[str, Any]]) -> Any: ...

    @abc.abstractmethod
    async def channels(self, prefix: str, *info: str) -> Any: ...

    @abc.abstractmethod
    async def channel(self, channel: str, *info: str) -> Any: ...

    @abc.abstractmethod
    async def users(self, channel: str) -> Any: ...

    @abc.abstractmethod
    async def authorize(self, channel: str, socket_id: str, member: Mapping[str, object] | None = None) -> Any: ...

    @abc.abstractmethod
    async def authenticate_user(self, socket_id: str, user: Mapping[str, object]) -> Any: ...

    @abc.abstractmethod
    async def send_to_user(self, user: str, event: str, data: object) -> Any: ...

    @abc.abstractmethod
    async def terminate(self, user: str) -> Any: ...


class NpmBackend(Backend):
    """`pusher` from npm."""

    _made = 0

    async def _call(self, command: str, **parameters: object) -> Any:
        if not hasattr(self, "_name"):
            NpmBackend._made += 1
            self._name = f"backend-{NpmBackend._made}"
            options = {
                "appId": self.app.app_id,
                "key": self.app.app_key,
                "secret": self.app.app_secret,
                "host": "127.0.0.1",
                "port": str(self.app.tls_port if self.tls else self.app.port),
                "useTLS": self.tls,
                "encryptionMasterKeyBase64": _master_key_text(),
            }
            await self.world.node.call("server", client=self._name, options=options)
        return await self.world.node.call(command, client=self._name, **parameters)

    async def _ask(self, method: str, *args: object) -> Any:
        try:
            answer = await self._call("server_call", method=method, args=args)
        except NodeError as error:
            # The driver says: "Error: Unexpected status code 401 401 {...}"
            words = str(error).split(" status code ", 1)[-1].split(" ", 2)
            if words[0].isdigit():
                raise Refused(int(words[0]), words[-1]) from error
            raise
        assert answer["status"] == 200
        return answer["body"]

    async def trigger(self, channels: str | Sequence[str], event: str, data: object, **more: str) -> Any:
        return await self._ask("trigger", channels, event, data, more)

    async def batch(self, items: list[dict[str, Any]]) -> Any:
        return await self._ask("triggerBatch", items)

    async def channels(self, prefix: str, *info: str) -> Any:
        params = {"filter_by_prefix": prefix, **_info(info)}
        return await self._ask("get", {"path": "/channels", "params": params})

    async def channel(self, channel: str, *info: str) -> Any:
        return await self._ask("get", {"path": f"/channels/{channel}", "params": _info(info)})

    async def users(self, channel: str) -> Any:
        return await self._ask("get", {"path": f"/channels/{channel}/users"})

    async def authorize(self, channel: str, socket_id: str, member: Mapping[str, object] | None = None) -> Any:
        args = [socket_id, channel] if member is None else [socket_id, channel, member]
        return await self._call("server_authorize", args=args)

    async def authenticate_user(self, socket_id: str, user: Mapping[str, object]) -> Any:
        return await self._call("server_authenticate_user", args=[socket_id, user])

    async def send_to_user(self, user: str, event: str, data: object) -> Any:
        return await self._ask("sendToUser", user, event, data)

    async def terminate(self, user: str) -> Any:
        return await self._ask("terminateUserConnections", user)


class PypiBackend(Backend):
    """`pusher` from PyPI, whose calls block."""

    def __init__(self, world: World, app: App, *, tls: bool = False) -> None:
        super().__init__(world, app, tls=tls)

        class Trusting(RequestsBackend):
            """The library pins its own list of authorities, so another one needs its own backend."""

            def __init__(self, client: object, **options: object) -> None:
                super().__init__(client, **options)
                if tls:
                    self.options["verify"] = str(world.certificate)

        self._library = pusher.Pusher(
            app_id=app.app_id,
            key=app.app_key,
            secret=app.app_secret,
            host="127.0.0.1",
            port=app.tls_port if tls else app.port,
            ssl=tls,
            timeout=WITHIN_S,
            encryption_master_key_base64=_master_key_text(),
            backend=Trusting,
        )

    async def _ask(self, method: Callable[..., Any], *args: object) -> Any:
        try:
            return await asyncio.to_thread(method, *args)
        except pusher.errors.PusherBadRequest as error:
            raise Refused(400, str(error)) from error
        except pusher.errors.PusherBadAuth as error:
            raise Refused(401, str(error)) from error
        except pusher.errors.PusherForbidden as error:
            raise Refused(403, str(error)) from error
        except pusher.errors.PusherBadStatus as error:
            raise Refused(int(str(error)[:3]), str(error)) from error

    async def trigger(self, channels: str | Sequence[str], event: str, data: object, **more: str) -> Any:
        assert set(more) <= {"socket_id"}, "trigger() takes no other parameter"
        return await self._ask(self._library.trigger, channels, event, data, more.get("socket_id"))

    async def batch(self, items: list[dict[str, Any]]) -> Any:
        return await self._ask(self._library.trigger_batch, items)

    async def channels(self, prefix: str, *info: str) -> Any:
        return await self._ask(self._library.channels_info, prefix, list(info))

    async def channel(self, channel: str, *info: str) -> Any:
        return await self._ask(self._library.channel_info, channel, list(info))

    async def users(self, channel: str) -> Any:
        return await self._ask(self._library.users_info, channel)

    async def authorize(self, channel: str, socket_id: str, member: Mapping[str, object] | None = None) -> Any:
        signed = await self._ask(self._library.authenticate, channel, socket_id, member)
        # The only place where the library returns bytes.
        return {name: value.decode() if isinstance(value, bytes) else value for name, value in signed.items()}

    async def authenticate_user(self, socket_id: str, user: Mapping[str, object]) -> Any:
        return await self._ask(self._library.authenticate_user, socket_id, user)

    async def send_to_user(self, user: str, event: str, data: object) -> Any:
        return await self._ask(self._library.send_to_user, user, event, data)

    async def terminate(self, user: str) -> Any:
        return await self._ask(self._library.terminate_user_connections, user)


BACKENDS: dict[str, type[Backend]] = {NPM.id: NpmBackend, PYPI.id: PypiBackend}


def _master_key_text() -> str:
    return base64.b64encode(MASTER_KEY).decode()


def _info(info: Sequence[str]) -> dict[str, str]:
    return {"info": ",".join(info)} if info else {}
