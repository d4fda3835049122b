"""The rows of the matrix: features that applications use, each tried with each library that supports it.

tests/matrix/test_matrix.py runs the cells. A row has a cell for every column: a function to run, or the reason why the
library can't do it. One end of a feature is the library; the other end is a plain socket or HTTP request of
tests/helpers/wire.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from nacl.secret import SecretBox

from helpers.granting import mint
from helpers.proxy import Proxy
from helpers.wire import Api, Frame, Socket, eventually
from matrix.libraries import (
    BACKENDS,
    CHROMIUM,
    CLIENTS,
    ECHO,
    NPM,
    PUSHER_JS,
    PYPI,
    PYSHER,
    Backend,
    Client,
    Column,
    Echo,
    PusherJs,
    Refused,
)
from matrix.world import App, Visitor, World, shared_secret, signed_user

Run = Callable[["Cell"], Awaitable[None]]


@dataclass
class Row:
    """One feature. `cells` has, by column, the function to run or the reason why there is none."""

    id: str
    title: str
    cells: dict[str, Run | str] = field(default_factory=dict)

    def by(self, *columns: Column) -> Callable[[Run], Run]:
        def register(run: Run) -> Run:
            for column in columns:
                assert column.id not in self.cells
                self.cells[column.id] = run
            return run

        return register

    def without(self, *columns: Column, why: str) -> None:
        for column in columns:
            assert column.id not in self.cells
            self.cells[column.id] = why


ROWS: list[Row] = []


def row(id: str, title: str) -> Row:
    ROWS.append(Row(id, title))
    return ROWS[-1]


PAGES = (PUSHER_JS, CHROMIUM, ECHO)
ALL_CLIENTS = (*PAGES, PYSHER)
ALL_BACKENDS = (NPM, PYPI)

SENDS_ONLY = "is an HTTP library and holds no connection"
RECEIVES_ONLY = "is a client library and doesn't call the HTTP API"
NO_USERS = "doesn't support signin"


@dataclass
class Cell:
    """One cell, or one rule, while it runs.

    Names made here are unique. `tidy` closes what it opened.
    """

    world: World
    row: str
    column: Column | None
    _clients: list[Client] = field(default_factory=list)
    _sockets: list[Socket] = field(default_factory=list)
    _apis: list[Api] = field(default_factory=list)

    def named(self, prefix: str) -> str:
        return f"{prefix}{self.row}-{self.column.id if self.column else 'bare'}"

    def app(self, name: str = "plain") -> App:
        return self.world.apps[name]

    def client(self, app: App | None = None, user: str | int | None = None, **visitor: Any) -> Any:
        """The column's library as a client of a visitor, not yet connected."""
        who = Visitor(app or self.app(), user, **visitor)
        assert self.column is not None
        made = CLIENTS[self.column.id](self.world, f"{self.named('client ')} {len(self._clients)}", who)
        self._clients.append(made)
        return made

    async def connect(self, app: App | None = None, user: str | int | None = None, **visitor: Any) -> Any:
        made = self.client(app, user, **visitor)
        await made.connect()
        return made

    def backend(self, app: App | None = None, **how: bool) -> Backend:
        assert self.column is not None
        return BACKENDS[self.column.id](self.world, app or self.app(), **how)

    async def socket(self, app: App | None = None, **how: Any) -> Socket:
        """A bare client."""
        made = await Socket.connect(app or self.app(), **how)
        self._sockets.append(made)
        return made

    async def api(self, app: App | None = None) -> Api:
        """The bare HTTP API."""
        self._apis.append(await Api(app or self.app()).__aenter__())
        return self._apis[-1]

    async def tidy(self) -> None:
        for client in self._clients:
            await client.close()
        for socket in self._sockets:
            socket.abort()
        for api in self._apis:
            await api.__aexit__()


def info_of(user: object) -> dict[str, str]:
    return {"name": f"name of {user}"}


def data_of(frame: Frame) -> Any:
    return json.loads(frame["data"])


async def signs_in(socket: Socket, visitor: Visitor) -> None:
    """A bare client signs in as the visitor."""
    socket.send({"event": "pusher:signin", "data": signed_user(visitor, socket.socket_id)})
    await socket.next("pusher:signin_success")


# -- connections ----------------------------------------------------------------------------------------------------

connecting = row("connect", "Connects and gets a socket id")
connecting.without(*ALL_BACKENDS, why=SENDS_ONLY)


@connecting.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    client = await cell.connect()
    high, low = client.socket_id.split(".")
    assert high.isdigit()
    assert low.isdigit()


over_tls = row("tls", "`wss` and `https`, with a self-made certificate")


@over_tls.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    client, channel = cell.client(), cell.named("private-")
    await client.connect(tls=True)
    await client.subscribe(channel, "news")
    await (await cell.api()).publish(channel, "news", '{"n":1}')
    assert (await client.heard(channel, "news"))["data"] == {"n": 1}


@over_tls.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    socket, channel = await cell.socket(), cell.named("")
    await socket.subscribe(channel)
    backend = cell.backend(tls=True)
    assert await backend.trigger(channel, "news", {"n": 1}) == {}
    assert data_of(await socket.next("news")) == {"n": 1}
    assert (await backend.channel(channel))["occupied"] is True


for transport in ("xhr_streaming", "xhr_polling"):
    fallback = row(transport, f"Without WebSockets, by `{transport}`: channels, presence, client events")
    fallback.without(PYSHER, why="knows WebSockets only")
    fallback.without(*ALL_BACKENDS, why=SENDS_ONLY)

    @fallback.by(*PAGES)
    async def _(cell: Cell, transport: str = transport) -> None:
        await _used_by_http(cell, transport)


async def _used_by_http(cell: Cell, *transports: str) -> None:
    """A client without WebSockets and a bare one see the same."""
    client, channel, anna, bert = cell.client(user="anna"), cell.named("presence-"), "anna", "bert"
    client.without_websockets(*transports)
    # One of the two over TLS.
    await client.connect(tls=transports == ("xhr_streaming",))
    await client.subscribe(channel, "n", "client-n")
    # Left to itself, pusher-js polls as well when a stream isn't open within 4 s, and takes what opens first.
    assert await client.transport() in (transports or ("xhr_streaming", "xhr_polling"))
    other = await cell.socket()
    await other.subscribe(channel, bert, info_of(bert))
    await client.wait_joined(channel, bert)
    api = await cell.api()
    for number in range(30):
        await api.publish(channel, "n", str(number))
    await client.heard(channel, "n", 30)
    assert client.heard_so_far(channel, "n") == list(range(30))
    for number in range(8):
        await client.trigger(channel, "client-n", {"n": number})
    sent = [data_of(await other.next("client-n")) for _ in range(8)]
    # Each is a request of its own. How they are put in order is tested in worker/fallback.
    assert sorted(data["n"] for data in sent) == list(range(8))
    other.send({"event": "client-n", "channel": channel, "data": {"n": "bert's"}})
    assert (await client.heard(channel, "client-n"))["data"] == {"n": "bert's"}
    if transports == ("xhr_polling",):
        # No request says that a polling client has closed, so its session ends 30 s later. worker/fallback tests that.
        await client.unsubscribe(channel)
    else:
        await client.close()
    assert data_of(await other.next("pusher_internal:member_removed", channel))["user_id"] == anna


