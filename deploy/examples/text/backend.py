"""The back end of redpoll's examples: it signs subscriptions and publishes to any Pusher server.

    python backend.py http://KEY:SECRET@127.0.0.1:6001/apps/ID

It serves the page in its folder and needs Python 3.11 and aiohttp. Server libraries do what `sign` and `publish` do:
https://pusher.com/docs/channels/library_auth_reference/auth-signatures/
"""

import argparse
import asyncio
import hashlib
import hmac
import ipaddress
import json
import math
import os
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlencode, urlsplit

import aiohttp
from aiohttp import web

__all__ = ["SPEECH", "Account", "AddressError", "Backend", "PublishError", "account_of", "listen"]

CHAT, CURSORS, TICKER, TEXT = "presence-demo-chat", "presence-demo-cursors", "demo-ticker", "demo-text"

_COLOURS = ("Amber", "Azure", "Coral", "Ivory", "Jade", "Mauve", "Olive", "Rusty", "Sandy", "Silver", "Snowy", "Tawny")
_BIRDS = ("Brambling", "Bunting", "Canary", "Crossbill", "Dunnock", "Finch", "Linnet", "Redpoll", "Serin", "Siskin")
SPEECH: Final = (
    "A redpoll is a small finch of the far north. It weighs as much as three sheets of paper, and it spends the winter "
    "where the night lasts twenty hours. It survives because it never travels alone: a flock calls all the time, so "
    "that each bird knows where the others are. When one of them finds birch seeds, all of them hear of it within "
    "a second. This text comes to you in the same way. The back end publishes it word by word, as a language model "
    "would write it. If the connection breaks in the middle of a sentence, the missing words arrive when it is back, "
    "and a page that is opened late begins with the first word."
)

_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_ANSWER_WITHIN_S: Final = 5.0
_PUBLISH_WITHIN_S: Final = 60.0
_TICK_EVERY_S: Final = 1.0
_WORD_EVERY_S: Final = 0.125
_MAX_MESSAGE_CHARS: Final = 500
_MAX_REQUEST_BYTES: Final = 16_384


class AddressError(ValueError):
    """The address of the app can't be used."""


class PublishError(Exception):
    """The server refused an event, or didn't answer for a minute. `fault` is the sentence without its details, which
    may be others each time, such as a trace id."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault


class Account(NamedTuple):
    """An app of a Pusher server, and where the server is."""

    host: str
    port: int
    secure: bool
    app_id: str
    key: str
    secret: str
    prefix: str = ""


def account_of(url: str) -> Account:
    """Reads `http[s]://KEY:SECRET@HOST[:PORT]/apps/ID`. Raises AddressError."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (KeyError, ValueError):
        raise AddressError("expected http[s]://KEY:SECRET@HOST[:PORT]/apps/ID") from None
    prefix, separator, app_id = parts.path.rstrip("/").rpartition("/apps/")
    if not (parts.hostname and parts.username and parts.password and separator and app_id):
        raise AddressError("expected http[s]://KEY:SECRET@HOST[:PORT]/apps/ID")
    secure = parts.scheme == "https"
    return Account(parts.hostname, port, secure, app_id, unquote(parts.username), unquote(parts.password), prefix)


# What the page's scripts find in the constant `demo`. Nobody logs in to an example, so each page makes up its user.
_CONFIG = """\
const demo = %s;
sessionStorage.user ??= Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte + 100).join("");
demo.user = sessionStorage.user;
demo.options.channelAuthorization = { endpoint: "auth", transport: "ajax", params: { user: demo.user } };
"""


