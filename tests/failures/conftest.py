"""Failures as failures.md lists them, in two lengths: short in CI, long by `python bench/failures.py`.

`size(short, long)` gives the amount for the length of this run. `within_s(figure)` is the time allowed: the
figure itself in the long form, ten times as much in CI, where the machine is anybody's. `figures` keeps what
was measured.
"""

import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from server import Server

LONG = os.environ.get("REDPOLL_LONG") == "1"
CI_PATIENCE = 10


@pytest.fixture
def size() -> Callable[[int, int], int]:
    return lambda short, long: long if LONG else short


@pytest.fixture
def within_s() -> Callable[[float], float]:
    return lambda figure: figure if LONG else CI_PATIENCE * figure


@dataclass
class Figures:
    """What the tests measured: (row of failures.md, what, unit, goal) → values, one for each repetition."""

    noted: dict[tuple[str, str, str, str], list[float]] = field(default_factory=dict)

    def note(self, row: int, what: str, value: float, unit: str, goal: str = "") -> None:
        self.noted.setdefault((str(row), what, unit, goal), []).append(value)

    def table(self) -> list[list[str]]:
        """Rows of text: row, what, figure, goal. Repetitions are told as least, median and greatest."""
        rows = []
        for (row, what, unit, goal), values in self.noted.items():
            told = [min(values), statistics.median(values), max(values)] if len(values) > 1 else values
            figure = " / ".join(f"{value:.3g}" for value in told) + f" {unit}"
            rows.append([row, what, figure + (f" of {len(values)}" if len(values) > 1 else ""), goal])
        return sorted(rows, key=lambda row: int(row[0]))


_figures = Figures()


@pytest.fixture
def figures() -> Figures:
    return _figures


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures as a table; and as JSON where bench/failures.py asks for it."""
    table = _figures.table()
    if table:
        terminalreporter.section("figures of failures.md" + ("" if LONG else " (short form)"))
        for row, what, figure, goal in table:
            terminalreporter.write_line(f"row {row:>2}  {what}: {figure}" + (f"  (goal {goal})" if goal else ""))
    target = os.environ.get("REDPOLL_FIGURES")
    if target:
        Path(target).write_text(json.dumps(table, indent=1) + "\n")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Four workers on an embedded Redis. Tests of one module use channels of their own."""
    with Server(workers=4) as running:
        yield running