forbidden = row("websockets-forbidden", "WebSockets forbidden on the page: the library chooses HTTP by itself")
forbidden.without(PUSHER_JS, ECHO, PYSHER, why="can't be forbidden in Node or Python as in a browser")
forbidden.without(*ALL_BACKENDS, why=SENDS_ONLY)


@forbidden.by(CHROMIUM)
async def _(cell: Cell) -> None:
    await cell.world.node.call("forbid_websockets", in_browser=True)
    try:
        await _used_by_http(cell)
    finally:
        await cell.world.node.call("allow_websockets", in_browser=True)


# -- channels -------------------------------------------------------------------------------------------------------

for prefix, title in (("", "Public"), ("private-", "Private")):
    channels = row(f"{prefix or 'public-'}channel", f"{title} channel: subscribes and receives events")

    @channels.by(*ALL_CLIENTS)
    async def _(cell: Cell, prefix: str = prefix) -> None:
        client, channel = await cell.connect(), cell.named(prefix)
        await client.subscribe(channel, "news", "App\\Events\\Text")
        api = await cell.api()
        await api.publish(channel, "news", '{"n":[1,null,"ü"]}')
        await api.publish(channel, "App\\Events\\Text", "no JSON")
        assert (await client.heard(channel, "news"))["data"] == {"n": [1, None, "ü"]}
        assert (await client.heard(channel, "App\\Events\\Text"))["data"] == "no JSON"
        await client.unsubscribe(channel)
        await eventually(lambda: api.subscription_count(channel), 0)

    @channels.by(*ALL_BACKENDS)
    async def _(cell: Cell, prefix: str = prefix) -> None:
        socket, channel, backend = await cell.socket(), cell.named(prefix), cell.backend()
        signed = await backend.authorize(channel, socket.socket_id) if prefix else {}
        socket.send({"event": "pusher:subscribe", "data": {"channel": channel, **signed}})
        await socket.next("pusher_internal:subscription_succeeded", channel)
        assert await backend.trigger([channel, f"{channel}-other"], "news", {"n": [1, None, "ü"]}) == {}
        assert data_of(await socket.next("news", channel)) == {"n": [1, None, "ü"]}


presence = row("presence-channel", "Presence channel: members join and leave")


@presence.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    channel, anna, bert, carl = cell.named("presence-"), *(cell.named(f"{name}-") for name in ("anna", "bert", "carl"))
    other = await cell.socket()
    await other.subscribe(channel, bert, info_of(bert))
    client = await cell.connect(user=anna)
    await client.subscribe(channel)
    assert await client.members(channel) == {anna, bert}
    assert data_of(await other.next("pusher_internal:member_added"))["user_id"] == anna
    third = await cell.socket()
    await third.subscribe(channel, carl, info_of(carl))
    await client.wait_joined(channel, carl)
    third.unsubscribe(channel)
    await client.wait_left(channel, carl)
    await client.unsubscribe(channel)
    assert data_of(await other.next("pusher_internal:member_removed", channel))["user_id"] == carl
    assert data_of(await other.next("pusher_internal:member_removed", channel))["user_id"] == anna


async def _subscribes_by(cell: Cell, backend: Backend, channel: str, user: object, app: App | None = None) -> Socket:
    """A bare client in a presence channel, signed by the column's library."""
    socket = await cell.socket(app)
    member = {"user_id": user, "user_info": info_of(user)}
    signed = await backend.authorize(channel, socket.socket_id, member)
    socket.send({"event": "pusher:subscribe", "data": {"channel": channel, **signed}})
    return socket


@presence.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    channel, backend = cell.named("presence-"), cell.backend()
    first = await _subscribes_by(cell, backend, channel, "anna")
    await first.next("pusher_internal:subscription_succeeded", channel)
    second = await _subscribes_by(cell, backend, channel, "bert")
    success = data_of(await second.next("pusher_internal:subscription_succeeded", channel))
    assert success["presence"]["hash"] == {"anna": info_of("anna"), "bert": info_of("bert")}
    assert data_of(await first.next("pusher_internal:member_added")) == {
        "user_id": "bert",
        "user_info": info_of("bert"),
    }
    assert sorted(user["id"] for user in (await backend.users(channel))["users"]) == ["anna", "bert"]
    second.abort()
    assert data_of(await first.next("pusher_internal:member_removed")) == {"user_id": "bert"}


wrong_signature = row("wrong-signature", "Wrong secret: refused with an error")


@wrong_signature.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    client = await cell.connect(user="mallory", forged=True)
    prefixes = ["private-a-", "private-cache-b-", "presence-c-", "presence-cache-d-"]
    if cell.column is not PYSHER:
        prefixes += ["private-encrypted-e-", "private-encrypted-cache-f-"]
    for prefix in prefixes:
        await client.ask(cell.named(prefix))
        refused = await client.wait_refused(cell.named(prefix))
        assert (refused["type"], refused["status"]) == ("AuthError", 401)
    assert await client.is_connected()


@wrong_signature.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    app = cell.app()
    backend = cell.backend(App(app.port, app.tls_port, app.app_id, app.app_key, "f" * 20))
    with pytest.raises(Refused) as refusal:
        await backend.trigger(cell.named(""), "e", {})
    assert refusal.value.status == 401
    # The answer shows the string to sign, so that a developer sees that the secret is wrong.
    assert f"POST\\n/apps/{app.app_id}/events\\n" in refusal.value.text.replace("\\\\n", "\\n")


exclusion = row("exclusion", "`socket_id` excludes a connection from an event")


@exclusion.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    client, other, channel = await cell.connect(), await cell.socket(), cell.named("")
    await client.subscribe(channel, "to-others", "to-all")
    await other.subscribe(channel)
    api = await cell.api()
    await api.publish(channel, "to-others", "{}", socket_id=client.socket_id)
    await api.publish(channel, "to-all", "{}")
    await other.next("to-others")
    await client.heard(channel, "to-all")
    assert not client.has_heard(channel, "to-others")


