"""Exports lists as CSV or JSON files. A job creates the file, so that a long export shows its progress.

Rows come in chunks, and each row is encoded at once, so that only the file is in memory. A file has at most MAX_ROWS
and MAX_BYTES. The page of the job says so when rows are missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec

from redpoll.control.dashboard.access import HOME, Visit
from redpoll.control.dashboard.jobs import MAX_FILE_BYTES, File, Jobs, Progress
from redpoll.control.http.response import Response
from redpoll.loop.slices import SLICE_S
from redpoll.protocol.apps import App

__all__ = ["FORMATS", "Chunks", "Exports", "encoded"]

FORMATS: Final = ("csv", "json")
MAX_ROWS: Final = 100_000
MAX_BYTES: Final = MAX_FILE_BYTES
# For what is before, between and after the rows.
_FRAME_BYTES: Final = 4
# Spreadsheets read cells that begin like this as formulas, and rows contain untrusted text.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
# RFC 4180: cells with one of these are quoted.
_QUOTED: Final = (",", '"', "\r", "\n")

# The first chunk has all names that any row has.
Chunks = AsyncGenerator[Sequence[dict[str, Any]], None]
Rows = Callable[[Progress], Chunks]


class Exports:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def begin(
        self,
        visit: Visit,
        title: str,
        name: str,
        format: str,
        rows: Rows,
        *,
        rest: str,
        app: App | None = None,
        back: str = "",
        newest_first: bool = False,
    ) -> Response:
        """Starts a job that gathers `rows` and writes a file whose name begins with `name`.

        `rest` is a sentence about how to get rows that the file doesn't have. `newest_first`: the rows come in this
        order, and the file has the oldest first.
        """
        format = format if format in FORMATS else "csv"
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        file_name = f"{name}{'-' + app.id if app is not None else ''}-{stamp}.{format}"
        back = back or (f"{HOME}/apps/{app.id}/{name}" if app is not None else f"{HOME}/{name}")

        async def work(progress: Progress) -> File:
            content = await encoded(rows(progress), format, progress)
            body = await content.joined(newest_first)
            count = len(content.lines)
            note = f"The file has all rows: {count:,}."
            if progress.missing:
                note = f"The file has only {count:,} of {count + progress.missing:,} rows. {rest}"
            if content.limit:
                which = "newest" if newest_first else "first"
                note = f"The file has only the {which} {count:,} rows, because {content.limit}. {rest}"
            return File(file_name, content.type, body, note)

        return self._jobs.begin(visit, title, back, work, changes=False)


class Csv:
    """The content of a CSV file: a header line, then a line for each row. A `'` goes before cells that a spreadsheet
    would read as formulas. `limit`: why there are more rows than lines, "" if the file has all."""

    type = "text/csv; charset=utf-8"

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.limit = ""
        self._names: list[str] = []

    def line(self, row: dict[str, Any]) -> bytes:
        return ",".join([_cell(row.get(name)) for name in self._names]).encode()

    def first(self, chunk: Sequence[dict[str, Any]]) -> int:
        """Takes the first chunk; returns the bytes of the header line."""
        self._names = list(dict.fromkeys(name for row in chunk for name in row))
        return len(self._header())

    async def joined(self, reverse: bool = False) -> bytes:
        if reverse:
            self.lines.reverse()
        return await asyncio.to_thread(b"\r\n".join, [self._header(), *self.lines, b""])

    def _header(self) -> bytes:
        return ",".join(map(_cell, self._names)).encode()


class Json:
    """The content of a JSON file: an array with an object for each row. `limit` as in Csv."""

    type = "application/json"

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.limit = ""

    def line(self, row: dict[str, Any]) -> bytes:
        return b" " + msgspec.json.format(msgspec.json.encode(row), indent=1).replace(b"\n", b"\n ")

    def first(self, chunk: Sequence[dict[str, Any]]) -> int:
        return 0

    async def joined(self, reverse: bool = False) -> bytes:
        if reverse:
            self.lines.reverse()
        if not self.lines:
            return b"[]"
        lines = [b"[\n" + self.lines[0], *self.lines[1:]]
        lines[-1] += b"\n]"
        return await asyncio.to_thread(b",\n".join, lines)


async def encoded(rows: Chunks, format: str, progress: Progress) -> Csv | Json:
    """The content of a file with these rows: all, or as many as it has room for. Encodes for a slice in each pass of
    the loop."""
    content: Csv | Json = Json() if format == "json" else Csv()
    size, is_first = _FRAME_BYTES, True
    until = time.monotonic() + SLICE_S
    async with aclosing(rows) as chunks:
        async for chunk in chunks:
            if is_first:
                size, is_first = size + content.first(chunk), False
            for row in chunk:
                line = content.line(row)
                size += len(line) + 2
                if len(content.lines) == MAX_ROWS:
                    content.limit = f"a file has at most {MAX_ROWS:,}"
                elif size > MAX_BYTES:
                    content.limit = f"a file has at most {MAX_BYTES / 2**20:g} MiB"
                if content.limit:
                    return content
                content.lines.append(line)
                if time.monotonic() > until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + SLICE_S
            progress.done = len(content.lines)
    return content


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    if isinstance(value, str) and value.startswith(_FORMULA):
        value = f"'{value}"
    text = "" if value is None else str(value)
    if any(mark in text for mark in _QUOTED):
        return '"' + text.replace('"', '""') + '"'
    return text
