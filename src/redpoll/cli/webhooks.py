"""`redpoll webhook …` and `redpoll dead-letter …`: webhook endpoints, and deliveries that failed for good."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from redpoll.cli.common import print_json, refuse, safe, split_words, time_text
from redpoll.cli.execute import run
from redpoll.cli.records_command import AppCommand, executes, records_command
from redpoll.cli.remote import app_command, execute, with_secret
from redpoll.cli.webhook_listener import CannotStart, Listener
from redpoll.config import config

if TYPE_CHECKING:
    from redpoll.doctor.target import Target

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
    url = created["url"] or "none: its deliveries are pulled"
    click.echo(f"id      {created['id']}\nsecret  {created['secret']}\nurl     {url}")
    batch = ", the events of a second in one request" if created.get("batch") else ""
    click.echo(f"events  {','.join(created['events'])}\nformat  {created['format']}{batch}")
    if "subscription.count" in created["events"] and not created.get("subscription_count", True):
        click.echo(
            "The app doesn't announce counts yet, so subscription.count isn't sent: "
            "redpoll app set ID subscription_count=true",
            err=True,
        )


@webhook.command("create", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("url", required=False)
@click.option(
    "--pull", is_flag=True, help="No URL: the back end asks for deliveries, as `redpoll webhook listen` does."
)
@click.option(
    "--events",
    multiple=True,
    default=("all",),
    metavar="all|NAME,…",
    help="all: channel.occupied, channel.vacated, member.added, member.removed and client_event. cache.miss and "
    "subscription.count must be named. The latter is sent if the app's setting subscription_count is on, and not for "
    "presence channels.",
)
@click.option("--format", type=click.Choice(["service", "pusher"]), default="service", help="Format of the body.")
@click.option("--channels", multiple=True, metavar="PREFIX,…", help="Only channels whose names begin with a PREFIX.")
@click.option(
    "--client-events", multiple=True, metavar="NAME,…", help="Of client events, only those with one of these names."
)
@click.option("--batch", is_flag=True, help="Send the events of a second in one request, as Pusher may.")
@click.option("--pin", is_flag=True, help="Pin the certificate that the URL presents now.")
@executes("webhook create", _print_created)
def webhook_create(
    app_id: str,
    url: str | None,
    pull: bool,
    events: tuple[str, ...],
    format: str,
    channels: tuple[str, ...],
    client_events: tuple[str, ...],
    batch: bool,
    pin: bool,
) -> dict[str, Any]:
    """Create an endpoint and print its id and its signing secret.

    \b
    Examples:
      redpoll webhook create 1234567 https://example.com/hooks
      redpoll webhook create 1234567 https://example.com/p --events member.added --channels presence- --format pusher
      redpoll webhook create 1234567 https://example.com/p --format pusher --batch
      redpoll webhook create 1234567 --pull --events client_event --client-events client-order,client-paid
    """
    if pull is bool(url):
        raise click.UsageError("give either a URL, or --pull")
    return {
        "app": app_id,
        "url": url or None,
        "client_events": split_words(client_events),
        "events": split_words(events),
        "format": format,
        "channels": split_words(channels),
        "batch": batch,
        "pin": pin,
    }


def _print_endpoint(endpoint: dict[str, Any]) -> None:
    words = [endpoint["id"], endpoint["url"] or "(pulled)", ",".join(endpoint["events"]), endpoint["format"]]
    if endpoint["client_events"]:
        words.append(f"client events {','.join(endpoint['client_events'])}")
    if endpoint["channels"]:
        words.append(f"channels {','.join(endpoint['channels'])}")
    if endpoint.get("batch"):
        words.append("batched")
    if endpoint["pin"]:
        words.append(f"pinned to {endpoint['pin']}")
    if not endpoint["enabled"]:
        words.append("(disabled)")
    if endpoint["failing_since"]:
        words.append(f"(failing since {time_text(endpoint['failing_since'])})")
    if endpoint.get("dropped"):
        words.append(f"({endpoint['dropped']} deliveries dropped, {endpoint['waiting']} wait)")
    click.echo("  ".join(words))


def _print_deleted(endpoint: dict[str, Any]) -> None:
    click.echo(f"deleted {endpoint['id']}  {endpoint['url'] or '(pulled)'}")


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
    @executes(f"webhook {verb}", _print_deleted if verb == "delete" else _print_endpoint)
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


@webhook.command("listen", context_settings={"ignore_unknown_options": True})
@click.argument("command", metavar="COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--endpoint", metavar="ID", help="Only deliveries of this endpoint. Default: of all without a URL.")
@click.option("--jobs", type=click.IntRange(1, 100), default=1, show_default=True, help="Commands at a time.")
@click.option(
    "--token",
    metavar="TOKEN",
    envvar="REDPOLL_TOKEN",
    help="A token with the scope webhooks, for https://HOST/apps/ID without key and secret. Default: REDPOLL_TOKEN.",
)
@app_command
def webhook_listen(
    command: tuple[str, ...], endpoint: str | None, jobs: int, token: str | None, target: Target, as_json: bool
) -> None:
    """Pull webhooks, and run COMMAND for each.

    COMMAND gets the body as standard input, and the headers as CGI programs do: HTTP_X_SERVICE_EVENT,
    HTTP_X_SERVICE_DELIVERY and so on, and CONTENT_TYPE. If it exits with 0, the delivery is acknowledged at once. If
    not, the delivery comes again, at first after a minute. A line is printed for each. Ctrl-C ends the command after
    the running COMMANDs; a second one ends these too. If COMMAND can't be started, the exit code is 2.

    It needs a webhook without a URL: redpoll webhook create --pull. The server may be anywhere: it is asked, and needs
    no way to this machine.

    \b
    Examples:
      redpoll webhook listen -- ./handle-webhook
      redpoll webhook listen --url https://KEY:SECRET@ws.example.com/apps/1234567 -- php handle.php
      redpoll webhook listen --jobs 8 --url https://ws.example.com/apps/1234567 --token TOKEN -- ./handle-webhook
    """
    if shutil.which(command[0]) is None:
        refuse([f"there is no command {safe(command[0])} on this machine"])
    if not token:
        with_secret(target)
    try:
        sys.exit(execute(Listener(target, command, endpoint, jobs, token or "", as_json).run()))
    except CannotStart as error:
        refuse([error])


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
    click.echo(f"id       {letter['id']}\nevent    {letter['event']}")
    # "pending" would read as if it were tried again by itself.
    state = "failed: retry or discard it" if letter["state"] == "pending" else letter["state"]
    click.echo(f"url      {safe(letter['url'] or '(pulled)', 2_000)}\nstate    {state}")
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
