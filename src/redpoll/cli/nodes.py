"""`redpoll node …`: the servers that share Redis and the record store. Needs a running server."""

from collections.abc import Callable
from typing import Any

import click

from redpoll.cli.common import safe, time_text
from redpoll.cli.records_command import executes

__all__ = ["balance", "node"]


def _within(bound: str) -> Callable[..., Any]:
    return click.option(
        "--within",
        "within_s",
        type=click.FloatRange(0, 3600),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help=f"Spread the closing over this time. {bound}",
    )


@click.group()
def node() -> None:
    """List and drain the nodes: the servers that share Redis and the record store. Needs a running server.

    \b
    Examples:
      redpoll node list
      redpoll node drain web-2
    """


def _print_nodes(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        state = "dead" if not row["alive"] else "draining" if row["draining"] else "alive"
        if row["alive"] and row["fitness"] != "fit":
            state += f", {row['fitness']}"
        columns = [safe(row["name"]), state + (", leader" if row["leader"] else "")]
        columns += [f"{row['workers']} workers", f"{row['connections']} connections", f"redpoll {safe(row['version'])}"]
        click.echo("  ".join([*columns, f"up since {time_text(row['up_since'])}"]))


@node.command("list")
@executes("node list", _print_nodes)
def node_list() -> dict[str, Any]:
    """List all nodes: name, state, workers, connections, version, and since when they are up.

    A node is alive, draining (it is stopping) or dead. One of them leads: it sends webhooks and cleans up after others.
    A node that couldn't do all of this is marked: "no record store" if PostgreSQL doesn't answer it, "unfit" if its
    control plane doesn't run or gets no answers from Redis.

    \b
    Examples:
      redpoll node list
      redpoll node list --data-dir /var/lib/redpoll --json
    """
    return {}


@node.command("drain")
@click.argument("name")
@_within("At least 1,000 connections are closed per second.")
@executes(
    "node drain", lambda node: click.echo(f"draining {safe(node['name'])}; `redpoll node list` shows its connections")
)
def node_drain(name: str, within_s: float) -> dict[str, Any]:
    """Close the connections of a node evenly within some seconds, and admit no more; clients reconnect to other nodes.

    The node goes on to publish, and answers /readyz with 503, until `undrain` or its next start. It may be any node.

    \b
    Examples:
      redpoll node drain web-2
      redpoll node drain web-2 --within 120 --json
    """
    return {"name": name, "within_s": within_s}


@node.command("undrain")
@click.argument("name")
@executes("node undrain", lambda node: click.echo(f"{safe(node['name'])} admits clients again"))
def node_undrain(name: str) -> dict[str, Any]:
    """Let a drained node admit clients again.

    \b
    Examples:
      redpoll node undrain web-2
    """
    return {"name": name}


def _print_moved(moved: dict[str, Any]) -> None:
    if moved["moved"]:
        click.echo(
            f"closing {moved['moved']} connections within {moved['within_s']:g} s; `redpoll node list` shows them"
        )
    else:
        click.echo("no node has more than 5 % above the mean; nothing is closed")


@click.command()
@_within("Longer if the other nodes can't accept so many clients.")
@executes("balance", _print_moved)
def balance(within_s: float) -> dict[str, Any]:
    """Even out connections after a node was added: nodes with more than the mean close some; clients reconnect.

    A node that has more than 5 % above the mean closes the connections above the mean; with a single node, its workers
    do. The load balancer must send new connections to the node with the fewest (`leastconn` in HAProxy, `least_conn` in
    nginx). Needs a running server.

    \b
    Examples:
      redpoll balance
      redpoll balance --within 120 --json
    """
    return {"within_s": within_s}
