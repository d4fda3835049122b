"""`redpoll fake`: the fake server of redpoll.testing, for test suites in any language."""

from __future__ import annotations

import ipaddress
import json
import signal
import threading
from typing import Any

import click

from redpoll.cli.common import fail, refuse

__all__ = ["fake"]


@click.command()
@click.option("--port", type=click.IntRange(0, 65_535), default=6001, show_default=True, help="0: any free port.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="A loopback address.")
@click.option(
    "--app",
    "credentials",
    default="1:fake-key:fake-secret",
    show_default=True,
    metavar="ID:KEY:SECRET",
    help="The app that clients and back ends are configured with.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting, as in `redpoll app set`.")
@click.option("--expose", is_flag=True, help="Listen on an address that other machines can reach.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fake(port: int, host: str, credentials: str, settings: tuple[str, ...], expose: bool, as_json: bool) -> None:
    """Run a fake server for tests: in memory, in one process, on every system.

    It speaks Pusher Channels like `redpoll serve`, and forgets everything when it ends. Ctrl-C or SIGTERM ends it.
    GET /fake/published answers what was published, POST /fake/reset forgets it. Needs `pip install redpoll[testing]`.

    \b
    Examples:
      redpoll fake
      redpoll fake --port 6001 --app 1:app-key:app-secret
      redpoll fake --set watchlist=true --set subscription_count=true
    """
    parts = credentials.split(":", 2)
    if len(parts) != 3:
        refuse([f"--app must be ID:KEY:SECRET, not {credentials!r}"])
    if not expose and not _is_loopback(host):
        refuse(
            [
                f"the fake server has no limits and no TLS, so it listens on loopback only, and {host} isn't; "
                "with --expose it listens there all the same"
            ]
        )
    try:
        from redpoll.testing import FakeServer
    except ImportError as error:
        fail(f"{error.name} is not installed: pip install 'redpoll[testing]'")
    app_id, key, secret = parts
    try:
        server = FakeServer(
            host=host, port=port, app_id=app_id, app_key=key, app_secret=secret, suite_routes=True, **_values(settings)
        )
        server.start()
    except (ValueError, OSError) as error:
        fail(error)
    try:
        if as_json:
            click.echo(json.dumps({"port": server.port, "url": server.url, "pusher_url": server.pusher_url}))
        else:
            click.echo(f"ready {server.url}")
        _until_signal()
    finally:
        server.stop()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _values(settings: tuple[str, ...]) -> dict[str, Any]:
    from redpoll.protocol.apps import parse_setting

    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, not {setting!r}")
        values[name] = parse_setting(name, text)
    return values


def _until_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    # Windows delivers signals only between two steps of the interpreter.
    while not ended.wait(0.2):
        pass