@exclusion.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    acting, other, channel, backend = await cell.socket(), await cell.socket(), cell.named(""), cell.backend()
    for socket in (acting, other):
        await socket.subscribe(channel)
    await backend.trigger(channel, "to-others", {}, socket_id=acting.socket_id)
    await backend.trigger(channel, "to-all", {})
    await other.next("to-others")
    await acting.next("to-all")
    assert not acting.all("to-others")


client_events = row("client-events", "Client events, with the sender's id on presence channels")
client_events.without(*ALL_BACKENDS, why=SENDS_ONLY)


@client_events.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    client, other = await cell.connect(user="anna"), await cell.socket()
    for prefix, user in (("private-a-", None), ("presence-b-", "anna"), ("presence-cache-", "anna")):
        channel = cell.named(prefix)
        await client.subscribe(channel, "client-typing")
        await other.subscribe(channel, "bert", info_of("bert"))
        await client.trigger(channel, "client-typing", {"on": [1, None]})
        frame = await other.next("client-typing", channel)
        assert data_of(frame) == {"on": [1, None]}
        assert frame.get("user_id") == user
        answer = {"event": "client-typing", "channel": channel, "data": {"back": True}, "user_id": "spoofed"}
        other.send(answer)
        heard = await client.heard(channel, "client-typing")
        assert heard["data"] == {"back": True}
        if client.tells_sender:
            assert heard.get("user_id") == (None if user is None else "bert")
        assert client.has_heard(channel, "client-typing") == 1, "the sender received its own event"


numeric_ids = row("numeric-id", "A numeric user id becomes a string")


@numeric_ids.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    client, other, channel = await cell.connect(user=10), await cell.socket(), cell.named("presence-")
    await other.subscribe(channel, "watcher", info_of("watcher"))
    await client.subscribe(channel)
    assert await client.members(channel) == {"10", "watcher"}
    assert data_of(await other.next("pusher_internal:member_added"))["user_id"] == "10"


@numeric_ids.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    channel, backend = cell.named("presence-"), cell.backend()
    socket = await _subscribes_by(cell, backend, channel, 10)
    success = data_of(await socket.next("pusher_internal:subscription_succeeded"))
    assert success["presence"]["ids"] == ["10"]
    assert await backend.users(channel) == {"users": [{"id": "10"}]}


second_tab = row("second-tab", "A second tab of a user doesn't add a member")


async def _second_tab(
    cell: Cell, channel: str, open_tab: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]
) -> None:
    """`open_tab` subscribes the same user once more and returns a function that closes the tab."""
    watcher, api = await cell.socket(), await cell.api()
    await watcher.subscribe(channel, "watcher", info_of("watcher"))
    first = await open_tab()
    second = await open_tab()
    assert await api.users(channel) == ["anna", "watcher"]
    await eventually(lambda: api.subscription_count(channel), 3)
    await first()
    await eventually(lambda: api.subscription_count(channel), 2)
    # Frames of one channel come in order, so frames that the tabs caused come before this member.
    await (await cell.socket()).subscribe(channel, "newcomer", info_of("newcomer"))
    await watcher.until(lambda: len(watcher.all("pusher_internal:member_added")) == 2)
    added = [data_of(frame)["user_id"] for frame in watcher.all("pusher_internal:member_added")]
    assert added == ["anna", "newcomer"]
    assert not watcher.all("pusher_internal:member_removed")
    await second()
    assert data_of(await watcher.next("pusher_internal:member_removed")) == {"user_id": "anna"}


@second_tab.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    channel = cell.named("presence-")

    async def open_tab() -> Callable[[], Awaitable[None]]:
        tab = await cell.connect(user="anna")
        await tab.subscribe(channel)
        return tab.close  # type: ignore[no-any-return]

    await _second_tab(cell, channel, open_tab)


@second_tab.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    channel, backend = cell.named("presence-"), cell.backend()

    async def open_tab() -> Callable[[], Awaitable[None]]:
        socket = await _subscribes_by(cell, backend, channel, "anna")
        await socket.next("pusher_internal:subscription_succeeded")
        return socket.close

    await _second_tab(cell, channel, open_tab)


member_limit = row("member-limit", "A full presence channel refuses a new user, not a member's second tab")


@member_limit.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    app, channel = cell.app("small rooms"), cell.named("presence-")
    for user in ("anna", "bert"):
        await (await cell.socket(app)).subscribe(channel, user, info_of(user))
    third = await cell.connect(app, user="carl")
    await third.ask(channel)
    refused = await third.wait_refused(channel)
    assert (refused["type"], refused["status"]) == ("LimitReached", 413)
    assert await third.is_connected()
    tab = await cell.connect(app, user="anna")
    await tab.subscribe(channel)
    assert await tab.members(channel) == {"anna", "bert"}


@member_limit.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    app, channel = cell.app("small rooms"), cell.named("presence-")
    backend = cell.backend(app)
    for user, answer in (("anna", "succeeded"), ("bert", "succeeded"), ("carl", "error"), ("anna", "succeeded")):
        socket = await _subscribes_by(cell, backend, channel, user, app)
        name = f"pusher{'' if answer == 'error' else '_internal'}:subscription_{answer}"
        await socket.next(name, channel)
    assert sorted(user["id"] for user in (await backend.users(channel))["users"]) == ["anna", "bert"]


# -- grants, and what is taken back ---------------------------------------------------------------------------------

granting = row("grant", "A signed grant (JWT) opens channels without an auth request for each")
granting.without(*ALL_BACKENDS, why=SENDS_ONLY)


@granting.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    app, user = cell.app("granting"), cell.named("user-")
    news, room, other = cell.named("private-granted-"), cell.named("presence-room-"), cell.named("private-other-")
    auth = mint(app.app_key, app.app_secret, "private-granted-*", "presence-room-*", sub=user, info=info_of(user))
    client = await cell.connect(app, user, grant=auth)
    asked = len(cell.world.asked)
    await client.subscribe(news, "news")
    await client.subscribe(room)
    assert await client.members(room) == {user}
    await (await cell.api(app)).publish(news, "news", '{"text":"granted"}')
    await client.heard(news, "news", data={"text": "granted"})
    await client.ask(other)
    assert "no pattern of its channels" in (await client.wait_refused(other))["error"]
    assert len(cell.world.asked) == asked
    status, revoked = await (await cell.api(app)).ask("POST", "/grants/revoke", {"sub": user})
    # A worker that is late isn't counted, and ends them as well.
    assert (status, revoked["unsubscribed"] <= 2) == (200, True)
    assert (await client.wait_refused(news))["error"] == "access was revoked"


removed = row("unsubscribed", "Removed from one channel by the app, the connection stays")
removed.without(*ALL_BACKENDS, why=SENDS_ONLY)


