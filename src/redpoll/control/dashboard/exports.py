"""Exports lists as CSV or JSON files. A job creates the file, so that a long export shows its progress."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from redpoll.control.dashboard.access import HOME, Visit
from redpoll.control.dashboard.jobs import File, Jobs, Progress
from redpoll.control.http.response import Response
from redpoll.protocol.apps import App

__all__ = ["FORMATS", "MAX_ROWS", "Exports", "as_csv"]

FORMATS: Final = ("csv", "json")
# Files are in memory until they expire.
MAX_ROWS: Final = 100_000
# Spreadsheets read cells that begin like this as formulas, and rows contain untrusted text.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")

Rows = Callable[[Progress], Awaitable[Sequence[dict[str, Any]]]]


class Exports:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def begin(
        self, visit: Visit, title: str, name: str, format: str, rows: Rows, app: App | None = None, back: str = ""
    ) -> Response:
        """Starts a job that gathers `rows` and writes a file whose name begins with `name`."""
        format = format if format in FORMATS else "csv"
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        file_name = f"{name}{'-' + app.id if app is not None else ''}-{stamp}.{format}"
        back = back or (f"{HOME}/apps/{app.id}/{name}" if app is not None else f"{HOME}/{name}")

        async def work(progress: Progress) -> File:
            exported = list(await rows(progress))[:MAX_ROWS]
            if format == "json":
                return File(file_name, "application/json", msgspec.json.format(msgspec.json.encode(exported), indent=1))
            return File(file_name, "text/csv; charset=utf-8", as_csv(exported))

        return self._jobs.begin(visit, title, back, work)


def as_csv(rows: Sequence[dict[str, Any]]) -> bytes:
    """A header line, then a line for each row. A `'` goes before cells that a spreadsheet would read as formulas."""
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
