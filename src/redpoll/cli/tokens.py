"""`redpoll token …`: creates, lists and revokes tokens for the HTTP API."""

from typing import Any

import click

from redpoll.cli.common import seconds_of, split_words, time_text
from redpoll.cli.records_command import AppCommand, executes

__all__ = ["token"]


@click.group()
def token() -> None:
    """Manage tokens for the HTTP API of an app (`Authorization: Bearer TOKEN`).

    A token has scopes and, optionally, an expiry.

    \b
    Examples:
      redpoll token create 1234567 --name CI --scope publish
      redpoll token list 1234567
    """


def _print_created(created: dict[str, Any]) -> None:
    click.echo(f"id       {created['id']}\ntoken    {created['token']}\nscopes   {','.join(created['scopes'])}")
    click.echo(f"expires  {time_text(created['expires_at'])}\n\nSave the token now: it is not shown again.")


@token.command("create", cls=AppCommand)
@click.argument("app_id", required=False)
@click.option("--name", required=True, help="A name for people: what the token is for.")
@click.option(
    "--scope", "scopes", multiple=True, required=True, metavar="publish|read|auth|all", help="May be repeated."
)
@click.option("--expires", metavar="TIME", help="Lifetime: 90s, 15m, 12h, 30d. Default: until it is revoked.")
@executes("token create", _print_created)
def token_create(app_id: str, name: str, scopes: tuple[str, ...], expires: str | None) -> dict[str, Any]:
    """Create a token and print it. It is printed only once, because the server stores only its hash.

    \b
    Examples:
      redpoll token create 1234567 --name CI --scope publish --expires 30d
      redpoll token create 1234567 --name monitor --scope read --json
    """
    return {
        "app": app_id,
        "name": name,
        "scopes": split_words(scopes),
        "lasts_s": seconds_of(expires, "--expires") if expires is not None else None,
    }


def _print_tokens(tokens: list[dict[str, Any]]) -> None:
    for row in tokens:
        revoked, expires = row["revoked_at"], row["expires_at"]
        end = f"revoked {time_text(revoked)}" if revoked else f"expires {time_text(expires)}"
        used = f"used {time_text(row['last_used_at'])}"
        click.echo(f"{row['id']}  {row['prefix']}…  {','.join(row['scopes'])}  {end}  {used}  {row['name']}")


@token.command("list", cls=AppCommand)
@click.argument("app_id", required=False)
@executes("token list", _print_tokens)
def token_list(app_id: str) -> dict[str, Any]:
    """List the tokens of an app, oldest first, without the tokens themselves.

    \b
    Examples:
      redpoll token list 1234567
    """
    return {"app": app_id}


def _print_revoked(revoked: list[dict[str, Any]]) -> None:
    for row in revoked:
        click.echo(f"{row['id']}  revoked {time_text(row['revoked_at'])}  {row['name']}")


@token.command("revoke")
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@executes("token revoke", _print_revoked)
def token_revoke(ids: tuple[str, ...]) -> dict[str, Any]:
    """Revoke tokens, at once and permanently. If one ID is unknown, none is revoked.

    \b
    Examples:
      redpoll token revoke tok_1 tok_2
    """
    return {"ids": ids}