@removed.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    user, room, kept = cell.named("user-"), cell.named("presence-left-"), cell.named("private-kept-")
    other = await cell.socket()
    await other.subscribe(room, "other")
    client = await cell.connect(user=user)
    await client.subscribe(room)
    await client.subscribe(kept, "news")
    api = await cell.api()
    status, ended = await api.ask("POST", f"/channels/{room}/unsubscribe", {"user_id": user})
    assert (status, ended["unsubscribed"] <= 1) == (200, True)
    fault = await client.wait_refused(room)
    assert (fault["type"], fault["status"], fault["error"]) == ("AuthError", 401, "access was revoked")
    assert data_of(await other.next("pusher_internal:member_removed", room)) == {"user_id": user}
    await api.publish(kept, "news", '{"text":"kept"}')
    await client.heard(kept, "news", data={"text": "kept"})
    assert await client.is_connected()


# -- cache ----------------------------------------------------------------------------------------------------------

for prefix, title in (("cache-", "public"), ("private-cache-", "private"), ("presence-cache-", "presence")):
    caching = row(f"{prefix}channel", f"Cache channel, {title}: cache miss, then the last event")

    @caching.by(*ALL_CLIENTS)
    async def _(cell: Cell, prefix: str = prefix) -> None:
        channel, api = cell.named(prefix), await cell.api()
        first = await cell.connect(user="anna")
        await first.subscribe(channel, "pusher:cache_miss", "news")
        await first.heard(channel, "pusher:cache_miss")
        for number in (1, 2):
            await api.publish(channel, "news", json.dumps({"n": number}))
        await first.heard(channel, "news", 2)
        await first.unsubscribe(channel)
        await eventually(lambda: api.subscription_count(channel), 0)
        second = await cell.connect(user="bert")
        await second.subscribe(channel, "pusher:cache_miss", "news")
        assert (await second.heard(channel, "news"))["data"] == {"n": 2}
        await api.publish(channel, "news", '{"n":3}')
        assert (await second.heard(channel, "news", 2))["data"] == {"n": 3}
        assert not second.has_heard(channel, "pusher:cache_miss")

    @caching.by(*ALL_BACKENDS)
    async def _(cell: Cell, prefix: str = prefix) -> None:
        channel, backend = cell.named(prefix), cell.backend()
        assert (await backend.channel(channel, "cache"))["cache"] is None
        early = await cell.socket()
        await early.subscribe(channel)
        await early.next("pusher:cache_miss", channel)
        early.abort()
        # It is cached without subscribers and with an excluded socket too.
        await backend.trigger(channel, "news", {"n": 1}, socket_id=early.socket_id)
        cached = (await backend.channel(channel, "cache"))["cache"]
        assert json.loads(cached["data"]) == {"n": 1}
        assert 0 < cached["ttl"] <= 1800
        late = await cell.socket()
        await late.subscribe(channel)
        assert data_of(await late.next("news", channel)) == {"n": 1}
        await late.settle()
        assert not late.all("pusher:cache_miss")


# -- encryption -----------------------------------------------------------------------------------------------------


def sealed(channel: str, data: object) -> str:
    """Data for an encrypted channel, as a backend encrypts it."""
    box = SecretBox(base64.b64decode(shared_secret(channel))).encrypt(json.dumps(data).encode())
    parts = {"nonce": box.nonce, "ciphertext": box.ciphertext}
    return json.dumps({name: base64.b64encode(part).decode() for name, part in parts.items()})


NO_CRYPTO = "has no cryptography, so its user gets ciphertext"

for prefix, title in (
    ("private-encrypted-", "Encrypted channel"),
    ("private-encrypted-cache-", "Encrypted cache channel"),
):
    encrypting = row(f"{prefix}channel", f"{title}: only publisher and subscribers can read it")
    encrypting.without(PYSHER, why=NO_CRYPTO)

    @encrypting.by(*PAGES)
    async def _(cell: Cell, prefix: str = prefix) -> None:
        client, channel, api = await cell.connect(), cell.named(prefix), await cell.api()

        async def publish(number: int) -> None:
            await api.publish(channel, "secret", sealed(channel, {"n": number}))

        if "cache" in prefix:
            await publish(1)
        await client.subscribe(channel, "secret")
        if "cache" not in prefix:
            await publish(1)
        assert (await client.heard(channel, "secret"))["data"] == {"n": 1}
        await publish(2)
        assert (await client.heard(channel, "secret", 2))["data"] == {"n": 2}

    @encrypting.by(*ALL_BACKENDS)
    async def _(cell: Cell, prefix: str = prefix) -> None:
        socket, channel, backend = await cell.socket(), cell.named(prefix), cell.backend()
        signed = await backend.authorize(channel, socket.socket_id)
        box = SecretBox(base64.b64decode(signed["shared_secret"]))
        if "cache" in prefix:
            await backend.trigger(channel, "secret", {"n": 1})
        socket.send({"event": "pusher:subscribe", "data": {"channel": channel, "auth": signed["auth"]}})
        await socket.next("pusher_internal:subscription_succeeded", channel)
        if "cache" not in prefix:
            await backend.trigger(channel, "secret", {"n": 1})
        given = data_of(await socket.next("secret", channel))
        assert set(given) == {"nonce", "ciphertext"}
        opened = box.decrypt(base64.b64decode(given["ciphertext"]), base64.b64decode(given["nonce"]))
        assert json.loads(opened) == {"n": 1}


# -- users ----------------------------------------------------------------------------------------------------------

signin = row("signin", "Signs in a user")
signin.without(PYSHER, why=NO_USERS)


@signin.by(*PAGES)
async def _(cell: Cell) -> None:
    client = await cell.connect(user="anna")
    assert await client.signin() == {"id": "anna", "user_info": info_of("anna")}
    mallory = await cell.connect(user="mallory", forged=True)
    await mallory.begin_signin()
    await mallory.wait_error(4009)
    assert await mallory.is_connected()


async def _signed_in_by(cell: Cell, backend: Backend, user: dict[str, Any], app: App | None = None) -> Socket:
    """A bare client, signed in with what the column's library signed."""
    socket = await cell.socket(app)
    signed = await backend.authenticate_user(socket.socket_id, user)
    socket.send({"event": "pusher:signin", "data": signed})
    success = await socket.next("pusher:signin_success")
    assert data_of(success)["user_data"] == signed["user_data"]
    return socket


@signin.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    await _signed_in_by(cell, cell.backend(), {"id": "anna", "user_info": info_of("anna")})


signin_refused = row("signin-error", "Sign-in refused by the back end: `pusher:signin_error` with its status")
signin_refused.without(PYSHER, why=NO_USERS)
signin_refused.without(*ALL_BACKENDS, why=SENDS_ONLY)