class Backend:
    """The back end of a page: `files` are its files by name, `host` is a name of this machine beside its addresses."""

    def __init__(self, account: Account, files: Mapping[str, bytes], *, host: str = "127.0.0.1") -> None:
        self.account = account
        self._files = files
        self._host = host
        self._http: aiohttp.ClientSession | None = None
        self._writing: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._reported = ""
        self._has_answered = False

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=_MAX_REQUEST_BYTES)
        application.router.add_get("/config.js", self._config)
        application.router.add_post("/auth", self._authorize)
        application.router.add_post("/say", self._say)
        application.router.add_post("/write", self._write)
        application.router.add_get("/", self._page)
        application.router.add_get("/{name}", self._file)
        application.cleanup_ctx.append(self._lifetime)
        return application

    async def _lifetime(self, _application: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_WITHIN_S)) as self._http:
            if "ticker.js" in self._files:
                self._ticking = asyncio.create_task(self._tick())
            if "text.js" in self._files:
                self._writing = asyncio.create_task(self._write_text())
            yield
            tasks = [task for task in (self._ticking, self._writing) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- requests

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuses requests that pages of other sites make, and sets the page's Content-Security-Policy."""
        try:
            host_name = request.url.host or ""
            origin = request.headers.get("Origin")
            asks_from = request.host if origin is None else urlsplit(origin).netloc
        except ValueError:
            raise web.HTTPBadRequest(text="The header field Host or Origin can't be read.") from None
        if not self._is_our_host(host_name):
            raise web.HTTPForbidden(text="This host name isn't known here; use the address that was printed.")
        if request.method == "POST" and asks_from != request.host:
            raise web.HTTPForbidden(text="Only the pages of this back end may do this.")
        response = await handler(request)
        host, scheme = self._host_for(request), "wss" if self.account.secure else "ws"
        response.headers["Content-Security-Policy"] = (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            f"connect-src 'self' {scheme}://{host}:{self.account.port}; "
            "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
        )
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        return response

    def _is_our_host(self, host: str) -> bool:
        """An address, or a name that was given to us: the page of another site could have any other name lead here."""
        with suppress(ValueError):
            ipaddress.ip_address(host)
            return True
        return host in ("localhost", self._host)

    def _host_for(self, request: web.Request) -> str:
        """Where the page finds the Pusher server. On this machine it has the name by which the page was reached."""
        if self.account.host in ("127.0.0.1", "localhost", "::1"):
            host = request.url.host or self.account.host
        else:
            host = self.account.host
        return f"[{host}]" if ":" in host else host

    async def _page(self, _request: web.Request) -> web.Response:
        return self._answer("index.html")

    async def _file(self, request: web.Request) -> web.Response:
        return self._answer(request.match_info["name"])

    def _answer(self, name: str) -> web.Response:
        content, kind = self._files.get(name), _TYPES.get(Path(name).suffix)
        if content is None or kind is None:
            raise web.HTTPNotFound(text="There is no such file.")
        return web.Response(body=content, content_type=kind, charset="utf-8")

    async def _config(self, request: web.Request) -> web.Response:
        account = self.account
        options = {
            "cluster": "any",
            "wsHost": self._host_for(request),
            "wsPort": account.port,
            "wssPort": account.port,
            "wsPath": account.prefix,
            "forceTLS": account.secure,
            "enabledTransports": ["wss"] if account.secure else ["ws"],
        }
        text = _CONFIG % json.dumps({"key": account.key, "options": options})
        return web.Response(text=text, content_type="text/javascript")

    async def _authorize(self, request: web.Request) -> web.Response:
        """Signs a subscription. A real back end decides here who may read the channel, and knows who asks."""
        form = await request.post()
        socket_id, channel = str(form.get("socket_id", "")), str(form.get("channel_name", ""))
        if channel not in (CHAT, CURSORS) or not socket_id.replace(".", "", 1).isdecimal():
            raise web.HTTPForbidden(text="Only the channels of the examples are signed here.")
        user = _user(str(form.get("user", "")))
        data = json.dumps({"user_id": user["id"], "user_info": user})
        auth = f"{self.account.key}:{self._sign(f'{socket_id}:{channel}:{data}')}"
        return web.json_response({"auth": auth, "channel_data": data})

    async def _say(self, request: web.Request) -> web.Response:
        form = await request.post()
        user, text = _user(str(form.get("user", ""))), str(form.get("text", "")).strip()[:_MAX_MESSAGE_CHARS]
        if text:
            message = {"id": f"m{secrets.token_hex(6)}", "name": user["name"], "text": text}
            try:
                await self.publish(CHAT, "message", message)
            except PublishError as error:
                raise web.HTTPBadGateway(text=str(error)) from None
        return web.Response(status=204)

    async def _write(self, _request: web.Request) -> web.Response:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_text())
        return web.Response(status=204)

    # -- what is published without a request

    async def _tick(self) -> None:
        """A price a second. Prices are numbered, also across restarts, so that pages see what is missing."""
        number, price = int(time.time()), 100.0
        while True:
            started = time.monotonic()
            price = max(20.0, price + random.gauss(0, 0.9) + math.sin(number / 9) * 0.4)
            try:
                await self.publish(TICKER, "price", {"n": number, "price": f"{price:.2f}"})
                number += 1
            except PublishError as error:
                self._report(error)
            await asyncio.sleep(max(0.0, _TICK_EVERY_S - (time.monotonic() - started)))

    async def _write_text(self) -> None:
        words = SPEECH.split()
        try:
            await self.publish(TEXT, "begin", {"words": len(words)})
            for number, word in enumerate(words, 1):
                await asyncio.sleep(_WORD_EVERY_S)
                await self.publish(TEXT, "word", {"n": number, "word": f"{word} "})
            await self.publish(TEXT, "end", {})
        except PublishError as error:
            self._report(error)

    def _report(self, error: PublishError) -> None:
        """Prints why nothing is published, once as long as it stays the same."""
        if error.fault != self._reported:
            self._reported = error.fault
            print(f"not published: {error}", file=sys.stderr, flush=True)

    # -- Pusher's HTTP API

    def _sign(self, text: str) -> str:
        return hmac.new(self.account.secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    async def publish(self, channel: str, event: str, data: Mapping[str, object]) -> None:
        """Publishes an event. Repeats it while the server is away; the correlation_id keeps it from being published
        twice. Raises PublishError."""
        event_body = {"name": event, "channel": channel, "data": json.dumps(data)}
        body = json.dumps({**event_body, "correlation_id": secrets.token_hex(8)}).encode()
        gives_up_at = time.monotonic() + _PUBLISH_WITHIN_S
        while True:
            error, wait_s = await self._try_publish(body)
            if error is None:
                return
            if not self._has_answered:
                # Perhaps not a server that is away, but a wrong address.
                self._report(error)
            if time.monotonic() + wait_s > gives_up_at:
                raise error
            await asyncio.sleep(wait_s)

    async def _try_publish(self, body: bytes) -> tuple[PublishError | None, float]:
        """Why the event wasn't published, None if it was, and how long to wait before the next attempt."""
        account = self.account
        path = f"/apps/{account.app_id}/events"
        query = urlencode(
            {
                "auth_key": account.key,
                "auth_timestamp": int(time.time()),
                "auth_version": "1.0",
                "body_md5": hashlib.md5(body, usedforsecurity=False).hexdigest(),
            }
        )
        host = f"[{account.host}]" if ":" in account.host else account.host
        url = f"{'https' if account.secure else 'http'}://{host}:{account.port}{account.prefix}{path}"
        signature = self._sign(f"POST\n{path}\n{query}")
        headers = {"Content-Type": "application/json"}
        assert self._http is not None
        try:
            async with self._http.post(
                f"{url}?{query}&auth_signature={signature}", data=body, headers=headers
            ) as reply:
                self._has_answered = True
                if reply.status == 200:
                    return None, 0.0
                text = (await reply.text())[:300]
                fault = PublishError(f"{account.host}:{account.port} answered {reply.status}", text)
                if reply.status == 429 or reply.status >= 500:
                    seconds = reply.headers.get("Retry-After", "")
                    return fault, min(float(seconds), 30.0) if seconds.isdecimal() else 0.5
                return fault, math.inf
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return PublishError(f"{account.host}:{account.port} can't be reached", str(error)), 0.2


def _user(seed: str) -> dict[str, str]:
    """The user that a page made up, `{id, name, colour}`: `seed` are the digits of config.js. Any other text gives a
    user as well."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6])
    colour, number = number % len(_COLOURS), number // len(_COLOURS)
    name = f"{_COLOURS[colour]} {_BIRDS[number % len(_BIRDS)]}"
    return {"id": f"u{number:x}", "name": name, "colour": str(colour)}


async def listen(application: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Starts the back end. Returns its runner, and the port; `port` 0 takes a free one. Raises OSError."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, runner.addresses[0][1]


async def _main() -> None:
    parser = argparse.ArgumentParser(description="The back end of an example. Open the address that it prints.")
    parser.add_argument("url", nargs="?", default=os.environ.get("PUSHER_URL", ""), help="Default: PUSHER_URL")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    words = parser.parse_args()
    try:
        account = account_of(words.url)
    except AddressError as error:
        parser.error(f"the address of the app: {error}")
    files = {path.name: path.read_bytes() for path in Path(__file__).parent.iterdir() if path.suffix in _TYPES}
    backend = Backend(account, files, host=words.host)
    try:
        runner, port = await listen(backend.application(), words.host, words.port)
    except OSError as error:
        parser.error(f"can't listen on {words.host} port {words.port}: {error.strerror}")
    print(f"open http://{words.host}:{port}/ in two windows; Ctrl-C stops", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_main())
