"""`redpoll publish`, `channels`, `trace` and `tail`: what a back end does over the HTTP API, and what it did."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import click

from redpoll.cli.common import print_json, refuse, safe
from redpoll.cli.remote import RemoteError, app_command, call, execute, session, with_secret
from redpoll.text import json_text

if TYPE_CHECKING:
    import aiohttp

    from redpoll.doctor.target import Target

__all__ = ["channels", "publish", "tail", "trace"]

# The server writes its event log once a second; while its disk or processor is busy, it takes longer.
_WAIT_FOR_LOG_S: Final = 10.0
_SAY_AFTER_S: Final = 2.0
_POLL_EVERY_S: Final = 1.0
# A call is logged when it has ended, with the time of its start, and those of clients arrive from other processes.
_OVERLAP_MS: Final = 10_000
_MAX_LIMIT: Final = 1_000


@click.command()
@click.argument("channel")
@click.argument("event")
@click.argument("data", default="{}")
@click.option("--also", "further", metavar="CHANNEL", multiple=True, help="A further channel. May be repeated.")
@click.option("--socket-id", metavar="ID", help="The connection that does not get the event.")
@app_command
def publish(
    channel: str,
    event: str,
    data: str,
    further: tuple[str, ...],
    socket_id: str | None,
    target: Target,
    as_json: bool,
) -> None:
    """Publish an event to a channel, on any Pusher server.

    DATA is sent as it is; clients expect JSON. Default: {}. With - it is read from standard input.

    \b
    Examples:
      redpoll publish news headline '{"title":"Hello"}'
      redpoll publish news headline - --also sports
      redpoll publish news headline 1 --url https://KEY:SECRET@ws.example.com/apps/ID
      redpoll publish news headline 1 --app 1234567 --json
    """
    if data == "-":
        try:
            data = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            refuse(["standard input is not a text in UTF-8"])
    event_body: dict[str, Any] = {"name": event, "channels": [channel, *further], "data": data}
    if socket_id is not None:
        event_body["socket_id"] = socket_id
    body = json.dumps(event_body).encode()

    async def send() -> None:
        async with session() as http:
            reply = await call(http, with_secret(target), "POST", "/events", body=body)
        if as_json:
            print_json({**reply.body, "trace_id": reply.trace_id})
        else:
            click.echo("published" + (f", trace {reply.trace_id}" if reply.trace_id else ""))

    execute(send())


@click.command()
@click.argument("channel", required=False)
@click.option("--prefix", metavar="P", help="Only channels whose names begin with P.")
@click.option(
    "--info",
    metavar="NAMES",
    help="Counts to ask for: user_count, subscription_count. Pusher limits which are allowed.",
)
@click.option("--users", is_flag=True, help="The user ids of the presence channel CHANNEL.")
@app_command
def channels(
    channel: str | None, prefix: str | None, info: str | None, users: bool, target: Target, as_json: bool
) -> None:
    """List the channels that have subscribers, or show CHANNEL, on any Pusher server.

    \b
    Examples:
      redpoll channels
      redpoll channels --prefix presence- --info user_count
      redpoll channels presence-room --users --json
    """
    if users and channel is None:
        refuse(["--users needs a CHANNEL"])
    if prefix is not None and channel is not None:
        refuse(["give either CHANNEL or --prefix"])
    filters = {"filter_by_prefix": prefix, "info": info}
    params = {name: value for name, value in filters.items() if value is not None}
    path = "/channels" + (f"/{quote(channel, safe='')}" if channel is not None else "") + ("/users" if users else "")

    async def show() -> None:
        async with session() as http:
            body = (await call(http, with_secret(target), "GET", path, params)).body
        if as_json:
            print_json(body)
        elif users:
            for user in body["users"]:
                click.echo(safe(str(user["id"])))
        elif channel is not None:
            _print_channel(channel, body)
        else:
            for name, counts in sorted(_object(body["channels"]).items()):
                _print_channel(name, _object(counts))

    execute(show())


def _object(value: Any) -> Any:
    """The value. PHP, and so Reverb, writes an object without members as an empty array."""
    return {} if value == [] else value


def _print_channel(name: str, counts: dict[str, Any]) -> None:
    words = [f"{field}={safe(json.dumps(value))}" for field, value in counts.items()]
    click.echo("  ".join([safe(name), *words]))


@click.command()
@click.argument("trace_id", metavar="ID")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 600),
    default=_WAIT_FOR_LOG_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a request that isn't logged yet.",
)
@app_command
def trace(trace_id: str, wait_s: float, target: Target, as_json: bool) -> None:
    """Show the trace of one publish request: when it was accepted, and to how many sockets it was written.

    ID is what `publish` prints and each response has in X-Service-Trace-Id. Of requests that share it, the newest
    that was traced is shown. Only redpoll servers have traces.

    \b
    Examples:
      redpoll trace 4bf92f3577b34da6a3ce929d0e0e4736
      redpoll trace 4bf92f3577b34da6a3ce929d0e0e4736 --app 1234567 --json
    """

    async def show() -> None:
        async with session() as http:
            shown = await _logged_trace(http, with_secret(target), trace_id, wait_s)
        if as_json:
            print_json(shown)
            return
        _warn_of_missing(shown)
        _print_call(shown)
        for span in shown["spans"]:
            detail = {name: value for name, value in span.items() if name not in ("time_ms", "time_us", "stage")}
            words = "  ".join(f"{name}={safe(str(value))}" for name, value in detail.items())
            click.echo(f"{(span['time_us'] - shown['time_us']) / 1000:+9.2f} ms  {span['stage']:<13}  {words}".rstrip())
        if not shown["sampled"]:
            click.echo(
                "no stages: it was refused, or repeats another request, or more came in that second than are traced"
            )

    execute(show())


async def _logged_trace(http: aiohttp.ClientSession, target: Target, trace_id: str, wait_s: float) -> Any:
    """The trace, for which this waits up to `wait_s`, because the server logs a request after its response."""
    began_s = monotonic()
    has_said = False
    while True:
        try:
            answer = (await call(http, target, "GET", f"/trace/{quote(trace_id, safe='')}")).body
            if not answer["sampled"] or any(span["stage"] == "accepted" for span in answer["spans"]):
                return answer
        except RemoteError as error:
            if error.status != 404 or monotonic() - began_s >= wait_s:
                raise
        else:
            if monotonic() - began_s >= wait_s:
                return answer
        if monotonic() - began_s >= _SAY_AFTER_S and not has_said:
            has_said = True
            click.echo(f"not logged yet; waiting up to {wait_s:g} s", err=True)
        await asyncio.sleep(min(0.2, wait_s))


@click.command()
@click.option("--channel", metavar="NAME", help="Only events of this channel.")
@click.option("--event", "name", metavar="NAME", help="Only events with this name.")
@click.option(
    "--lines",
    type=click.IntRange(0, _MAX_LIMIT),
    default=10,
    show_default=True,
    metavar="N",
    help="How many earlier events to begin with.",
)
@click.option("--no-follow", is_flag=True, help="Print the earlier events and end.")
@app_command
def tail(channel: str | None, name: str | None, lines: int, no_follow: bool, target: Target, as_json: bool) -> None:
    """Print the events of an app as they pass: publish requests, refused ones too, and traced client events.

    It reads the server's event log once a second, so an event appears within two seconds. It shows names, channels
    and sizes; `subscribe` shows the data. Only redpoll servers have this log. With --json, each line is an object.

    \b
    Examples:
      redpoll tail
      redpoll tail --channel news --json
      redpoll tail --lines 100 --no-follow
    """
    filters = {"channel": channel, "name": name}
    params = {name: value for name, value in filters.items() if value is not None}

    async def follow() -> None:
        async with session() as http:
            page = (
                await call(http, with_secret(target), "GET", "/events/log", {**params, "limit": str(max(lines, 1))})
            ).body
            _warn_of_missing(page)
            for logged in reversed(page["events"][:lines]):
                _print_logged(logged, as_json)
            if not no_follow:
                await _follow(http, target, params, page, as_json)

    execute(follow())


async def _follow(
    http: aiohttp.ClientSession, target: Target, params: dict[str, str], page: dict[str, Any], as_json: bool
) -> None:
    """Prints what is logged after `page`, the newest calls."""
    logged_before = page["events"]
    newest_ms = max((logged["time_ms"] for logged in logged_before), default=0)
    if page["next"] is not None:
        # The first question below has them in its answer too, and they aren't new.
        since_ms = max(newest_ms - _OVERLAP_MS, 0)
        logged_before = [*logged_before, *await _logged_since(http, target, params, since_ms, page["next"])]
    seen = {_identity(logged): logged["time_ms"] for logged in logged_before}
    while True:
        await asyncio.sleep(_POLL_EVERY_S)
        for logged in await _logged_since(http, target, params, max(newest_ms - _OVERLAP_MS, 0)):
            if _identity(logged) not in seen:
                seen[_identity(logged)] = logged["time_ms"]
                _print_logged(logged, as_json)
        newest_ms = max(seen.values(), default=0)
        seen = {identity: time_ms for identity, time_ms in seen.items() if time_ms >= newest_ms - _OVERLAP_MS}


def _identity(logged: dict[str, Any]) -> tuple[Any, ...]:
    """Calls may share a trace id, which the caller chooses."""
    return logged["trace_id"], logged["time_us"], logged["caller"], logged["name"]


async def _logged_since(
    http: aiohttp.ClientSession, target: Target, params: dict[str, str], since_ms: int, cursor: str | None = None
) -> list[dict[str, Any]]:
    """All logged events since a Unix time in ms, oldest first; those from `cursor` on, if it is given."""
    query = {**params, "since": str(since_ms), "limit": str(_MAX_LIMIT)}
    if cursor is not None:
        query["cursor"] = cursor
    events: list[dict[str, Any]] = []
    while True:
        page = (await call(http, target, "GET", "/events/log", query)).body
        _warn_of_missing(page)
        events += page["events"]
        if page["next"] is None:
            return events[::-1]
        query["cursor"] = page["next"]


def _print_logged(logged: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json_text.compact(logged))
    else:
        _print_call(logged)


def _warn_of_missing(answer: dict[str, Any]) -> None:
    if missing := answer.get("unanswered"):
        click.echo(f"no answer within a second from {safe(', '.join(missing))}: what it logged is missing", err=True)


def _print_call(logged: dict[str, Any]) -> None:
    at = datetime.fromtimestamp(logged["time_ms"] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    channels = safe(", ".join(logged["channels"]))
    columns = (at, logged["status"], channels, safe(logged["name"]), f"{logged['size']} bytes", safe(logged["caller"]))
    click.echo("  ".join(map(str, (*columns, logged["trace_id"]))))