@signin_refused.by(*PAGES)
async def _(cell: Cell) -> None:
    visitor = await cell.connect()
    await visitor.begin_signin()
    refused = (await visitor.heard_as_user("pusher:signin_error"))["data"]
    assert (refused["type"], refused["status"]) == ("AuthError", 403)
    assert await visitor.is_connected()


to_user = row("server-to-user", "An event to a user reaches all of the user's connections and no others")
to_user.without(PYSHER, why=NO_USERS)


@to_user.by(*PAGES)
async def _(cell: Cell) -> None:
    anna, bert = cell.named("anna-"), cell.named("bert-")
    clients = [await cell.connect(user=user) for user in (anna, anna, bert)]
    for client in clients:
        await client.signin()
    api = await cell.api()
    await api.publish(f"#server-to-user-{anna}", "note", '{"n":1}')
    for client in clients[:2]:
        assert (await client.heard_as_user("note"))["data"] == {"n": 1}
    await api.publish(f"#server-to-user-{bert}", "note", '{"n":2}')
    assert (await clients[2].heard_as_user("note"))["data"] == {"n": 2}


@to_user.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    backend, anna, bert = cell.backend(), cell.named("anna-"), cell.named("bert-")
    first, second = [await _signed_in_by(cell, backend, {"id": user}) for user in (anna, bert)]
    for socket, own in ((first, anna), (second, bert)):
        await socket.subscribe(f"#server-to-user-{own}")
    second.send({"event": "pusher:subscribe", "data": {"channel": f"#server-to-user-{anna}"}})
    await second.next("pusher:subscription_error", f"#server-to-user-{anna}")
    for user in (anna, bert):
        assert await backend.send_to_user(user, "note", {"for": user}) == {}
    for socket, own in ((first, anna), (second, bert)):
        assert data_of(await socket.next("note")) == {"for": own}


watchlist = row("watchlist", "Watchlist: friends go online and offline")
watchlist.without(PYSHER, why=NO_USERS)


@watchlist.by(*PAGES)
async def _(cell: Cell) -> None:
    app, bert = cell.app("social"), cell.named("bert-")
    client = await cell.connect(app, user=cell.named("anna-"), watchlist=(bert,))
    await client.signin()
    assert (await client.heard_of_friends("offline"))["data"]["user_ids"] == [bert]
    friend = await cell.socket(app)
    await signs_in(friend, Visitor(app, bert))
    assert (await client.heard_of_friends("online"))["data"]["user_ids"] == [bert]
    friend.abort()
    assert (await client.heard_of_friends("offline", 2))["data"]["user_ids"] == [bert]


@watchlist.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    app, anna, bert = cell.app("social"), cell.named("anna-"), cell.named("bert-")
    backend = cell.backend(app)
    first = await _signed_in_by(cell, backend, {"id": anna, "watchlist": [bert]}, app)
    news = data_of(await first.next("pusher_internal:watchlist_events"))
    assert news == {"events": [{"name": "offline", "user_ids": [bert]}]}
    await _signed_in_by(cell, backend, {"id": bert}, app)
    news = data_of(await first.next("pusher_internal:watchlist_events"))
    assert news == {"events": [{"name": "online", "user_ids": [bert]}]}


by_user = row("presence-by-user", "Presence channel joined as the signed-in user, without member data")
by_user.without(PYSHER, why=NO_USERS)


@by_user.by(*PAGES)
async def _(cell: Cell) -> None:
    client, other, channel = (
        await cell.connect(user="anna", by_signin=True),
        await cell.socket(),
        cell.named("presence-"),
    )
    await other.subscribe(channel, "bert", info_of("bert"))
    await client.signin()
    await client.subscribe(channel)
    assert await client.members(channel) == {"anna", "bert"}
    added = data_of(await other.next("pusher_internal:member_added"))
    assert added == {"user_id": "anna", "user_info": info_of("anna")}


@by_user.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    backend, channel = cell.backend(), cell.named("presence-")
    socket = await _signed_in_by(cell, backend, {"id": "anna", "user_info": info_of("anna")})
    signed = await backend.authorize(channel, socket.socket_id)
    socket.send({"event": "pusher:subscribe", "data": {"channel": channel, **signed}})
    success = data_of(await socket.next("pusher_internal:subscription_succeeded"))
    assert success["presence"] == {"count": 1, "ids": ["anna"], "hash": {"anna": info_of("anna")}}


termination = row("terminate", "4009, a user's connections are terminated: stays disconnected")
termination.without(PYSHER, why=NO_USERS)


@termination.by(*PAGES)
async def _(cell: Cell) -> None:
    anna, channel = cell.named("anna-"), cell.named("presence-")
    first, second, bystander = [await cell.connect(user=anna) for _ in range(3)]
    for client in (first, second):
        await client.signin()
    await bystander.subscribe(channel)  # A connection with the same user id by presence only stays connected.
    status, body = await (await cell.api()).ask("POST", f"/users/{anna}/terminate_connections", {})
    assert (status, body) == (200, {})
    for client in (first, second):
        await client.wait_gave_up(4009)
    assert await bystander.is_connected()


@termination.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    backend, anna, bert = cell.backend(), cell.named("anna-"), cell.named("bert-")
    first, second, other = [await _signed_in_by(cell, backend, {"id": user}) for user in (anna, anna, bert)]
    assert await backend.terminate(anna) == {}
    for socket in (first, second):
        assert await socket.until_closed() == 4009
    await other.settle()


must_authorise = row("authorised-only", "4009, not authorised in time: stays disconnected")
must_authorise.without(*ALL_BACKENDS, why=SENDS_ONLY)


@must_authorise.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    app = cell.app("authorised only")

    async def allow(seconds: int) -> None:
        await cell.world.command("app", "set", app.app_id, f"user_authentication_timeout_s={seconds}")

    # A slow machine may take longer than a second to connect and to subscribe.
    await allow(3600)
    authorised = await cell.connect(app)
    await authorised.subscribe(cell.named("private-"))
    idle = await cell.connect(app)
    await idle.subscribe(cell.named(""))
    await allow(1)
    await idle.wait_gave_up(4009)
    assert await authorised.is_connected()


# -- counts and queries ---------------------------------------------------------------------------------------------

counting = row("subscription-count", "The subscription count is sent when it changes")
counting.without(*ALL_BACKENDS, why=SENDS_ONLY)


@counting.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    app, channel, event = cell.app("social"), cell.named(""), "pusher:subscription_count"
    client = await cell.connect(app)
    await client.subscribe(channel, event)
    await client.heard(channel, event, data={"subscription_count": 1})
    other = await cell.socket(app)
    await other.subscribe(channel)
    await client.heard(channel, event, data={"subscription_count": 2})
    if isinstance(client, PusherJs):
        assert await client.call("subscription_count", channel=channel) == 2
    other.abort()
    await client.heard(channel, event, 2, data={"subscription_count": 1})


