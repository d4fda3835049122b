"""Reaches one app over the network, as a back end does: on any Pusher server by its address, or on this server by id.

`app_command` adds the options that name the app, `call` sends a signed request of the HTTP API, `execute` runs the
asynchronous part of a command.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import urlencode

import click

from redpoll.cli.common import fail, refuse, safe, settings_of, with_config
from redpoll.cli.execute import run
from redpoll.cli.records_command import only_app
from redpoll.doctor.target import Target, TargetError, parse
from redpoll.host.welcome import url_host

if TYPE_CHECKING:
    import aiohttp

    from redpoll.config import config

__all__ = [
    "TIMEOUT_S",
    "RemoteError",
    "Reply",
    "app_command",
    "call",
    "execute",
    "fetch_json",
    "session",
    "with_secret",
]

TIMEOUT_S: Final = 15.0
_Result = TypeVar("_Result")


class RemoteError(Exception):
    """The server can't be reached or refuses. The text is a sentence; `status` is that of its response, if any."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status


class Reply(NamedTuple):
    """`body` is the decoded JSON of a response with a 2xx status. `trace_id` is None on other servers."""

    body: Any
    trace_id: str | None


def app_command(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --url, --app, --json and the options that find this server. The command gets
    `target` and `as_json`. If it has an option --token, and that is given, the URL needs no key."""

    @functools.wraps(command)
    def with_target(
        url: str | None, app_id: str | None, config_path: str | None, data_dir: str | None, **words: Any
    ) -> None:
        target = _target(url, app_id, config_path, data_dir, keyless=bool(words.get("token")))
        command(target=target, **words)

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--data-dir", metavar="FOLDER", help="The data folder of the server on this machine."),
        click.option("--app", "app_id", metavar="ID", help="An app of the server on this machine."),
        click.option(
            "--url",
            metavar="URL",
            help="An app of any Pusher server: http[s]://KEY:SECRET@HOST[:PORT]/apps/ID. Default: PUSHER_URL; without "
            "it, the only app of the server on this machine.",
        ),
    ):
        with_target = option(with_target)
    return with_config(with_target)


def _target(
    url: str | None, app_id: str | None, config_path: str | None, data_dir: str | None, *, keyless: bool
) -> Target:
    """The app that the options name. Exits with 2 if they name none."""
    if url and app_id:
        refuse(["give either --url or --app"])
    if not app_id and (url := url or os.environ.get("PUSHER_URL")):
        try:
            return parse(url, keyless=keyless)
        except TargetError as error:
            refuse([f"{error} (from --url or PUSHER_URL)"])
    return _own(settings_of(config_path, {"data_dir": data_dir}, read_files=False), app_id)


def _own(settings: config.Settings, app_id: str | None) -> Target:
    """An app of the server that owns the data folder."""
    address = run(settings, "server show", {})
    if address["proxy_protocol"]:
        fail(
            "this server's public port wants the PROXY protocol (setting proxy_protocol): name the address of your "
            "proxy, --url https://KEY:SECRET@HOST/apps/ID"
        )
    if app_id is None:
        app_id = only_app(settings, "--app")
    for app in run(settings, "app list", {}):
        if app_id == app["id"]:
            if app["key"] is None:
                fail(f"the app {app['id']} has no enabled key")
            return Target(
                url_host(address["host"]).strip("[]"), address["port"], False, app["key"], app["secret"], app["id"]
            )
    fail(f"there is no app with the id {app_id}")


def with_secret(target: Target) -> Target:
    """The target itself. Exits with 2 if its address has no secret, so that it can't sign requests."""
    if not target.secret:
        refuse(["the address has no secret: expected http[s]://KEY:SECRET@HOST[:PORT]/apps/ID"])
    return target


def execute(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs the network part of a command. Exits with 1 on RemoteError, and with 130 on Ctrl-C."""
    try:
        return asyncio.run(work)
    except RemoteError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


def session() -> aiohttp.ClientSession:
    """A client session with our time limits. Proxies are taken from the environment (HTTPS_PROXY)."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, trust_env=True)


async def call(
    http: aiohttp.ClientSession,
    target: Target,
    method: str,
    path: str,
    params: Mapping[str, str] | None = None,
    body: bytes | None = None,
    *,
    token: str = "",
    waits_s: float = 0.0,
) -> Reply:
    """Sends a request, signed, or with the token; `path` is below `/apps/ID`, percent-encoded. `waits_s`: so much
    longer than others the server may take. Raises RemoteError."""
    if token:
        address = f"{target.origin}{target.prefix}/apps/{target.app_id}{path}?{urlencode(params or {})}"
    else:
        address = target.origin + target.signed_path(body, method=method, path=path, params=params)
    return await _request(http, target, method, address, body, token, TIMEOUT_S + waits_s)


async def fetch_json(http: aiohttp.ClientSession, target: Target, path: str) -> Any:
    """The JSON of a page that needs no credentials. Raises RemoteError."""
    return (await _request(http, target, "GET", f"{target.origin}{target.prefix}{path}", None)).body


async def _request(
    http: aiohttp.ClientSession,
    target: Target,
    method: str,
    address: str,
    body: bytes | None,
    token: str = "",
    within_s: float = TIMEOUT_S,
) -> Reply:
    import aiohttp
    from yarl import URL

    headers = {"Content-Type": "application/json"} if body is not None else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=within_s)
    url = URL(address, encoded=True)
    try:
        async with http.request(method, url, data=body, headers=headers, timeout=timeout) as response:
            text = await response.text(errors="replace")
    except TimeoutError:
        raise RemoteError(f"{target.origin} did not respond within {within_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise RemoteError(f"{target.origin} can't be reached: {error}; `redpoll doctor URL` finds the cause") from error
    if not 200 <= response.status < 300:
        message = f"{target.origin} refused the request with {response.status}: {_message(text)}"
        raise RemoteError(message, response.status)
    try:
        return Reply(json.loads(text), response.headers.get("X-Service-Trace-Id"))
    except (ValueError, RecursionError):
        raise RemoteError(f"{target.origin} sent no JSON, but {safe(text.strip())}") from None


def _message(text: str) -> str:
    """What an error response says, for a terminal: the text of `error` or `message` if it is JSON."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if isinstance(said, dict):
        text = str(said.get("error") or said.get("message") or text)
    return safe(text.strip(), 500)
