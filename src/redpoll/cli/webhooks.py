"""`redpoll webhook …` and `redpoll dead-letter …`: webhook endpoints, and deliveries that failed for good."""

import sys
from typing import Any

import click

from redpoll.cli.common import print_json, safe, split_words, time_text
from redpoll.cli.execute import run
from redpoll.cli.records_command import AppCommand, executes, records_command
from redpoll.config import config

__all__ = ["dead_letter", "webhook"]


@click.group()
def webhook() -> None:
    """Manage webhook endpoints. They receive an app's events: channels occupied and vacated, members, client events.

    \b
    Examples:
      redpoll webhook create 1234567 https://example.com/hooks
      redpoll webhook test ID
    """


def _print_created(created: dict[str, Any]) -> None:
    click.echo(f"id      {created['id']}\nsecret  {created['secret']}\nurl     {created['url']}")
    click.echo(f"events  {','.join(created['events'])}\nformat  {created['format']}")


@webhook.command("create", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("url")
@click.option(
    "--events",
    multiple=True,
    default=("all",),
    metavar="all|NAME,…",
    help="all: channel.occupied, channel.vacated, member.added, member.removed and client_event. cache.miss and "
    "subscription.count must be named.",
)
@click.option("--format", type=click.Choice(["service", "pusher"]), default="service", help="Format of the body.")
@click.option("--channels", multiple=True, metavar="PREFIX,…", help="Only channels whose names begin with a PREFIX.")
@click.option("--pin", is_flag=True, help="Pin the certificate that the URL presents now.")
@executes("webhook create", _print_created)
def webhook_create(
    app_id: str, url: str, events: tuple[str, ...], format: str, channels: tuple[str, ...], pin: bool
) -> dict[str, Any]:
    """Create an endpoint and print its id and its signing secret.

    \b
    Examples:
      redpoll webhook create 1234567 https://example.com/hooks
      redpoll webhook create 1234567 https://example.com/p --events member.added --channels presence- --format pusher
    """
    return {
        "app": app_id,
        "url": url,
        "events": split_words(events),
        "format": format,
        "channels": split_words(channels),
        "pin": pin,
    }


def _print_endpoint(endpoint: dict[str, Any]) -> None:
    words = [endpoint["id"], endpoint["url"], ",".join(endpoint["events"]), endpoint["format"]]
    if endpoint["channels"]:
        words.append(f"channels {','.join(endpoint['channels'])}")
    if endpoint["pin"]:
        words.append(f"pinned to {endpoint['pin']}")
    if not endpoint["enabled"]:
        words.append("(disabled)")
    if endpoint["failing_since"]:
        words.append(f"(failing since {time_text(endpoint['failing_since'])})")
    if endpoint.get("dropped"):
        words.append(f"({endpoint['dropped']} deliveries dropped, {endpoint['waiting']} wait)")
    click.echo("  ".join(words))


def _print_endpoints(endpoints: list[dict[str, Any]]) -> None:
    for endpoint in endpoints:
        _print_endpoint(endpoint)


@webhook.command("list", cls=AppCommand)
@click.argument("app_id", required=False)
@executes("webhook list", _print_endpoints)
def webhook_list(app_id: str) -> dict[str, Any]:
    """List the endpoints of an app, without their secrets.

    \b
    Examples:
      redpoll webhook list 1234567
    """
    return {"app": app_id}


def _endpoint_command(verb: str, text: str) -> click.Command:
    """A command on one endpoint that prints the endpoint."""

    @click.argument("endpoint_id", metavar="ID")
    @executes(f"webhook {verb}", _print_endpoint)
    def command(endpoint_id: str) -> dict[str, Any]:
        return {"id": endpoint_id}

    command.__doc__ = f"{text}\n\n\b\nExamples:\n  redpoll webhook {verb} ID"
    return click.command(verb)(command)


for _verb, _text in (
    ("enable", "Enable an endpoint. Deliveries that waited for it are sent first."),
    ("disable", "Disable an endpoint. Its deliveries wait until it is enabled again."),
    ("delete", "Delete an endpoint. Waiting deliveries are discarded and shown as such."),
    ("pin", "Pin the certificate that the endpoint presents now. Repeat it after a certificate change."),
    ("unpin", "Accept any certificate again that is valid for the endpoint's host."),
):
    webhook.add_command(_endpoint_command(_verb, _text))


def _print_rotated(rotated: dict[str, Any]) -> None:
    until = time_text(rotated["overlap_until"])
    click.echo(f"id      {rotated['id']}\nsecret  {rotated['secret']}\nThe old secret signs too until {until}.")


@webhook.command("rotate")
@click.argument("endpoint_id", metavar="ID")
@executes("webhook rotate", _print_rotated)
def webhook_rotate(endpoint_id: str) -> dict[str, Any]:
    """Give an endpoint a new secret. For a while deliveries are signed with the old one too.

    \b
    Examples:
      redpoll webhook rotate ID
    """
    return {"id": endpoint_id}


@webhook.command("test")
@click.argument("endpoint_id", metavar="ID")
@records_command
def webhook_test(endpoint_id: str, settings: config.Settings, as_json: bool) -> None:
    """Send one test event now and print the result. Exits with 1 if it was not delivered.

    Works for disabled endpoints too.

    \b
    Examples:
      redpoll webhook test ID
      redpoll webhook test ID --json
    """
    attempt = run(settings, "webhook test", {"id": endpoint_id})
    if as_json:
        print_json(attempt)
    else:
        click.echo(f"{'delivered' if attempt['ok'] else 'not delivered'}: {safe(attempt['reason'])}")
    sys.exit(0 if attempt["ok"] else 1)


@click.group("dead-letter")
def dead_letter() -> None:
    """Manage dead letters: webhook deliveries whose attempts have all failed.

    \b
    Examples:
      redpoll dead-letter list 1234567
      redpoll dead-letter retry ID
    """


@dead_letter.command("list", cls=AppCommand)
@click.argument("app_id", required=False)
@records_command
def dead_letter_list(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """List an app's dead letters, the latest first. Retried and discarded ones are not listed.

    \b
    Examples:
      redpoll dead-letter list 1234567 --json
    """
    answer = run(settings, "dead-letter list", {"app": app_id})
    letters = answer["letters"]
    if len(letters) < answer["total"]:
        click.echo(f"showing the latest {len(letters)} of {answer['total']} dead letters", err=True)
    if answer.get("dropped"):
        click.echo(
            f"{answer['dropped']} more deliveries were dropped because webhook_max_waiting of their endpoint waited",
            err=True,
        )
    if as_json:
        print_json(letters)
        return
    for letter in letters:
        click.echo(
            f"{letter['id']}  {letter['event']}  to {letter['endpoint_id']}  failed {time_text(letter['failed_at'])}  "
            f"attempts {letter['attempts']}"
        )


def _print_letter(letter: dict[str, Any]) -> None:
    click.echo(f"id       {letter['id']}\nevent    {letter['event']}\nurl      {safe(letter['url'], 2_000)}")
    click.echo(f"state    {letter['state']}")
    if letter["failed_at"] is not None:
        click.echo(f"failed   {time_text(letter['failed_at'])}")
    for attempt in letter["attempts"]:
        status = attempt["status"] if attempt["status"] is not None else "-"
        click.echo(
            f"attempt  {time_text(attempt['at'])}  {status}  {attempt['duration_ms']} ms  {safe(attempt['reason'])}"
        )
        if attempt["response"]:
            click.echo(f"         response {safe(attempt['response'], 1_024)}")
    click.echo(f"payload  {safe(letter['payload'], 1_000_000)}")


@dead_letter.command("show")
@click.argument("letter_id", metavar="ID")
@executes("dead-letter show", _print_letter)
def dead_letter_show(letter_id: str) -> dict[str, Any]:
    """Show the payload of a dead letter and every attempt with its result.

    \b
    Examples:
      redpoll dead-letter show ID
    """
    return {"id": letter_id}


def _print_states(letters: list[dict[str, Any]]) -> None:
    for letter in letters:
        click.echo(f"{letter['id']}  {letter['state']}")


def _letters_command(verb: str, text: str) -> click.Command:
    @click.argument("ids", metavar="ID…", nargs=-1, required=True)
    @executes(f"dead-letter {verb}", _print_states)
    def command(ids: tuple[str, ...]) -> dict[str, Any]:
        return {"ids": ids}

    command.__doc__ = f"{text}\n\n\b\nExamples:\n  redpoll dead-letter {verb} ID"
    return click.command(verb)(command)


for _verb, _text in (
    ("retry", "Retry dead letters, with all attempts from the first. If one ID is unknown, none is retried."),
    ("discard", "Discard dead letters permanently. If one ID is unknown, none is discarded."),
):
    dead_letter.add_command(_letters_command(_verb, _text))