publish_info = row("info", "A publish returns counts: `info=…`")
publish_info.without(*ALL_CLIENTS, why=RECEIVES_ONLY)


async def _occupied(cell: Cell) -> tuple[str, str]:
    """A public channel with one subscriber and a presence channel with one user on two connections."""
    public, presence = cell.named("public-"), cell.named("presence-")
    first, second = await cell.socket(), await cell.socket()
    await first.subscribe(public)
    for socket in (first, second):
        await socket.subscribe(presence, "anna", info_of("anna"))
    return public, presence


@publish_info.by(NPM)
async def _(cell: Cell) -> None:
    public, presence = await _occupied(cell)
    body = await cell.backend().trigger([public, presence], "e", {}, info="user_count,subscription_count")
    counts = {public: {"subscription_count": 1}, presence: {"user_count": 1, "subscription_count": 2}}
    assert body == {"channels": counts}


@publish_info.by(PYPI)
async def _(cell: Cell) -> None:
    # trigger() has no parameter for it; the items of a batch pass through as they are.
    public, presence = await _occupied(cell)
    items: list[dict[str, Any]] = [
        {"channel": presence, "name": "e", "data": {}, "info": "user_count"},
        {"channel": public, "name": "e", "data": {}},
        {"channel": public, "name": "e", "data": {}, "info": "subscription_count"},
    ]
    body = await cell.backend().batch(items)
    assert body == {"batch": [{"user_count": 1}, {}, {"subscription_count": 1}]}


queries = row("queries", "Lists channels, and reads one of them")
queries.without(*ALL_CLIENTS, why=RECEIVES_ONLY)


@queries.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    public, presence = await _occupied(cell)
    backend = cell.backend()
    assert await backend.channels(public) == {"channels": {public: {}}}
    assert await backend.channels(presence, "user_count") == {"channels": {presence: {"user_count": 1}}}
    assert await backend.channels(cell.named("nobody-")) == {"channels": {}}
    assert await backend.channel(public, "subscription_count") == {"occupied": True, "subscription_count": 1}
    about = {"occupied": True, "subscription_count": 2, "user_count": 1}
    assert await backend.channel(presence, "user_count", "subscription_count") == about
    assert await backend.channel(cell.named("nobody-")) == {"occupied": False, "subscription_count": 0}
    assert await backend.users(presence) == {"users": [{"id": "anna"}]}
    for wrong in (backend.users(public), backend.channel(public, "user_count"), backend.channel(public, "cache")):
        with pytest.raises(Refused) as refusal:
            await wrong
        assert refusal.value.status == 400


batches = row("batch", "A batch of ten, in order")
batches.without(*ALL_CLIENTS, why=RECEIVES_ONLY)


@batches.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    socket, channel, backend = await cell.socket(), cell.named(""), cell.backend()
    await socket.subscribe(channel)

    def items(count: int) -> list[dict[str, Any]]:
        return [{"channel": channel, "name": f"e{number}", "data": {"n": number}} for number in range(count)]

    assert await backend.batch(items(10)) == {}
    for number in range(10):
        frame = await socket.next(channel=channel)
        assert (frame["event"], data_of(frame)) == (f"e{number}", {"n": number})
    with pytest.raises(Refused) as refusal:
        await backend.batch(items(11))
    assert refusal.value.status == 400


once = row("idempotency", "A repeated `correlation_id` publishes once")
once.without(*ALL_CLIENTS, why=RECEIVES_ONLY)
once.without(PYPI, why="has no parameter for a `correlation_id`")


@once.by(NPM)
async def _(cell: Cell) -> None:
    app, channel = cell.app("idempotent"), cell.named("")
    socket, backend = await cell.socket(app), cell.backend(app)
    await socket.subscribe(channel)
    for _ in range(3):
        assert await backend.trigger(channel, "e", {"n": 1}, correlation_id="order-7") == {}
    with pytest.raises(Refused) as refusal:
        await backend.trigger(channel, "e", {"n": 2}, correlation_id="order-7")
    assert refusal.value.status == 409
    await backend.trigger(channel, "end", {})
    await socket.next("end", channel)
    assert [data_of(frame) for frame in socket.all("e", channel)] == [{"n": 1}]


# -- keys, tokens, origins ------------------------------------------------------------------------------------------

SIGNS_ITSELF = "signs itself, with the app's secret"

by_token = row("auth-by-token", "Private channel signed by redpoll's `/auth` from another origin, by token")
by_token.without(*ALL_BACKENDS, why=SIGNS_ITSELF)


@by_token.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    client, channel = cell.client(user="anna"), cell.named("private-")
    await client.connect(by_token=True)
    await client.subscribe(channel, "news")
    await (await cell.api()).publish(channel, "news", '{"n":1}')
    assert (await client.heard(channel, "news"))["data"] == {"n": 1}


more_by_token = row("more-by-token", "Presence and encrypted channels signed in the same way")
more_by_token.without(*ALL_BACKENDS, why=SIGNS_ITSELF)
more_by_token.without(PYSHER, why="doesn't send the member data to the auth endpoint")


@more_by_token.by(*PAGES)
async def _(cell: Cell) -> None:
    client, presence, encrypted = (
        cell.client(user="anna"),
        cell.named("presence-a-"),
        cell.named("private-encrypted-b-"),
    )
    await client.connect(by_token=True)
    await client.subscribe(presence)
    assert await client.members(presence) == {"anna"}
    await client.subscribe(encrypted, "secret")
    await (await cell.api()).publish(encrypted, "secret", sealed(encrypted, {"n": 2}))
    assert (await client.heard(encrypted, "secret"))["data"] == {"n": 2}


rotation = row("key-rotation", "Key rotation with connected clients: a new key is added, the old one disabled")


async def _two_keys(cell: Cell) -> tuple[App, App]:
    app = cell.app("plain")
    old, new = [app.with_key(await cell.world.command("key", "add", app.app_id)) for _ in range(2)]
    return old, new


async def _times_refused(app: App) -> int:
    """The number of refused connections of twelve: all, once both workers know of the disabled key."""
    codes = []
    for _ in range(12):
        socket = await Socket.connect(app, established=False)
        await socket.next()
        socket.abort() if socket.frames[0]["event"] == "pusher:connection_established" else await socket.until_closed()
        codes.append(socket.close_code)
    return codes.count(4001)


