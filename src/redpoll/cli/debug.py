"""`redpoll debug`: writes down everything about one app or one connection, for a limited time."""

import sys
import time
from datetime import UTC, datetime
from typing import Any

import click

from redpoll.cli.common import fail, print_json, refuse, safe, seconds_of, time_text
from redpoll.cli.execute import run
from redpoll.cli.records_command import records_command
from redpoll.config import config
from redpoll.text import json_text

__all__ = ["debug"]

_POLL_S = 0.5
_MAX_FOR_S = 86_400
_MAX_TEXT_CHARS = 1_200


@click.command()
@click.option("--app", "app_id", default="", metavar="ID", help="Everything of this app.")
@click.option("--socket", "socket_id", default="", metavar="ID", help="Everything of this connection.")
@click.option(
    "--for",
    "lasts",
    default="10m",
    show_default=True,
    metavar="TIME",
    help="When it ends by itself: 30s, 10m, 2h; at most 24h.",
)
@click.option("--no-follow", is_flag=True, help="Begin and return; the lines are in the log of each process.")
@click.option("--off", is_flag=True, help="End it before its time: for the app of --app, or all.")
@records_command
def debug(
    app_id: str,
    socket_id: str,
    lasts: str,
    no_follow: bool,
    off: bool,
    settings: config.Settings,
    as_json: bool,
) -> None:
    """Show each message, decision and event of an app or a connection as it happens, on all workers of all nodes.

    A line for each: connection opened, refused (with code and reason) and ended, message received, frame and event
    sent, subscribe, HTTP request with its answer. Data is cut to 1,000 characters, and signatures are left out. The
    lines are also in the log of each process, at the level info. It ends by itself, or with Ctrl-C; each process writes
    100 lines a second at most and counts the others. One app at a time is debugged as a whole or by one connection.
    Without --app and --socket, shows what is being debugged. Needs a running server. With --json, each line is an
    object.

    \b
    Examples:
      redpoll debug --app 1234567 --for 10m
      redpoll debug --socket 123.456 --json
      redpoll debug --app 1234567 --for 2h --no-follow
      redpoll debug --off
    """
    if off:
        ended = run(settings, "debug stop", {"app": app_id})
        _print_targets(ended, as_json, "nothing was being debugged", "ended")
    elif not app_id and not socket_id:
        _print_targets(run(settings, "debug list", {}), as_json, "nothing is being debugged")
    else:
        for_s = seconds_of(lasts, "--for")
        if for_s > _MAX_FOR_S:
            refuse(["--for: at most 24h"])
        started = run(settings, "debug start", {"app": app_id, "socket": socket_id, "for_s": for_s})
        if no_follow:
            _print_targets([started], as_json, "")
            return
        _follow(settings, started, as_json)


def _print_targets(targets: list[dict[str, Any]], as_json: bool, none: str, state: str = "") -> None:
    """Prints what is being debugged and until when, or `state` instead of the time; `none` if there is nothing."""
    if as_json:
        print_json(targets)
        return
    for target in targets:
        what = f"connection {target['socket']} of app {target['app']}" if target["socket"] else f"app {target['app']}"
        click.echo(f"{what} ({safe(target['name'])}): {state or 'until ' + time_text(target['until'])}")
    if not targets and none:
        click.echo(none, err=True)


def _follow(settings: config.Settings, started: dict[str, Any], as_json: bool) -> None:
    app_id, position, until = started["app"], started["position"], started["until"]
    click.echo(f"until {time_text(until)}; Ctrl-C ends it", err=True)
    try:
        while True:
            time.sleep(_POLL_S)
            over = time.time() > until
            page = run(settings, "debug show", {"app": app_id, "after": position})
            position = page["position"]
            for line in page["lines"]:
                click.echo(json_text.compact(line) if as_json else _text(line))
            if page["until"] != until:
                # Somebody has ended it, or begun another one.
                fail("it was ended by another command")
            if over and not page["lines"]:
                return
    except KeyboardInterrupt:
        run(settings, "debug stop", {"app": app_id})
        sys.exit(130)


def _text(line: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(line.pop("time_ms") / 1_000, UTC).strftime("%H:%M:%S.%f")[:-3]
    words = [at, line.pop("origin", ""), line.pop("socket", "") or "-", line.pop("what")]
    fields = [
        f"{name}={value if isinstance(value, str) else json_text.compact(value).decode()}"
        for name, value in line.items()
    ]
    return safe("  ".join([*words, " ".join(fields)]), 4 * _MAX_TEXT_CHARS)
