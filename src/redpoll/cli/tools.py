"""`redpoll openapi` and `redpoll completion`: texts for other programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from redpoll.cli.common import fail, print_json
from redpoll.cli.remote import app_command, execute, fetch_json, session

if TYPE_CHECKING:
    from redpoll.doctor.target import Target

__all__ = ["COMMANDS"]


@click.command()
@app_command
def openapi(target: Target, as_json: bool) -> None:
    """Print the OpenAPI document of a redpoll server's HTTP API.

    It needs no secret, and describes every path, body and error. --json changes nothing: the document is JSON.

    \b
    Examples:
      redpoll openapi > openapi.json
      redpoll openapi --url wss://ws.example.com/app/KEY
    """

    async def show() -> None:
        async with session() as http:
            print_json(await fetch_json(http, target, "/api/v1/openapi.json"))

    execute(show())


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Print the script as a JSON string.")
def completion(shell: str, as_json: bool) -> None:
    """Print a script that completes redpoll's commands and options in a shell.

    \b
    Examples:
      redpoll completion bash > /etc/bash_completion.d/redpoll
      redpoll completion zsh > ~/.zfunc/_redpoll
      redpoll completion fish > ~/.config/fish/completions/redpoll.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        fail(f"click has no completion for {shell}")
    root = click.get_current_context().find_root().command
    script = kind(root, {}, "redpoll", "_REDPOLL_COMPLETE").source()
    click.echo(json.dumps(script) if as_json else script)


COMMANDS = (openapi, completion)
