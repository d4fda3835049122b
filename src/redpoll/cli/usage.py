"""`redpoll usage`: what each app used, by day."""

import csv
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import click

from redpoll.cli.common import print_json, safe
from redpoll.cli.execute import run
from redpoll.cli.records_command import records_command
from redpoll.config import config

__all__ = ["usage"]

_COLUMNS = ("app_id", "day", "peak_connections", "published", "client_events", "sent")


@click.command()
@click.argument("app_id", required=False, default="")
@click.option(
    "--days", type=click.IntRange(1, 400), default=30, show_default=True, metavar="N", help="The last N days."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header line.")
@records_command
def usage(app_id: str, days: int, as_csv: bool, settings: config.Settings, as_json: bool) -> None:
    """Show what apps used, by UTC day: the most connections at a time, events published over HTTP, events of clients,
    and events sent to clients (counted per socket). Without APP_ID, of all apps.

    Today is counted up to the last seconds; a killed control plane loses at most a minute. Days without use are left
    out, and days are kept for 400 days.

    Connections are counted every five seconds, so a shorter peak isn't seen. The days of all nodes are added up, also
    the most connections, which nodes may have at different times. Each node counts in its own data folder: nodes that
    have left are missing, and without a running server only this node's days are shown.

    \b
    Examples:
      redpoll usage
      redpoll usage 1234567 --days 7
      redpoll usage --days 31 --csv > usage.csv
    """
    missing: set[str] = set()
    pages = _pages(settings, app_id, days, missing)
    # Before anything is printed: the first page may fail.
    rows = chain(next(pages), chain.from_iterable(pages))
    if as_json:
        print_json(list(rows))
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows([row[name] for name in _COLUMNS] for row in rows)
    else:
        _print_text(rows)
    if missing:
        names = safe(", ".join(sorted(missing)))
        click.echo(f"no answer within a second from {names}: what it counted is missing", err=True)


def _pages(settings: config.Settings, app_id: str, days: int, missing: set[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows, page by page. Adds the nodes that don't answer to `missing`."""
    after: list[str] | None = None
    while True:
        answer = run(settings, "usage", {"app": app_id, "days": days, "after": after})
        missing.update(answer["unanswered"])
        yield answer["days"]
        after = answer["next"]
        if after is None:
            return


def _print_text(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        click.echo(
            f"{row['app_id']}  {row['day']}  peak {row['peak_connections']:,} connections  "
            f"{row['published']:,} published  {row['client_events']:,} client events  {row['sent']:,} sent"
        )
