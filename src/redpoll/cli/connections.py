"""`redpoll connections …`: lists, shows and closes the connections of an app. Needs a running server."""

from typing import Any

import click

from redpoll.cli.common import safe, time_text
from redpoll.cli.records_command import AppCommand, executes

__all__ = ["connections"]


@click.group()
def connections() -> None:
    """List, show and close the connections of an app, on all workers. Needs a running server.

    \b
    Examples:
      redpoll connections list 1234567 --channel presence-room
      redpoll connections kick 1234567 123.456
    """


def _print_line(row: dict[str, Any]) -> None:
    columns = [row["socket"], time_text(row["since"]), safe(row["address"]), safe(row["library"]) or "-"]
    # Not sent by workers of the release before.
    if row.get("transport", "websocket") != "websocket":
        columns.append(safe(row["transport"]))
    columns += [f"{row['channels']} channels", f"{row['unsent']} bytes unsent"]
    if row["user"]:
        columns.append(f"user {safe(row['user'])}")
    click.echo("  ".join(columns))


def _print_connections(listing: dict[str, Any]) -> None:
    for row in listing["connections"]:
        _print_line(row)
    if len(listing["connections"]) < listing["total"]:
        click.echo(f"showing {len(listing['connections'])} of {listing['total']} connections", err=True)


@connections.command("list", cls=AppCommand)
@click.argument("app_id", required=False)
@click.option("--find", default="", metavar="TEXT", help="Part of a socket id, an address, a library or a user id.")
@click.option("--channel", default="", metavar="NAME", help="Only those that are subscribed to this channel.")
@click.option("--limit", type=click.IntRange(1, 500), default=100, show_default=True, metavar="N", help="The newest N.")
@executes("connections list", _print_connections)
def connections_list(app_id: str, find: str, channel: str, limit: int) -> dict[str, Any]:
    """List connections, newest first: socket id, address, library, channels, unsent bytes, user.

    \b
    Examples:
      redpoll connections list 1234567
      redpoll connections list 1234567 --find 203.0.113.7 --json
    """
    return {"app": app_id, "find": find, "channel": channel, "limit": limit}


def _print_connection(row: dict[str, Any]) -> None:
    _print_line(row)
    for channel in row["named"]:
        click.echo(f"  {safe(channel)}")
    if len(row["named"]) < row["channels"]:
        click.echo(f"  and {row['channels'] - len(row['named'])} more")


@connections.command("show", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("socket_id")
@executes("connections show", _print_connection)
def connections_show(app_id: str, socket_id: str) -> dict[str, Any]:
    """Show a connection and the channels it is subscribed to.

    \b
    Examples:
      redpoll connections show 1234567 123.456
      redpoll connections show 1234567 123.456 --json
    """
    return {"app": app_id, "id": socket_id}


@connections.command("kick", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("socket_id")
@executes("connections kick", lambda kicked: click.echo(f"closed {kicked['socket']}"))
def connections_kick(app_id: str, socket_id: str) -> dict[str, Any]:
    """Close a connection with 4009, so that Pusher's libraries don't connect again.

    \b
    Examples:
      redpoll connections kick 1234567 123.456
    """
    return {"app": app_id, "id": socket_id}
