"""MATRIX.md: the page that tells which official library does what with redpoll, written from what a run saw.

Not a test. It says nothing of its own: rows, columns, reasons and rules are those of features.py and rules.py, and a
mark is the outcome of a test. `pytest tests/matrix --write-matrix` writes it; every other complete run holds the page
in the repository to what it saw.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from matrix.features import ROWS
from matrix.libraries import COLUMNS
from matrix.rules import RULES

PAGE = Path(__file__).parents[2] / "MATRIX.md"
VERSIONS = "Versions of the last run: "

# (row, column) of a cell, or (rule, "") of a rule → whether it passed.
Outcomes = Mapping[tuple[str, str], bool]


def expected() -> set[tuple[str, str]]:
    """Everything that a complete run runs."""
    cells = {(row.id, column) for row in ROWS for column, cell in row.cells.items() if callable(cell)}
    return cells | {(rule.id, "") for rule in RULES}


def without_versions(page: str) -> str:
    """A page without what another machine's Chromium changes."""
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
        "Each mark is a test that ran: the library of the column, unmodified, against a whole server with two workers.",
        "The other end is a bare socket or a bare HTTP request, so that a mark speaks of one library only. Written by",
        "`pytest tests/matrix --write-matrix`; every run of the tests holds this page to what it saw.",
        "",
        VERSIONS + ", ".join(f"{name} {number}" for name, number in _versions(chromium_version).items()) + ".",
        "",
        "| | " + " | ".join(column.title for column in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for row in ROWS:
        marks = (mark(row.id, column.id, row.cells[column.id]) for column in COLUMNS)
        lines.append(f"| {row.title} | " + " | ".join(marks) + " |")
    lines += ["", "Where a library can't (n/a):", ""]
    lines += [f"- {letter}: {reason}." for reason, letter in letters.items()]
    lines += [
        "",
        "## Libraries that were not run",
        "",
        "The Java, Swift, Go, PHP and Ruby libraries can't run where these tests do. What is known of each, from its",
        "source, is asserted on the frames and bytes that redpoll sends and takes. So are the ways in that no library",
        "has.",
        "",
        "| Rule | Whose | |",
        "|---|---|---|",
    ]
    lines += [f"| {rule.title} | {rule.libraries} | {_mark(outcomes[rule.id, ''])} |" for rule in RULES]
    return "\n".join(lines) + "\n"


def _mark(passed: bool) -> str:
    return "✓" if passed else "✗ fails"


def _letter(number: int) -> str:
    return chr(ord("a") + number)


def _versions(chromium_version: str) -> dict[str, str]:
    package = json.loads((Path(__file__).parents[1] / "clients" / "package.json").read_text())
    npm = {name: package["dependencies"][name] for name in ("pusher-js", "laravel-echo", "pusher")}
    return {
        "pusher-js": npm["pusher-js"],
        "Chromium": chromium_version.partition(".")[0],
        "laravel-echo": npm["laravel-echo"],
        "pysher": version("pysher"),
        "pusher (npm)": npm["pusher"],
        "pusher (PyPI)": version("pusher"),
    }
