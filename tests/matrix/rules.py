"""What libraries that can't run here require of redpoll's frames and bytes, and credentials that no library supports.

tests/matrix/test_matrix.py runs the rules. Each one names the libraries that require it, as their source code shows.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from helpers.wire import PING, PONG, Frame, digest, frame, signed_path
from matrix.features import Cell, data_of, info_of
from matrix.world import App, Visitor, signed_user


@dataclass
class Rule:
    """One rule: the libraries that require it, and a test of it."""

    id: str
    libraries: str
    title: str
    run: Callable[[Cell], Awaitable[None]]


RULES: list[Rule] = []

NATIVE = "Java, Swift"


def rule(id: str, libraries: str, title: str) -> Callable[[Callable[[Cell], Awaitable[None]]], None]:
    def register(run: Callable[[Cell], Awaitable[None]]) -> None:
        RULES.append(Rule(id, libraries, title, run))

    return register


async def _every_kind_of_frame(cell: Cell) -> list[Frame]:
    """Frames of every kind, from clients that cause them."""
    app, api = cell.app("social"), await cell.api(cell.app("social"))
    anna, bert, stamp = cell.named("anna-"), cell.named("bert-"), f"{time.monotonic_ns()}"
    first, second = await cell.socket(app), await cell.socket(app)
    presence, private, cache = (f"{prefix}{cell.named('')}-{stamp}" for prefix in ("presence-", "private-", "cache-"))
    first.send({"event": "pusher:signin", "data": signed_user(Visitor(app, anna, (bert,)), first.socket_id)})
    await first.next("pusher_internal:watchlist_events")
    await first.subscribe(presence, anna)
    await first.subscribe(cache)
    await first.next("pusher:cache_miss", cache)
    await api.publish(cache, "news", "{}")
    await second.subscribe(cache)
    await second.next("news", cache)
    await second.subscribe(presence, bert, info_of(bert))
    for socket in (first, second):
        await socket.subscribe(private)
    second.send({"event": "client-typing", "channel": presence, "data": {"an": "object"}})
    second.send({"event": "client-typing", "channel": private, "data": [1]})
    await first.next("client-typing", presence)
    await first.next("pusher_internal:subscription_count", private)
    second.unsubscribe(presence)
    await first.next("pusher_internal:member_removed", presence)
    # Refusals in band: unsigned, wrongly signed, a bad name, a client event on a public channel.
    first.send({"event": "pusher:subscribe", "data": {"channel": f"private-x-{stamp}"}})
    await first.next("pusher:subscription_error")
    wrong = {"channel": f"private-y-{stamp}", "auth": f"{app.app_key}:{'0' * 64}"}
    first.send({"event": "pusher:subscribe", "data": wrong})
    await first.next("pusher:subscription_error")
    first.send({"event": "pusher:subscribe", "data": {"channel": "not valid"}})
    await first.next("pusher:subscription_error")
    second.send({"event": "client-x", "channel": cache, "data": {}})
    await second.next("pusher:error")
    await first.settle()
    await second.settle()
    frames = [*first.frames, *second.frames]
    seen = {one["event"] for one in frames}
    internal = ("subscription_succeeded", "member_added", "member_removed", "subscription_count", "watchlist_events")
    kinds = {f"pusher_internal:{name}" for name in internal}
    kinds |= {"pusher:connection_established", "pusher:pong", "pusher:error", "pusher:subscription_error"}
    kinds |= {"pusher:cache_miss", "pusher:signin_success", "news", "client-typing"}
    assert kinds <= seen, f"not provoked: {kinds - seen}"
    return frames


@rule("data-present", "Java", "Every frame has `data`; without it Java throws NullPointerException")
async def _(cell: Cell) -> None:
    for one in await _every_kind_of_frame(cell):
        assert "data" in one, one


@rule("encrypted-frames", "Java", "On an encrypted channel, all frames but published events have the data `{}`")
async def _(cell: Cell) -> None:
    app, api = cell.app(), await cell.api()
    socket = await cell.socket(query="client=java-client&protocol=5&version=2.4.4")
    opened, cached, refused = (cell.named(f"private-encrypted-{word}") for word in ("", "cache-", "wrong-"))
    for channel in (opened, cached):
        await socket.subscribe(channel)
    await api.publish(opened, "news", "ciphertext")
    for auth in ({"auth": f"{app.app_key}:{'0' * 64}"}, {}):
        socket.send({"event": "pusher:subscribe", "data": {"channel": refused, **auth}})
        await socket.next("pusher:error")
    # The app takes the subscription back.
    ending = {"socket_id": socket.socket_id}
    assert await api.ask("POST", f"/channels/{opened}/unsubscribe", ending) == (200, {"unsubscribed": 1})
    assert (await socket.next("pusher:error"))["data"]["message"] == "access was revoked"
    await socket.settle()
    on_channels = [one for one in socket.frames if "channel" in one]
    assert {one["event"] for one in on_channels if one["channel"] != refused} >= {"news", "pusher:cache_miss"}
    assert all(one["data"] == "{}" for one in on_channels if one["event"] != "news"), on_channels


@rule("data-string", NATIVE, "`data` is a string in every frame but `pusher:error`; Swift drops anything else")
async def _(cell: Cell) -> None:
    for one in await _every_kind_of_frame(cell):
        assert isinstance(one["data"], dict if one["event"] == "pusher:error" else str), one


@rule("error-object", NATIVE, "`pusher:error` has an object with `message`, and `code`, a number or null")
async def _(cell: Cell) -> None:
    errors = [one for one in await _every_kind_of_frame(cell) if one["event"] == "pusher:error"]
    assert {type(one["data"]["code"]) for one in errors} == {int, type(None)}
    assert all(isinstance(one["data"]["message"], str) for one in errors)


@rule("presence-shape", NATIVE, "A member list has `count`, `ids` (strings) and `hash`, whose infos are never null")
async def _(cell: Cell) -> None:
    channel = cell.named("presence-")
    for user, info in ((7, None), ("eight", {"name": "Eight"})):
        socket = await cell.socket()
        success = data_of(await socket.subscribe(channel, user, info))
    assert success == {"presence": {"count": 2, "ids": ["7", "eight"], "hash": {"7": {}, "eight": {"name": "Eight"}}}}


@rule("websocket-ping", "Swift", "A WebSocket ping is answered by a pong with the same bytes")
async def _(cell: Cell) -> None:
    socket = await cell.socket()
    socket.write(frame(PING, b"still there?"))
    await socket.until(lambda: (PONG, b"still there?") in socket.control)


@rule("empty-ping", "Java", "`pusher:ping` without `data` is answered")
async def _(cell: Cell) -> None:
    socket = await cell.socket()
    socket.send({"event": "pusher:ping"})
    assert (await socket.next("pusher:pong"))["data"] == "{}"


@rule(
    "first-frame", "all", "The first frame is `connection_established`: a socket id of two numbers, a timeout above 0"
)
async def _(cell: Cell) -> None:
    socket = await cell.socket()
    established = socket.frames[0]
    assert set(established) == {"event", "data"}
    data = json.loads(established["data"])
    assert re.fullmatch(r"\d+\.\d+", data["socket_id"])
    assert all(int(part) < 1 << 63 for part in data["socket_id"].split("."))
    assert data["activity_timeout"] > 0


@rule(
    "close-codes",
    NATIVE,
    "Only Pusher's close codes, after a `pusher:error` with the same code; Swift retries on others",
)
async def _(cell: Cell) -> None:
    plain, elsewhere = cell.app(), "Origin: https://elsewhere.example\r\n"
    refused: list[tuple[int, App, dict[str, Any]]] = [
        (4000, cell.app("tls only"), {}),
        (4001, plain, {"key": "0" * 20}),
        (4003, cell.app("disabled"), {}),
        (4005, plain, {"key": "a/path/nobody/knows"}),
        (4006, plain, {"query": "protocol=seven"}),
        (4007, plain, {"query": "protocol=99"}),
        (4009, cell.app("other pages only"), {"extra": elsewhere}),
    ]
    for code, app, how in refused:
        socket = await cell.socket(app, established=False, **how)
        assert await socket.until_closed() == code
        (error,) = socket.frames
        assert (error["event"], error["data"]["code"]) == ("pusher:error", code)
        assert len(socket.close_reason.encode()) <= 123


@rule("old-protocol", "old clients", "Protocol 5, 6 and none in the URL work like 7")
async def _(cell: Cell) -> None:
    for query in ("protocol=5", "protocol=6&client=Old", "client=none"):
        await (await cell.socket(query=query)).subscribe(cell.named(""))


@rule("data-twice-encoded", "third-party clients", "A client's `data` may be an object or the JSON text of one")
async def _(cell: Cell) -> None:
    socket = await cell.socket()
    request = socket.subscribe_request(cell.named("private-"))
    socket.send({**request, "data": json.dumps(request["data"])})
    await socket.next("pusher_internal:subscription_succeeded")


async def _request(
    app: App, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """The request with exactly these bytes as its target."""
    url = URL(f"http://127.0.0.1:{app.port}{target}", encoded=True)
    more = {"Content-Type": "application/json", **(headers or {})}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body or None, headers=more) as answer,
    ):
        return answer.status, await answer.text()


def _event(channel: str, **more: object) -> bytes:
    return json.dumps({"name": "e", "channels": [channel], "data": "{}", **more}).encode()


@rule(
    "status-200", "PHP, Ruby, Go, Laravel", "Success is exactly 200 with a JSON object, empty ones `{}` and never `[]`"
)
async def _(cell: Cell) -> None:
    app = cell.app()
    base, nobody = f"/apps/{app.app_id}", cell.named("nobody-")
    item = {"name": "e", "channel": nobody, "data": ""}
    posts = {
        "/events": _event(nobody),
        "/batch_events": json.dumps({"batch": [item]}).encode(),
        "/users/nobody/terminate_connections": b"{}",
    }
    for path, body in posts.items():
        target = signed_path(app, "POST", f"{base}{path}", body)
        assert await _request(app, "POST", target, body) == (200, "{}"), path
    target = signed_path(app, "GET", f"{base}/channels", params={"filter_by_prefix": nobody})
    assert await _request(app, "GET", target) == (200, '{"channels":{}}')
    target = signed_path(app, "GET", f"{base}/channels/presence-{nobody}/users")
    assert await _request(app, "GET", target) == (200, '{"users":[]}')


def _php_target(app: App, path: str, params: Mapping[str, Any]) -> str:
    """As pusher-http-php signs: arrays joined by a comma in what is signed, written one by one in the address."""
    query = {"auth_key": app.app_key, "auth_timestamp": str(int(time.time())), "auth_version": "1.0", **params}
    plain = {name: ",".join(value) if isinstance(value, list) else value for name, value in query.items()}
    text = "&".join(f"{name}={plain[name]}" for name in sorted(plain))
    pairs = []
    for name, value in query.items():
        if isinstance(value, list):
            pairs += [f"{quote(f'{name}[{number}]', safe='')}={quote(item)}" for number, item in enumerate(value)]
        else:
            pairs.append(f"{name}={quote(value, safe='')}")
    signature = digest(app.app_secret, f"GET\n{path}\n{text}")
    return f"{path}?{'&'.join(pairs)}&auth_signature={signature}"


@rule("php-arrays", "PHP", "Array parameters are signed joined by commas, and read so")
async def _(cell: Cell) -> None:
    app, socket, channel = cell.app(), await cell.socket(), cell.named("presence-a,b-")
    await socket.subscribe(channel, "7")
    params = {"info": ["user_count", "subscription_count"], "filter_by_prefix": [channel]}
    status, text = await _request(app, "GET", _php_target(app, f"/apps/{app.app_id}/channels", params))
    counts = {"user_count": 1, "subscription_count": 1}
    assert (status, json.loads(text)) == (200, {"channels": {channel: counts}})


@rule("php-prefix", "PHP, Laravel", "The signature may leave out the path prefix `/api/v1`")
async def _(cell: Cell) -> None:
    app = cell.app()
    body = _event(cell.named(""))
    for target in (
        "/api/v1" + signed_path(app, "POST", f"/apps/{app.app_id}/events", body),
        signed_path(app, "POST", f"/api/v1/apps/{app.app_id}/events", body),
    ):
        assert await _request(app, "POST", target, body) == (200, "{}")


@rule("plus-in-query", "PHP, Go, Node", "A `+` in the query is read as `+` or as a space, whichever was signed")
async def _(cell: Cell) -> None:
    app = cell.app()
    path = f"/apps/{app.app_id}/channels"
    for signed in ("a+b", "a b"):
        target = signed_path(app, "GET", path, params={"filter_by_prefix": signed})
        target = target.replace("a%2Bb", "a+b")  # urlencode writes a space as +
        assert "filter_by_prefix=a+b" in target
        status, text = await _request(app, "GET", target)
        assert status == 200, text


@rule(
    "ids", "Go, PyPI", "App ids are decimal, keys and secrets hexadecimal: libraries check them and put them into URLs"
)
async def _(cell: Cell) -> None:
    made = await cell.world.command("app", "create", "for its id")
    assert re.fullmatch("[0-9]+", str(made["id"]))
    assert re.fullmatch("[0-9a-f]{20}", made["key"])
    assert re.fullmatch("[0-9a-f]+", made["secret"])


@rule("keep-alive", "all", "One HTTP connection carries several requests")
async def _(cell: Cell) -> None:
    app = cell.app()
    reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
    try:
        for number in range(3):
            target = signed_path(app, "GET", f"/apps/{app.app_id}/channels", params={"filter_by_prefix": f"x{number}"})
            writer.write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert head.startswith(b"HTTP/1.1 200 ")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            assert length is not None
            assert await reader.readexactly(int(length[1])) == b'{"channels":{}}'
    finally:
        writer.close()


@rule(
    "header-pair", "no library", "`X-Service-Key` and `X-Service-Secret` authorise HTTP requests; a wrong pair doesn't"
)
async def _(cell: Cell) -> None:
    app, socket, channel = cell.app(), await cell.socket(), cell.named("")
    await socket.subscribe(channel)
    target = f"/api/v1/apps/{app.app_id}/events"
    pair = {"X-Service-Key": app.app_key, "X-Service-Secret": app.app_secret}
    assert await _request(app, "POST", target, _event(channel), pair) == (200, "{}")
    await socket.next("e", channel)
    status, text = await _request(app, "POST", target, _event(channel), {**pair, "X-Service-Secret": "f" * 20})
    assert (status, json.loads(text)["status"]) == (401, 401)


@rule("bearer", "no library", "A token authorises its scopes, in its own app, until it is revoked")
async def _(cell: Cell) -> None:
    app, socket, channel = cell.app(), await cell.socket(), cell.named("")
    await socket.subscribe(channel)
    words = ("token", "create", app.app_id, "--name", "matrix", "--scope", "publish")
    made = await cell.world.command(*words)
    bearer = {"Authorization": f"Bearer {made['token']}"}
    target = f"/api/v1/apps/{app.app_id}"
    assert await _request(app, "POST", f"{target}/events", _event(channel), bearer) == (200, "{}")
    await socket.next("e", channel)
    status, text = await _request(app, "GET", f"{target}/channels", headers=bearer)
    assert (status, json.loads(text)["code"]) == (403, "insufficient_scope")
    other = cell.app("social")
    status, _ = await _request(app, "POST", f"/apps/{other.app_id}/events", _event(channel), bearer)
    assert status == 401
    await cell.world.command("token", "revoke", str(made["id"]))
    async with asyncio.timeout(60):
        while (answer := await _request(app, "POST", f"{target}/events", _event(channel), bearer))[0] != 401:
            await asyncio.sleep(0.01)
    assert json.loads(answer[1])["code"] == "token_revoked"


@rule("reset", "all", "A connection that is reset leaves its presence channels")
async def _(cell: Cell) -> None:
    channel, watcher, other = cell.named("presence-"), await cell.socket(), await cell.socket()
    await watcher.subscribe(channel, "watcher")
    await other.subscribe(channel, "other")
    other.reset()
    assert data_of(await watcher.next("pusher_internal:member_removed")) == {"user_id": "other"}
