"""redpoll.js around a stock pusher-js, in Node and, as the server serves it, in Chromium."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from clients.node import Node, NodeError, local_signer
from helpers.browser import node_options
from helpers.proxy import Proxy
from helpers.server import Server
from helpers.wire import Api, Socket, eventually
from redpoll.cli import main

HERE = Path(__file__).parent
MODULE = HERE.parent.parent / "src" / "redpoll" / "control" / "static" / "redpoll.js"
PUSHER_JS = HERE / "node_modules" / "pusher-js" / "dist" / "web" / "pusher.min.js"
SUCCEEDED = "pusher:subscription_succeeded"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two workers; the app stores 1,000 messages of `stored-…` and `presence-stored-…`, and 2 of `short-…`."""
    with Server(workers=2) as running:
        for prefix, keep in (("stored-", "1000"), ("presence-stored-", "1000"), ("short-", "2")):
            words = ["history", "rule", "add", running.app_id, "--prefix", prefix, "--keep", keep, "--seconds", "600"]
            made = CliRunner().invoke(main, [*words, "--data-dir", str(running.folder / "data")])
            assert made.exit_code == 0, made.output
        yield running


@asynccontextmanager
async def website(server: Server, asked: list[list[str]]) -> AsyncIterator[str]:
    """An application: its page and the endpoint that knows its visitors. Yields its URL. `asked` gets the channels of
    each request."""
    sign = local_signer(server)

    async def auth(request: web.Request) -> web.Response:
        form = await request.post()
        several = [str(name) for name in form.getall("channel_name[]", [])]
        names = several or [str(form["channel_name"])]
        asked.append(names)
        answers: dict[str, Any] = {}
        for name in names:
            one = {"socket_id": str(form["socket_id"]), "channel_name": name}
            answers[name] = {"status": 200, "data": await sign(one, {"user_id": "anna"})}
            if "forbidden" in name:
                answers[name] = {"status": 403, "data": {"error": "forbidden"}}
        return web.json_response(answers if several else answers[names[0]]["data"])

    def file(path: Path, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        text = path.read_text().replace("SERVER/", f"{server.public_url}/")

        async def answer(request: web.Request) -> web.Response:
            return web.Response(text=text, content_type=f"text/{kind}")

        return answer

    application = web.Application()
    application.router.add_post("/auth", auth)
    application.router.add_get("/", file(HERE / "browser_module.html", "html"))
    application.router.add_get("/pusher.js", file(PUSHER_JS, "javascript"))
    application.router.add_get("/page.mjs", file(HERE / "page.mjs", "javascript"))
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@dataclass
class Page:
    """Runs pusher-js, over a connection to the server that can be cut."""

    node: Node
    api: Api
    proxy: Proxy
    name: str
    auth_url: str
    in_browser: bool
    asked: list[list[str]]

    async def call(self, command: str, client: str = "page", **parameters: object) -> Any:
        more = {"in_browser": True} if self.in_browser else {}
        return await self.node.call(command, client=client, **more, **parameters)

    def channel(self, prefix: str) -> str:
        return f"{prefix}{self.name}"

    async def connect(self, client: str = "page") -> None:
        options = {**self.node.options(self.auth_url), "wsPort": self.proxy.port}
        await self.call("connect_redpoll", client, key=self.node.server.app_key, options=options)
        await self.node.seen(client=client, state="connected")

    async def subscribe(self, channel: str, client: str = "page", **wanted: object) -> None:
        await self.call("subscribe", client, channel=channel, events=["news"], wanted=wanted or None)
        await self.node.seen(client=client, channel=channel, event=SUCCEEDED)

    async def publish(self, channel: str, numbers: range) -> None:
        for number in numbers:
            await self.api.publish(channel, "news", str(number))

    async def hears(self, channel: str, numbers: range, client: str = "page") -> None:
        """The client got exactly these, in this order, over any number of connections."""
        await self.node.seen(len(numbers), client=client, channel=channel, event="news")
        received = [news["data"] for news in self.node.matching(client=client, channel=channel, event="news")]
        assert received == list(numbers)

    async def positions(self, channel: str, count: int) -> list[Any]:
        await self.node.seen(count, client="page", channel=channel, event="pusher:position")
        return [news["data"] for news in self.node.matching(client="page", channel=channel, event="pusher:position")]

    @asynccontextmanager
    async def cut_off(self, channel: str) -> AsyncIterator[None]:
        """Within the block, the connection is gone and the server knows it."""
        self.proxy.stall()
        self.proxy.cut()
        await eventually(lambda: self.api.subscription_count(channel), 0)
        yield
        self.proxy.resume()


# A browser takes two seconds to start, so it runs only the main cases. Errors are tested in Node.
IN_BOTH = pytest.mark.parametrize("page", ["node", "chromium"], indirect=True)


@asynccontextmanager
async def opened_page(server: Server, where: str, test: str) -> AsyncIterator[Page]:
    """`where` is "node" or "chromium"; `test` is the name of the test function."""
    in_browser = where == "chromium"
    with Proxy(("127.0.0.1", server.port)) as proxy:
        asked: list[list[str]] = []
        async with website(server, asked) as url, Node(server) as node, Api(server) as api:
            if in_browser:
                await node.call("browser", url=f"{url}/", options=node_options())
            yield Page(node, api, proxy, f"{where}-{test.removeprefix('test_')}", f"{url}/auth", in_browser, asked)
            assert not [news for news in node.news if "page_error" in news]


@pytest.fixture
async def page(server: Server, request: pytest.FixtureRequest) -> AsyncIterator[Page]:
    async with opened_page(server, getattr(request, "param", "node"), str(request.node.originalname)) as opened:
        yield opened


async def test_the_server_serves_it_to_anybody_and_lets_it_be_cached(server: Server) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{server.public_url}/api/v1/redpoll.js") as answer:
        assert answer.status == 200
        assert answer.content_type in ("text/javascript", "application/javascript")
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "max-age" in answer.headers["Cache-Control"]
        assert await answer.read() == MODULE.read_bytes()


@IN_BOTH
async def test_each_channel_continues_where_it_stopped(page: Page) -> None:
    channels = [page.channel("stored-"), page.channel("presence-stored-")]
    await page.connect()
    for channel in channels:
        await page.publish(channel, range(2))
        await page.subscribe(channel, rewind={"count": 1})
        await page.publish(channel, range(2, 4))
        await page.hears(channel, range(1, 4))
    before = [await page.call("position", channel=channel) for channel in channels]
    async with page.cut_off(channels[1]):
        for channel in channels:
            await page.publish(channel, range(4, 7))
    for channel, place in zip(channels, before, strict=True):
        await page.hears(channel, range(1, 7))
        await page.publish(channel, range(7, 9))
        await page.hears(channel, range(1, 9))
        first, second = await page.positions(channel, 2)
        assert "recovered" not in first
        assert second == {**place, "recovered": True}
        after = await page.call("position", channel=channel)
        assert after["epoch"] == place["epoch"]
        assert after["offset"] > place["offset"]


async def test_a_rewind_comes_before_live_events_and_only_when_subscribing_first(page: Page) -> None:
    channel = page.channel("stored-")
    await page.publish(channel, range(5))
    await page.connect()
    await page.subscribe(channel, rewind={"count": 3})
    await page.publish(channel, range(5, 6))
    await page.hears(channel, range(2, 6))
    async with page.cut_off(channel):
        await page.publish(channel, range(6, 7))
    await page.hears(channel, range(2, 7))


async def test_a_position_stored_by_the_page_is_continued_from(page: Page) -> None:
    channel = page.channel("stored-")
    await page.connect()
    await page.subscribe(channel)
    await page.publish(channel, range(2))
    await page.hears(channel, range(2))
    place = await page.call("position", channel=channel)
    await page.publish(channel, range(2, 5))
    await page.connect("another")
    await page.subscribe(channel, "another", since=place)
    await page.hears(channel, range(2, 5), "another")


async def test_a_gap_that_cannot_be_filled_is_reported_with_the_new_position(page: Page) -> None:
    channel = page.channel("short-")
    await page.connect()
    await page.subscribe(channel)
    await page.publish(channel, range(1))
    await page.hears(channel, range(1))
    async with page.cut_off(channel):
        await page.publish(channel, range(1, 6))
    position = (await page.positions(channel, 2))[1]
    assert position["recovered"] is False
    assert position["offset"] > 0
    await page.publish(channel, range(6, 7))
    await page.node.seen(client="page", channel=channel, event="news", data=6)
    assert (await page.call("position", channel=channel))["offset"] > position["offset"]


async def follow(page: Page, channel: str, client: str = "page", name: str = "first", **options: object) -> None:
    await page.call("follow_texts", client, name=name, channel=channel, options={"event": "text", **options})


async def shows(page: Page, channel: str, *texts: tuple[str, str], client: str = "page", name: str = "first") -> None:
    """Waits until the page has everything that is stored, and shows these texts and states."""

    async def shown() -> list[tuple[str, str]] | None:
        found = page.node.matching(client=client, name=name, channel=channel)
        view = found[-1]["view"] if found else {"caughtUp": False}
        return [(text["text"], text["state"]) for text in view["texts"]] if view["caughtUp"] else None

    await eventually(shown, list(texts))


async def publish_text(page: Page, channel: str, stream: str, parts: range, state: str | None = None) -> str:
    """Publishes parts of a text as `publish_stream` does. Returns the text up to there."""
    text = "".join(f"{number} " for number in range(parts.start))
    for number in parts:
        delta = f"{number} "
        text += delta
        part = {"stream": stream, "n": number, "length": len(text), "delta": delta}
        await page.api.publish(channel, "text", json.dumps(part))
    if state is not None:
        end = {"stream": stream, "n": parts.stop, "length": len(text), "state": state}
        await page.api.publish(channel, "text", json.dumps(end))
    return text


@IN_BOTH
async def test_a_text_is_whole_after_a_cut_and_for_a_page_that_comes_late(page: Page) -> None:
    channel = page.channel("stored-")
    await page.connect()
    await follow(page, channel)
    first = await publish_text(page, channel, "a", range(3))
    await shows(page, channel, (first, "streaming"))
    async with page.cut_off(channel):
        await publish_text(page, channel, "a", range(3, 5))
    whole = await publish_text(page, channel, "a", range(5, 7), "done")
    await shows(page, channel, (whole, "done"))
    half = await publish_text(page, channel, "b", range(2), "failed")
    await page.connect("late")
    await follow(page, channel, "late")
    await shows(page, channel, (whole, "done"), (half, "failed"), client="late")
    # It shares the subscription, which brings nothing more, and reads pages of the history.
    await follow(page, channel, "late", "second")
    await shows(page, channel, (whole, "done"), (half, "failed"), client="late", name="second")


async def test_a_text_with_a_part_that_is_no_longer_stored_is_incomplete(page: Page) -> None:
    channel = page.channel("short-")
    await page.connect()
    await follow(page, channel)
    await publish_text(page, channel, "a", range(2))
    await shows(page, channel, ("0 1 ", "streaming"))
    async with page.cut_off(channel):
        await publish_text(page, channel, "a", range(2, 6))
    # The page reads once more what is stored: the newest two.
    await shows(page, channel, ("4 5 ", "incomplete"))
    await publish_text(page, channel, "a", range(6, 7), "done")
    await shows(page, channel, ("4 5 6 ", "incomplete"))


async def test_a_silent_publisher_ends_a_text_until_it_goes_on(page: Page) -> None:
    channel = page.channel("stored-")
    await page.connect()
    await follow(page, channel, silenceMs=1)
    await publish_text(page, channel, "a", range(1))
    await shows(page, channel, ("0 ", "failed"))
    await publish_text(page, channel, "a", range(1, 2), "done")
    await shows(page, channel, ("0 1 ", "done"))


async def test_a_refused_channel_has_an_error(page: Page) -> None:
    channel = page.channel("private-forbidden-")
    options = {**page.node.options(page.auth_url.replace("/auth", "/nothing")), "wsPort": page.proxy.port}
    await page.call("connect_redpoll", key=page.node.server.app_key, options=options)
    await follow(page, channel)
    view = (await page.node.seen(client="page", channel=channel))["view"]
    assert view["error"] is not None
    assert not view["caughtUp"]


async def test_pages_cover_the_whole_history_in_both_directions(page: Page) -> None:
    channel = page.channel("stored-")
    await page.publish(channel, range(10))
    await page.connect()
    await page.subscribe(channel)
    backward: list[int] = []
    asked: dict[str, object] = {"limit": 4}
    while True:
        history = await page.call("history", channel=channel, asked=asked)
        backward = [int(message["data"]) for message in history["messages"]] + backward
        if history["next"] is None:
            break
        asked = {"limit": 4, "before": history["next"]}
    assert backward == list(range(10))
    forward: list[int] = []
    asked = {"limit": 4, "since": {"epoch": history["epoch"], "offset": 0}}
    while True:
        history = await page.call("history", channel=channel, asked=asked)
        forward += [int(message["data"]) for message in history["messages"]]
        if history["next"] is None:
            break
        asked = {"limit": 4, "since": history["next"]}
    assert forward == list(range(10))
    assert set(history["messages"][0]) == {"offset", "event", "data", "time_ms"}
    assert not page.node.matching(client="page", channel=channel, event="news"), "pages are no events"


async def test_a_refused_page_is_a_refused_promise(page: Page) -> None:
    channel = page.channel("stored-")
    await page.connect()
    with pytest.raises(NodeError, match=f"No history of channel {channel}: this connection is not subscribed to it"):
        await page.call("history", channel=channel, asked={})


async def test_each_of_many_requests_has_its_own_answer(page: Page) -> None:
    channel = page.channel("stored-")
    await page.publish(channel, range(3))
    await page.connect()
    await page.subscribe(channel)
    limits = (3, 0, 1, 1001, -1, 2)
    asked = [page.call("history", channel=channel, asked={"limit": limit}) for limit in limits]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for limit, answer in zip(limits, answers, strict=True):
        if 0 < limit < 1000:
            assert len(answer["messages"]) == limit
        else:
            assert "limit must be between 1 and 1000" in str(answer)


async def test_a_client_that_did_not_ask_for_them_gets_no_positions(server: Server) -> None:
    socket = await Socket.connect(server)
    await socket.subscribe("stored-stock")
    async with Api(server) as api:
        await api.publish("stored-stock", "news", "1")
    assert set(await socket.next("news")) == {"event", "channel", "data"}
    text = json.dumps(socket.frames)
    assert not [word for word in ("recover", "epoch", "offset") if word in text]
    await socket.close()


@IN_BOTH
async def test_after_a_reconnect_all_channels_are_signed_in_one_request(page: Page) -> None:
    options = page.node.options(page.auth_url)
    more = {"wsPort": page.proxy.port, "authorizer": {"endpoint": page.auth_url, "params": {"any": "thing"}}}
    await page.call("connect", key=page.node.server.app_key, options={**options, **more})
    await page.node.seen(client="page", state="connected")
    signed = [page.channel(f"private-{number}-") for number in range(3)] + [page.channel("presence-")]
    refused = page.channel("private-forbidden-")
    for channel in (*signed, refused):
        await page.call("subscribe", channel=channel)
    for channel in signed:
        await page.node.seen(client="page", channel=channel, event=SUCCEEDED)
    error = await page.node.seen(client="page", channel=refused, event="pusher:subscription_error")
    assert "didn't sign" in error["data"]["error"]
    page.asked.clear()
    page.proxy.cut()
    for channel in signed:
        await page.node.seen(2, client="page", channel=channel, event=SUCCEEDED)
    await page.node.seen(2, client="page", channel=refused, event="pusher:subscription_error")
    assert [sorted(names) for names in page.asked] == [sorted([*signed, refused])]


async def test_an_endpoint_that_fails_refuses_all_channels(page: Page) -> None:
    options = page.node.options(page.auth_url)
    more = {"authorizer": {"endpoint": page.auth_url.replace("/auth", "/nothing")}}
    await page.call("connect", key=page.node.server.app_key, options={**options, **more})
    await page.call("subscribe", channel="private-a")
    error = await page.node.seen(client="page", channel="private-a", event="pusher:subscription_error")
    assert "/nothing answered 404" in error["data"]["error"]
