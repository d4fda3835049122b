"""Lists to take home, as CSV or JSON: made by a job, so that a long one shows how far it is."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from redpoll.control.dashboard.access import HOME, Visit
from redpoll.control.dashboard.jobs import File, Jobs, Progress
from redpoll.control.response import Response
from redpoll.protocol.apps import App

__all__ = ["FORMATS", "MOST_ROWS", "Exports", "as_csv"]

FORMATS: Final = ("csv", "json")
# What is made is held in memory until it is taken.
MOST_ROWS: Final = 100_000
# A spreadsheet takes what begins like this for a formula, and rows hold what strangers sent.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")

Rows = Callable[[Progress], Awaitable[Sequence[dict[str, Any]]]]


class Exports:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def begin(
        self, visit: Visit, title: str, name: str, format: str, rows: Rows, app: App | None = None, back: str = ""
    ) -> Response:
        """Has `rows` gathered and written. `name` begins the name of the file."""
        format = format if format in FORMATS else "csv"
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        file_name = f"{name}{'-' + app.id if app is not None else ''}-{stamp}.{format}"
        back = back or (f"{HOME}/apps/{app.id}/{name}" if app is not None else f"{HOME}/{name}")

        async def work(progress: Progress) -> File:
            found = list(await rows(progress))[:MOST_ROWS]
            if format == "json":
                return File(file_name, "application/json", msgspec.json.format(msgspec.json.encode(found), indent=1))
            return File(file_name, "text/csv; charset=utf-8", as_csv(found))

        return self._jobs.begin(visit, title, back, work)


def as_csv(rows: Sequence[dict[str, Any]]) -> bytes:
    """A line of names, then one for each row. Cells that a spreadsheet would take for a formula begin with `'`."""
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(out)
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in names])
    return out.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value
