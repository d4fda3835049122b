"""`redpoll openapi` and `redpoll completion`: texts for other programs."""

from __future__ import annotations

import json

import click

from redpoll.cli.common import fail, need_engine, print_json, refuse
from redpoll.cli.remote import execute, fetch_json, session
from redpoll.doctor.target import TargetError, parse

__all__ = ["completion", "openapi"]


@click.command()
@click.option("--url", metavar="URL", help="Ask a running server, which may be of another version; as in `publish`.")
@click.option("--json", "as_json", is_flag=True, help="Changes nothing: the document is JSON.")
def openapi(url: str | None, as_json: bool) -> None:
    """Print the OpenAPI document of redpoll's HTTP API: every path, body and error.

    It is the document of this version, and needs no server. With --url it is that of a server; this needs no secret.

    \b
    Examples:
      redpoll openapi > openapi.json
      redpoll openapi --url wss://ws.example.com/app/KEY
    """
    if url is None:
        need_engine("redpoll openapi without --url")
        from redpoll.control.api_document import document

        print_json(json.loads(document()))
        return
    try:
        target = parse(url)
    except TargetError as error:
        refuse([f"{error} (from --url)"])

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
