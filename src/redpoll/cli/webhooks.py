"""`redpoll webhook …` and `redpoll dead-letter …`: where an app's webhooks go, and those that did not arrive."""

import sys
from typing import Any

import click

from redpoll import config
from redpoll.cli.asking import run
from redpoll.cli.common import print_json, records_command, safe, when, words_of

__all__ = ["dead_letter", "webhook"]


@click.group()
def webhook() -> None:
    """Endpoints that are told what happens in an app: channels occupied and vacated, members, client events."""


@webhook.command("create")
@click.argument("app_id")
@click.argument("url")
@click.option(
    "--events",
    multiple=True,
    default=("all",),
    metavar="all|NAME,…",
    help="channel.occupied, channel.vacated, member.added, member.removed, client_event, which are all; and by name "
    "only cache.miss, subscription.count.",
)
@click.option("--format", type=click.Choice(["service", "pusher"]), default="service", help="Of the body.")
@click.option("--channels", multiple=True, metavar="PREFIX,…", help="Only channels whose names begin so.")
@click.option("--pin", is_flag=True, help="Send to the certificate that the URL has now, and to no other.")
@records_command
def webhook_create(
    app_id: str,
    url: str,
    events: tuple[str, ...],
    format: str,
    channels: tuple[str, ...],
    pin: bool,
    settings: config.Settings,
    as_json: bool,
) -> None:
    """Make an endpoint; print its id and the secret that signs what is sent there."""
    args = {
        "app": app_id,
        "url": url,
        "events": words_of(events),
        "format": format,
        "channels": words_of(channels),
        "pin": pin,
    }
    made = run(settings, "webhook create", args)
    if as_json:
        print_json(made)
        return
    click.echo(f"id      {made['id']}\nsecret  {made['secret']}\nurl     {made['url']}")
    click.echo(f"events  {','.join(made['events'])}\nformat  {made['format']}")


@webhook.command("list")
@click.argument("app_id")
@records_command
def webhook_list(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """List the endpoints of an app, without their secrets."""
    endpoints = run(settings, "webhook list", {"app": app_id})
    if as_json:
        print_json(endpoints)
        return
    for each in endpoints:
        _tell_endpoint(each)


def _tell_endpoint(endpoint: dict[str, Any]) -> None:
    words = [endpoint["id"], endpoint["url"], ",".join(endpoint["events"]), endpoint["format"]]
    if endpoint["channels"]:
        words.append(f"channels {','.join(endpoint['channels'])}")
    if endpoint["pin"]:
        words.append(f"pinned to {endpoint['pin']}")
    if not endpoint["enabled"]:
        words.append("(disabled)")
    if endpoint["failing_since"]:
        words.append(f"(failing since {when(endpoint['failing_since'])})")
    click.echo("  ".join(words))


def _endpoint_command(verb: str, text: str) -> click.Command:
    """A command on one endpoint that answers with it."""

    @click.argument("endpoint_id", metavar="ID")
    @records_command
    def command(endpoint_id: str, settings: config.Settings, as_json: bool) -> None:
        endpoint = run(settings, f"webhook {verb}", {"id": endpoint_id})
        if as_json:
            print_json(endpoint)
        else:
            _tell_endpoint(endpoint)

    command.__doc__ = text
    return click.command(verb)(command)


for _verb, _text in (
    ("enable", "Send to an endpoint again, what waited for it first."),
    ("disable", "Send nothing to an endpoint for now; what is for it waits."),
    ("delete", "Take an endpoint away; what waited for it is discarded, and shown so."),
    ("pin", "Send to the certificate that the endpoint has now, and to no other; once more: to its new one."),
    ("unpin", "Send to any certificate again that is good for the endpoint's host."),
):
    webhook.add_command(_endpoint_command(_verb, _text))


@webhook.command("rotate")
@click.argument("endpoint_id", metavar="ID")
@records_command
def webhook_rotate(endpoint_id: str, settings: config.Settings, as_json: bool) -> None:
    """Give an endpoint a new secret; for a while what is sent is signed with the old one as well."""
    rotated = run(settings, "webhook rotate", {"id": endpoint_id})
    if as_json:
        print_json(rotated)
        return
    until = when(rotated["overlap_until"])
    click.echo(f"id      {rotated['id']}\nsecret  {rotated['secret']}\nuntil {until} the old one signs as well")


@webhook.command("test")
@click.argument("endpoint_id", metavar="ID")
@records_command
def webhook_test(endpoint_id: str, settings: config.Settings, as_json: bool) -> None:
    """Send one event now and say what came of it; 1 where it did not arrive. A disabled endpoint too."""
    attempt = run(settings, "webhook test", {"id": endpoint_id})
    if as_json:
        print_json(attempt)
    else:
        click.echo(f"{'delivered' if attempt['ok'] else 'not delivered'}: {safe(attempt['reason'])}")
    sys.exit(0 if attempt["ok"] else 1)


@click.group("dead-letter")
def dead_letter() -> None:
    """Webhooks that did not arrive, however often they were sent: to look at, to send again, to drop."""


@dead_letter.command("list")
@click.argument("app_id")
@records_command
def dead_letter_list(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """List an app's dead letters that nothing was decided about yet, the last to fail first."""
    answer = run(settings, "dead-letter list", {"app": app_id})
    letters = answer["letters"]
    if len(letters) < answer["total"]:
        click.echo(f"the last {len(letters)} of {answer['total']} dead letters", err=True)
    if as_json:
        print_json(letters)
        return
    for each in letters:
        click.echo(
            f"{each['id']}  {each['event']}  to {each['endpoint_id']}  failed {when(each['failed_at'])}  "
            f"attempts {each['attempts']}"
        )


@dead_letter.command("show")
@click.argument("letter_id", metavar="ID")
@records_command
def dead_letter_show(letter_id: str, settings: config.Settings, as_json: bool) -> None:
    """Show what was to be sent, and every attempt with its reason."""
    letter = run(settings, "dead-letter show", {"id": letter_id})
    if as_json:
        print_json(letter)
        return
    click.echo(f"id       {letter['id']}\nevent    {letter['event']}\nurl      {safe(letter['url'], 2_000)}")
    click.echo(f"state    {letter['state']}")
    if letter["failed_at"] is not None:
        click.echo(f"failed   {when(letter['failed_at'])}")
    for each in letter["attempts"]:
        status = each["status"] if each["status"] is not None else "-"
        click.echo(f"attempt  {when(each['at'])}  {status}  {each['duration_ms']} ms  {safe(each['reason'])}")
        if each["response"]:
            click.echo(f"         answered {safe(each['response'], 1_024)}")
    click.echo(f"payload  {safe(letter['payload'], 1_000_000)}")


def _letters_command(verb: str, text: str) -> click.Command:
    @click.argument("ids", metavar="ID…", nargs=-1, required=True)
    @records_command
    def command(ids: tuple[str, ...], settings: config.Settings, as_json: bool) -> None:
        letters = run(settings, f"dead-letter {verb}", {"ids": ids})
        if as_json:
            print_json(letters)
            return
        for each in letters:
            click.echo(f"{each['id']}  {each['state']}")

    command.__doc__ = text
    return click.command(verb)(command)


for _verb, _text in (
    ("retry", "Send dead letters again, all attempts from the first; all of them or, where an ID is unknown, none."),
    ("discard", "Drop dead letters for good; all of them or, where an ID is unknown, none."),
):
    dead_letter.add_command(_letters_command(_verb, _text))
