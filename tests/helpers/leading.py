"""Which of several servers leads, as an operator sees it."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from helpers.server import Server
from redpoll.cli import main
from redpoll.ipc.command_socket import ask, socket_path


def command(server: Server, *words: str) -> Any:
    """Runs a command of the command line with `--json`, and returns what it printed."""
    result = CliRunner().invoke(main, [*words, "--json", "--data-dir", str(server.folder / "data")])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def rows(server: Server) -> dict[str, dict[str, Any]]:
    """`redpoll node list` by name, without starting a process."""
    listed = ask(socket_path(server.folder / "data"), "node list", {})
    return {row["name"]: row for row in listed if row["alive"]}


def leading_name(node: Server) -> object:
    """The name of the node that leads, as this node knows it."""
    return next((row["name"] for row in rows(node).values() if row["leader"]), None)


def leader(nodes: list[Server]) -> Server:
    name = leading_name(nodes[0])
    return next(node for node in nodes if node.settings["node_name"] == name)
