"""`redpoll token …`: tokens for the HTTP API."""

import re

import click

from redpoll import config
from redpoll.cli.asking import run
from redpoll.cli.common import print_json, records_command, refuse, when, words_of

__all__ = ["token"]


@click.group()
def token() -> None:
    """Tokens for the HTTP API of an app: `Authorization: Bearer TOKEN`, with scopes and an end."""


@token.command("create")
@click.argument("app_id")
@click.option("--name", required=True, help="What it is for, for people.")
@click.option(
    "--scope", "scopes", multiple=True, required=True, metavar="publish|read|auth|all", help="May be repeated."
)
@click.option("--expires", metavar="TIME", help="How long it lasts: 90s, 15m, 12h, 30d. Without: until it is revoked.")
@records_command
def token_create(
    app_id: str, name: str, scopes: tuple[str, ...], expires: str | None, settings: config.Settings, as_json: bool
) -> None:
    """Make a token and print it. It is shown this once: only its hash is kept."""
    args = {"app": app_id, "name": name, "scopes": words_of(scopes), "lasts_s": _duration_s(expires)}
    made = run(settings, "token create", args)
    if as_json:
        print_json(made)
        return
    click.echo(f"id       {made['id']}\ntoken    {made['token']}\nscopes   {','.join(made['scopes'])}")
    click.echo(f"expires  {when(made['expires_at'])}\n\nKeep the token now: it is not shown again.")


@token.command("list")
@click.argument("app_id")
@records_command
def token_list(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """List the tokens of an app, oldest first, without the tokens themselves."""
    tokens = run(settings, "token list", {"app": app_id})
    if as_json:
        print_json(tokens)
        return
    for each in tokens:
        ends = f"revoked {when(each['revoked_at'])}" if each["revoked_at"] else f"expires {when(each['expires_at'])}"
        used = f"used {when(each['last_used_at'])}"
        click.echo(f"{each['id']}  {each['prefix']}…  {','.join(each['scopes'])}  {ends}  {used}  {each['name']}")


@token.command("revoke")
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@records_command
def token_revoke(ids: tuple[str, ...], settings: config.Settings, as_json: bool) -> None:
    """End tokens, at once and for good; all of them or, where an ID is unknown, none."""
    revoked = run(settings, "token revoke", {"ids": ids})
    if as_json:
        print_json(revoked)
        return
    for each in revoked:
        click.echo(f"{each['id']}  revoked {when(each['revoked_at'])}  {each['name']}")


_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _duration_s(text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,9})([smhd])", text)
    if found is None:
        refuse([f"--expires: a number with s, m, h or d behind it, such as 30d, not {text!r}"])
    return int(found[1]) * _SECONDS[found[2]]
