"""Renders MATRIX.md, which shows the features of redpoll that each official library works with.

Rows, columns and reasons come from features.py, rules from rules.py, what reads, is posted and pulls over HTTP from
readers.py, receivers.py and pullers.py, and each mark is the outcome of a test.
`pytest tests/matrix --write-matrix` writes the page; every other complete run compares it with its own outcomes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from matrix.features import ROWS
from matrix.libraries import COLUMNS
from matrix.pullers import PULLERS
from matrix.readers import READERS
from matrix.receivers import RECEIVERS
from matrix.rules import RULES

PAGE = Path(__file__).parents[2] / "MATRIX.md"
VERSIONS = "Versions: "

# (row, column) of a cell, or (rule, "") of a rule → whether it passed.
Outcomes = Mapping[tuple[str, str], bool]


def expected() -> set[tuple[str, str]]:
    """All cells and rules of a complete run."""
    cells = {(row.id, column) for row in ROWS for column, cell in row.cells.items() if callable(cell)}
    return cells | {(rule.id, "") for rule in (*RULES, *READERS, *RECEIVERS, *PULLERS)}


def without_versions(page: str) -> str:
    """The page without the versions, which differ between machines."""
    return "\n".join(line for line in page.splitlines() if not line.startswith(VERSIONS))


def render(outcomes: Outcomes, chromium_version: str) -> str:
    """The whole page; `outcomes` are complete."""
    letters: dict[str, str] = {}

    def mark(row: str, column: str, cell: object) -> str:
        if isinstance(cell, str):
            return f"n/a {letters.setdefault(cell, _letter(len(letters)))}"
        return _mark(outcomes[row, column])

    lines = [
        "# What the official libraries do with redpoll",
        "",
        "Each mark is the outcome of a test: the unmodified library of the column against a server with two workers.",
        "The other end is a plain socket or a plain HTTP request, so that a mark is about one library only. Written by",
        "`pytest tests/matrix --write-matrix`; every complete run of the tests compares this page with its outcomes.",
        "",
        _named(_versions(chromium_version)),
        "",
        "| | " + " | ".join(column.title for column in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for row in ROWS:
        marks = (mark(row.id, column.id, row.cells[column.id]) for column in COLUMNS)
        lines.append(f"| {row.title} | " + " | ".join(marks) + " |")
    lines += ["", "Where a cell is n/a, the library", ""]
    lines += [f"- {letter}: {reason}." for reason, letter in letters.items()]
    lines += ["", "## Channels over HTTP, and redpoll-js", ""]
    lines += [
        "The texts of `useText` come from redpoll-client's `publish_stream`. Each page is in React's strict mode.",
        "",
        _named(_reader_versions()),
        "",
        "| | Client | |",
        "|---|---|---|",
    ]
    lines += [f"| {rule.title} | {rule.libraries} | {_mark(outcomes[rule.id, ''])} |" for rule in READERS]
    lines += [
        "",
        "## Batched webhooks",
        "",
        "The webhook has Pusher's format and `--batch`: a request has several events.",
        "",
        _named(_receiver_versions()),
        "",
        "| | Client | |",
        "|---|---|---|",
    ]
    lines += [f"| {rule.title} | {rule.libraries} | {_mark(outcomes[rule.id, ''])} |" for rule in RECEIVERS]
    lines += [
        "",
        "## Webhooks by pull",
        "",
        "The webhook has Pusher's format and no URL. What checks a signature has the delivery's own headers and body.",
        "",
        _named(_puller_versions()),
        "",
        "| | Client | |",
        "|---|---|---|",
    ]
    lines += [f"| {rule.title} | {rule.libraries} | {_mark(outcomes[rule.id, ''])} |" for rule in PULLERS]
    lines += [
        "",
        "## Libraries that were not run",
        "",
        "The Java, Swift, Go, PHP and Ruby libraries can't run where these tests do. What their sources require is",
        "tested on the frames and bytes that redpoll sends and accepts. So are credentials that no library supports.",
        "PHP (7.2.6) and Ruby (2.1.0) were also run by hand, from their sources: trigger, channels, and the signatures",
        "of private and presence channels.",
        "",
        "| Rule | Required by | |",
        "|---|---|---|",
    ]
    lines += [f"| {rule.title} | {rule.libraries} | {_mark(outcomes[rule.id, ''])} |" for rule in RULES]
    return "\n".join(lines) + "\n"


def _mark(passed: bool) -> str:
    return "✓" if passed else "✗ fails"


def _letter(number: int) -> str:
    return chr(ord("a") + number)


def _named(versions: Mapping[str, str]) -> str:
    return VERSIONS + ", ".join(f"{name} {number}" for name, number in versions.items()) + "."


def _npm(name: str) -> str:
    package = json.loads((Path(__file__).parents[1] / "clients" / "package.json").read_text())
    return str(package["dependencies"][name])


def _versions(chromium_version: str) -> dict[str, str]:
    return {
        "pusher-js": _npm("pusher-js"),
        "Chromium": chromium_version.partition(".")[0],
        "laravel-echo": _npm("laravel-echo"),
        "pysher": version("pysher"),
        "pusher (npm)": _npm("pusher"),
        "pusher (PyPI)": version("pusher"),
    }


def _reader_versions() -> dict[str, str]:
    npm = {name: _npm(name) for name in ("@durable-streams/client", "react")}
    return {**npm, "durable-streams (PyPI)": version("durable-streams")}


def _receiver_versions() -> dict[str, str]:
    return {"pusher (npm)": _npm("pusher"), "pusher (PyPI)": version("pusher")}


def _puller_versions() -> dict[str, str]:
    return {**_receiver_versions(), "httpx (PyPI)": version("httpx")}