@rotation.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    old, new = await _two_keys(cell)
    api, channel = await cell.api(new), cell.named("private-")
    before = await cell.connect(old)
    beside = await cell.connect(new)
    for client in (before, beside):
        await client.subscribe(channel, "one", "two")
    await (await cell.api(old)).publish(channel, "one", "{}")
    await cell.world.command("key", "disable", old.app_id, old.app_key)
    after = cell.client(old)
    await eventually(lambda: _times_refused(old), 12)
    await after.begin()
    await after.wait_gave_up(4001)
    await api.publish(channel, "two", "{}")
    for client in (before, beside):
        await client.heard(channel, "one")
        await client.heard(channel, "two")


@rotation.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    old, new = await _two_keys(cell)
    channel = cell.named("private-")
    # A client with the old key receives events signed with either, and its channels may be signed with the new one.
    socket = await cell.socket(old)
    signed = await cell.backend(new).authorize(channel, socket.socket_id)
    socket.send({"event": "pusher:subscribe", "data": {"channel": channel, **signed}})
    await socket.next("pusher_internal:subscription_succeeded", channel)
    for app, name in ((old, "by old"), (new, "by new")):
        assert await cell.backend(app).trigger(channel, name, {}) == {}
        await socket.next(name, channel)
    await cell.world.command("key", "disable", old.app_id, old.app_key)

    async def status() -> int:
        try:
            await cell.backend(old).trigger(channel, "late", {})
        except Refused as refusal:
            return refusal.status
        return 200

    await eventually(status, 401)
    await cell.backend(new).trigger(channel, "after", {})
    await socket.next("after", channel)


origins = row("origins", "4009, page of an origin that is not allowed: stays disconnected")
origins.without(*ALL_BACKENDS, why="sends no Origin; the setting is about pages")
origins.without(PUSHER_JS, ECHO, why="sends no Origin in Node")


@origins.by(CHROMIUM, PYSHER)
async def _(cell: Cell) -> None:
    refused = cell.client(cell.app("other pages only"))
    await refused.begin()
    await refused.wait_gave_up(4009)
    await cell.connect(cell.app("our page only"))


# -- history --------------------------------------------------------------------------------------------------------


async def publishes(cell: Cell, channel: str, numbers: range) -> None:
    api = await cell.api(cell.app("keeps"))
    for number in numbers:
        await api.publish(channel, "news", json.dumps({"n": number}))


async def hears(client: Client, channel: str, numbers: range) -> None:
    """The client received these events and no others, in this order."""
    for count, number in enumerate(numbers, 1):
        assert (await client.heard(channel, "news", count))["data"] == {"n": number}
    assert client.has_heard(channel, "news") == len(numbers)


replayed = row("history-replayed", "History: earlier messages are replayed on subscribe, by the app's rule")
replayed.without(*ALL_BACKENDS, why=SENDS_ONLY)


@replayed.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    app = cell.app("keeps")
    for prefix, first in (("replayed-", 2), ("presence-replayed-", 0)):
        channel = cell.named(prefix)
        await publishes(cell, channel, range(5))
        client = await cell.connect(app, "anna")
        await client.subscribe(channel, "news")
        # The last three are those of the moment when the server asks for them, just after the success frame.
        await hears(client, channel, range(first, 5))
        await publishes(cell, channel, range(5, 7))
        await hears(client, channel, range(first, 7))


asked_for = row("history-asked", "History: `pusher:history` on request, through the library's `send_event`")
asked_for.without(*ALL_BACKENDS, why=SENDS_ONLY)


@asked_for.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    channel = cell.named("asked-")
    await publishes(cell, channel, range(5))
    client = await cell.connect(cell.app("keeps"))
    await client.subscribe(channel, "news", "pusher:history")
    await client.send_event(channel, "pusher:history", {"channel": channel, "limit": 3})
    page = (await client.heard(channel, "pusher:history"))["data"]
    assert [json.loads(message["data"])["n"] for message in page["messages"]] == [2, 3, 4]
    assert {message["event"] for message in page["messages"]} == {"news"}
    assert page["epoch"]
    await publishes(cell, channel, range(5, 6))
    await hears(client, channel, range(5, 6))


growing = row("growing-text", "A text that grows: pieces are joined, and a later subscriber gets it as one event")
newest = row("newest-value", "Values in quick succession: the newest at most so often, and always the last")


def shown(pieces: list[Any]) -> str:
    """What a page shows that appends each piece."""
    return "".join(piece["delta"] for piece in pieces)


async def shows(client: Client, channel: str, text: str) -> list[Any]:
    """The pieces of which the client has put the text together."""
    async with asyncio.timeout(60):
        while shown(pieces := client.heard_so_far(channel, "text_delta")) != text:
            await asyncio.sleep(0.01)
    return pieces


def piece(number: int) -> dict[str, str]:
    return {"message_id": "m", "delta": f"{number} ü\n"}


@growing.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    channel, api, text = cell.named("growing-"), await cell.api(cell.app("keeps")), ""
    early, late = await cell.connect(cell.app("keeps")), await cell.connect(cell.app("keeps"))
    await early.subscribe(channel, "text_delta", "text_end")
    for number in range(200):
        await api.publish(channel, "text_delta", json.dumps(piece(number)))
        text += piece(number)["delta"]
        if number == 150:
            await late.subscribe(channel, "text_delta", "text_end")
    await api.publish(channel, "text_end", '{"message_id":"m"}')
    for client in (early, late):
        await client.heard(channel, "text_end")
        assert len(await shows(client, channel, text)) < 200
    later = await cell.connect(cell.app("keeps"))
    await later.subscribe(channel, "text_delta", "text_end")
    await later.heard(channel, "text_end")
    assert later.heard_so_far(channel, "text_delta") == [{"message_id": "m", "delta": text}]


@growing.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    socket, channel, backend = (
        await cell.socket(cell.app("keeps")),
        cell.named("growing-"),
        cell.backend(cell.app("keeps")),
    )
    await socket.subscribe(channel)
    for number in range(50):
        await backend.trigger(channel, "text_delta", piece(number))
    await backend.trigger(channel, "text_end", {})
    await socket.next("text_end")
    received = [data_of(frame) for frame in socket.all("text_delta")]
    assert shown(received) == "".join(piece(number)["delta"] for number in range(50))


newest.without(*ALL_BACKENDS, why=SENDS_ONLY)


@newest.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    channel = cell.named("newest-")
    client = await cell.connect(cell.app("keeps"))
    await client.subscribe(channel, "news", "end")
    await publishes(cell, channel, range(100))
    async with asyncio.timeout(60):
        while {"n": 99} not in client.heard_so_far(channel, "news"):
            await asyncio.sleep(0.01)
    received = [data["n"] for data in client.heard_so_far(channel, "news")]
    assert received == sorted(set(received))


resumed = row("history-resumed", "History: a user whose connection broke gets the missed messages")
resumed.without(*ALL_BACKENDS, why=SENDS_ONLY)
resumed.without(PYSHER, why="doesn't subscribe again after a reconnect")


