"""`redpoll key …`, `redpoll token …` and `redpoll grant …`: what gives access to an app."""

import json
from typing import Any

import click

from redpoll.cli.common import refuse, seconds_of, split_words, time_text
from redpoll.cli.records_command import AppCommand, executes

__all__ = ["grant", "key", "state", "token"]


@click.group()
def key() -> None:
    """Manage the keys of an app. Several can be enabled at once, so that keys can be rotated.

    \b
    Examples:
      redpoll key add 1234567
      redpoll key list 1234567
    """


@key.command("add", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("key", required=False)
@executes("key add", lambda added: click.echo(f"key     {added['key']}\nsecret  {added['secret']}"))
def key_add(app_id: str, key: str | None) -> dict[str, Any]:
    """Create a key with its secret. With the KEY of a disabled key, enable that one again.

    \b
    Examples:
      redpoll key add 1234567
      redpoll key add 1234567 OLDKEY
    """
    return {"app": app_id, "key": key}


def _print_keys(keys: list[dict[str, Any]]) -> None:
    for row in keys:
        click.echo(f"{row['key']}  {row['secret']}{state(row)}")


@key.command("list", cls=AppCommand)
@click.argument("app_id", required=False)
@executes("key list", _print_keys)
def key_list(app_id: str) -> dict[str, Any]:
    """List the keys of an app with their secrets, oldest first.

    \b
    Examples:
      redpoll key list 1234567 --json
    """
    return {"app": app_id}


@key.command("disable", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("key")
@executes("key disable", lambda disabled: click.echo(f"{disabled['key']}{state(disabled)}"))
def key_disable(app_id: str, key: str) -> dict[str, Any]:
    """Disable a key for new connections and requests.

    Open connections stay. The last enabled key can't be disabled.

    \b
    Examples:
      redpoll key disable 1234567 OLDKEY
    """
    return {"app": app_id, "key": key}


def state(key: dict[str, Any]) -> str:
    """The suffix for a key's line of output."""
    return "" if key["enabled"] else "  (disabled)"


@click.group()
def token() -> None:
    """Manage tokens for the HTTP API of an app, or for the management of apps (`Authorization: Bearer TOKEN`).

    A token has scopes and, optionally, an expiry.

    \b
    Examples:
      redpoll token create 1234567 --name CI --scope publish
      redpoll token list 1234567
      redpoll token create --manage --name platform
    """


_manage = click.option("--manage", is_flag=True, help="Tokens that create, change and delete apps; without APP_ID.")


def _app_of(app_id: str | None, manage: bool) -> str | None:
    if manage and app_id:
        raise click.UsageError("a token for the management of apps belongs to no app: leave out APP_ID, or --manage")
    return None if manage else app_id


def _print_created(created: dict[str, Any]) -> None:
    click.echo(f"id       {created['id']}\ntoken    {created['token']}\nscopes   {','.join(created['scopes'])}")
    click.echo(f"expires  {time_text(created['expires_at'])}\n\nSave the token now: it is not shown again.")


@token.command("create", cls=AppCommand)
@click.argument("app_id", required=False)
@click.option("--name", required=True, help="A name for people: what the token is for.")
@click.option("--scope", "scopes", multiple=True, metavar="publish|read|auth|webhooks|all", help="May be repeated.")
@_manage
@click.option("--expires", metavar="TIME", help="Lifetime: 90s, 15m, 12h, 30d. Default: until it is revoked.")
@executes("token create", _print_created)
def token_create(
    app_id: str | None, name: str, scopes: tuple[str, ...], manage: bool, expires: str | None
) -> dict[str, Any]:
    """Create a token and print it. It is printed only once, because the server stores only its hash.

    \b
    Examples:
      redpoll token create 1234567 --name CI --scope publish --expires 30d
      redpoll token create 1234567 --name monitor --scope read --json
      redpoll token create --manage --name platform --expires 365d
    """
    if manage == bool(scopes):
        raise click.UsageError("give --scope, for a token of an app, or --manage")
    return {
        "app": _app_of(app_id, manage),
        "name": name,
        "scopes": ["manage"] if manage else split_words(scopes),
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
@_manage
@executes("token list", _print_tokens)
def token_list(app_id: str | None, manage: bool) -> dict[str, Any]:
    """List the tokens of an app, oldest first, without the tokens themselves.

    \b
    Examples:
      redpoll token list 1234567
      redpoll token list --manage
    """
    return {"app": _app_of(app_id, manage)}


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


@click.group()
def grant() -> None:
    """Make, check and revoke signed channel grants: JWTs that open channels without an auth request for each.

    The app must accept them: redpoll app set ID grants=true

    \b
    Examples:
      redpoll grant mint 1234567 --user 7 --channel 'private-org-3-*'
      redpoll grant revoke 1234567 --user 7
    """


def _print_minted(minted: dict[str, Any]) -> None:
    click.echo(minted["auth"])
    if not minted["accepted"]:
        click.echo("The app doesn't accept grants yet: redpoll app set ID grants=true", err=True)


@grant.command("mint", cls=AppCommand)
@click.argument("app_id", required=False)
@click.option("--user", help="The user's id (sub). Presence channels and sign-in need it.")
@click.option("--channel", "channels", multiple=True, metavar="PATTERN", help="May be repeated; * at the end.")
@click.option("--client-events", is_flag=True, help="The client may send client events.")
@click.option("--info", metavar="JSON", help="The user_info of the presence member.")
@click.option(
    "--expires", default="1h", show_default=True, metavar="TIME", help="Lifetime: 90s, 15m, 12h; at most 24h."
)
@executes("grant mint", _print_minted)
def grant_mint(
    app_id: str, user: str | None, channels: tuple[str, ...], client_events: bool, info: str | None, expires: str
) -> dict[str, Any]:
    """Make a grant, signed with the app's oldest enabled key, and print it as `auth`. For tests: a back end makes its
    own with a JWT library.

    \b
    Examples:
      redpoll grant mint 1234567 --user 7 --channel 'private-org-3-*' --channel presence-lobby
      redpoll grant mint 1234567 --channel private-news --expires 15m --json
    """
    try:
        value = None if info is None else json.loads(info)
    except ValueError as error:
        refuse([f"--info isn't JSON: {error}"])
    return {
        "app": app_id,
        "user": user,
        "channels": channels,
        "may": ["client_events"] if client_events else [],
        "info": value,
        "lasts_s": seconds_of(expires, "--expires"),
    }


def _print_checked(checked: dict[str, Any]) -> None:
    if "exp" in checked:
        click.echo(f"user      {checked['sub'] or '-'}\njti       {checked['jti'] or '-'}")
        click.echo(f"expires   {time_text(checked['exp'])}\nmay       {','.join(checked['may'])}")
        click.echo(f"channels  {' '.join(checked['channels'])}")
    if checked["valid"]:
        click.echo("accepted")
    else:
        click.echo(checked["reason"], err=True)


@grant.command("check", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("auth")
@click.option("--channel", metavar="NAME", help="Whether it opens this channel.")
@executes("grant check", _print_checked, lambda checked: checked["valid"])
def grant_check(app_id: str, auth: str, channel: str | None) -> dict[str, Any]:
    """Show what a grant allows, and whether it is accepted now. AUTH is the key, a colon and the JWT. Exits with 1 if
    the grant is refused.

    \b
    Examples:
      redpoll grant check 1234567 "$AUTH" --channel private-org-3-news
    """
    return {"app": app_id, "auth": auth, "channel": channel}


def _print_revoked_grant(revoked: dict[str, Any]) -> None:
    click.echo(f"revoked {time_text(revoked['revoked_at'])}; {revoked['unsubscribed']} subscriptions ended")


@grant.command("revoke", cls=AppCommand)
@click.argument("app_id", required=False)
@click.option("--jti", help="The id of one grant.")
@click.option("--user", help="All grants of this user that were issued until now.")
@executes("grant revoke", _print_revoked_grant)
def grant_revoke(app_id: str, jti: str | None, user: str | None) -> dict[str, Any]:
    """Revoke one grant or all of a user, on all nodes, and end the subscriptions that were made with them.

    \b
    Examples:
      redpoll grant revoke 1234567 --user 7
      redpoll grant revoke 1234567 --jti 5f0c
    """
    if (jti is None) is (user is None):
        refuse(["name --jti or --user"])
    return {"app": app_id, "jti": jti, "user": user}