async def resumes(cell: Cell, client: Client, channel: str, proxy: Proxy) -> None:
    await client.subscribe(channel, "news")
    await publishes(cell, channel, range(3))
    await client.heard(channel, "news", 3)
    api = await cell.api(cell.app("keeps"))
    proxy.stall()
    proxy.cut()
    await eventually(lambda: api.subscription_count(channel), 0)
    await publishes(cell, channel, range(3, 6))
    proxy.resume()
    await publishes(cell, channel, range(6, 8))
    # At least once: messages from just before the cut may come again.
    async with asyncio.timeout(60):
        while {data["n"] for data in client.heard_so_far(channel, "news")} != set(range(8)):
            await asyncio.sleep(0.01)


@resumed.by(*PAGES)
async def _(cell: Cell) -> None:
    """As a signed-in user on a private channel, and as the member of a presence channel."""
    app = cell.app("keeps")
    with Proxy(("127.0.0.1", app.port)) as proxy:
        through = replace(app, port=proxy.port)
        user = await cell.connect(through, f"user of {cell.column.id}")
        await user.signin()
        await resumes(cell, user, cell.named("private-resumed-"), proxy)
        member = await cell.connect(through, f"member of {cell.column.id}")
        await resumes(cell, member, cell.named("presence-resumed-"), proxy)


# -- hooks ----------------------------------------------------------------------------------------------------------

for framework, package in (("react", "@laravel/echo-react"), ("vue", "@laravel/echo-vue")):
    hooks = row(f"hooks-{framework}", f"`{package}`: hooks for status, socket id and channels")
    hooks.without(PUSHER_JS, CHROMIUM, PYSHER, *ALL_BACKENDS, why="has no hooks")

    @hooks.by(ECHO)
    async def _(cell: Cell, framework: str = framework) -> None:
        node, name = cell.world.node, cell.named("page ")
        echo = Echo(cell.world, name, Visitor(cell.app(), "anna"))
        options = echo.options(tls=False, by_token=False)
        await node.call("hooks_mount", client=name, framework=framework, options=options)
        await node.seen(client=name, status="connected")
        await node.seen(client=name, here=[info_of("anna")])
        api, other = await cell.api(), await cell.socket()
        for channel in ("hooks-news", "private-hooks-orders"):
            await eventually(lambda channel=channel: api.subscription_count(channel), 1)
        await api.publish("hooks-news", "headline", '{"n":1}')
        await api.publish("private-hooks-orders", "App\\Events\\OrderShipped", '{"n":2}')
        await api.publish("presence-hooks-room", "moved", '{"n":3}')
        for channel, number in (("public", 1), ("private", 2), ("presence", 3)):
            assert (await node.seen(client=name, channel=channel))["data"] == {"n": number}
        await other.subscribe("presence-hooks-room", "bert", info_of("bert"))
        await node.seen(client=name, joining=info_of("bert"))
        other.unsubscribe("presence-hooks-room")
        await node.seen(client=name, leaving=info_of("bert"))
        await node.call("hooks_unmount", client=name)
        for channel in ("hooks-news", "private-hooks-orders", "presence-hooks-room"):
            await eventually(lambda channel=channel: api.subscription_count(channel), 0)


# -- codes ----------------------------------------------------------------------------------------------------------

switched = row("switch-cluster", "`switchCluster` to another server keeps the subscriptions")
switched.without(*ALL_BACKENDS, why=SENDS_ONLY)
switched.without(PYSHER, why="has no `switchCluster`")


@switched.by(*PAGES)
async def _(cell: Cell) -> None:
    """The first server, here a proxy, hangs; the second one knows the same app."""
    app = cell.app()
    channels = [cell.named(prefix) for prefix in ("", "private-a-", "presence-b-")]
    with Proxy(("127.0.0.1", app.port)) as first:
        client = await cell.connect(replace(app, port=first.port), "anna")
        for channel in channels:
            await client.subscribe(channel, "news")
        first.stall()
        await client.switch(app)
        for channel in channels:
            await client.wait_subscribed_again(channel)
        api = await cell.api()
        for channel in channels:
            await api.publish(channel, "news", '{"n":1}')
            assert (await client.heard(channel, "news"))["data"] == {"n": 1}


tls_only = row("code-4000", "4000, app that requires TLS: reconnects by `wss`")
tls_only.without(*ALL_BACKENDS, why="holds no connection; the setting is about connections")


@tls_only.by(*PAGES)
async def _(cell: Cell) -> None:
    """After 4000 on `ws`, pusher-js reconnects over `wss` by itself."""
    client = await cell.connect(cell.app("tls only"))
    assert await client.uses_tls()


@tls_only.by(PYSHER)
async def _(cell: Cell) -> None:
    plain = cell.client(cell.app("tls only"))
    await plain.begin()
    await plain.wait_gave_up(4000)
    await cell.client(cell.app("tls only")).connect(tls=True)


unknown_key = row("code-4001", "4001, unknown key: stays disconnected; 401 over HTTP")


@unknown_key.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    app = cell.app()
    client = cell.client(App(app.port, app.tls_port, app.app_id, "0" * 20, app.app_secret))
    await client.begin()
    await client.wait_gave_up(4001)


@unknown_key.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    app = cell.app()
    with pytest.raises(Refused) as refusal:
        await cell.backend(App(app.port, app.tls_port, app.app_id, "0" * 20, app.app_secret)).trigger("any", "e", {})
    assert refusal.value.status == 401


disabled = row("code-4003", "4003, disabled app: stays disconnected; 403 over HTTP")


@disabled.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    client = cell.client(cell.app("disabled"))
    await client.begin()
    await client.wait_gave_up(4003)


@disabled.by(*ALL_BACKENDS)
async def _(cell: Cell) -> None:
    with pytest.raises(Refused) as refusal:
        await cell.backend(cell.app("disabled")).trigger("any", "e", {})
    assert refusal.value.status == 403
    assert "app_disabled" in refusal.value.text


over_quota = row("code-4004", "4004, connection limit reached: stays disconnected")
over_quota.without(*ALL_BACKENDS, why=SENDS_ONLY)


@over_quota.by(*ALL_CLIENTS)
async def _(cell: Cell) -> None:
    app = cell.app("one connection")
    async with asyncio.timeout(60):
        # The connection of the previous column may be counted a moment longer.
        while True:
            holder = await Socket.connect(app, established=False)
            first = await holder.next()
            if first["event"] == "pusher:connection_established":
                break
            await holder.until_closed()
    client = cell.client(app)
    await client.begin()
    await client.wait_gave_up(4004)
    assert not holder.lost
    await holder.close()
