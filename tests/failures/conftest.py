"""The failures of deploy/failures.md, in two lengths: short in CI, long by `python -m bench.soak.failures`.

`size(short, long)` is the amount for this run. `within_s(figure)` is the time allowed: the figure itself in the long
form, a minute in CI, where other work shares the machine. `figures` collects measurements.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.lengths import is_long
from helpers.server import Server

if TYPE_CHECKING:
    from conftest import RedisServer

CI_PATIENCE_S = 60.0


@pytest.fixture
def size() -> Callable[[int, int], int]:
    return lambda short, long: long if is_long() else short


@pytest.fixture
def within_s() -> Callable[[float], float]:
    return lambda figure: figure if is_long() else max(CI_PATIENCE_S, figure)


@dataclass
class Figures:
    """Measurements: (heading of deploy/failures.md, what, unit, goal) → values, one per repetition."""

    noted: dict[tuple[str, str, str, str], list[float]] = field(default_factory=dict)

    def note(self, failure: str, what: str, value: float, unit: str, goal: str = "") -> None:
        self.noted.setdefault((failure, what, unit, goal), []).append(value)

    def table(self) -> list[list[str]]:
        """Rows of text: failure, what, figure, goal. Repetitions are shown as minimum, median and maximum."""
        rows = []
        for (failure, what, unit, goal), values in self.noted.items():
            shown = [min(values), statistics.median(values), max(values)] if len(values) > 1 else values
            figure = " / ".join(f"{value:.3g}" for value in shown) + f" {unit}"
            rows.append([failure, what, figure + (f" of {len(values)}" if len(values) > 1 else ""), goal])
        return sorted(rows, key=lambda row: row[0])


_figures = Figures()


@pytest.fixture
def figures() -> Figures:
    return _figures


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the figures as a table, and writes them as JSON if bench/soak/failures.py asks for it."""
    table = _figures.table()
    if table:
        terminalreporter.section("figures of deploy/failures.md" + ("" if is_long() else " (short form)"))
        for failure, what, figure, goal in table:
            terminalreporter.write_line(f"{failure}: {what}: {figure}" + (f"  (goal {goal})" if goal else ""))
    target = os.environ.get("FAILURES_FIGURES")
    if target:
        Path(target).write_text(json.dumps(table, indent=1) + "\n")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Three workers on an embedded Redis; four in the long form. Each test uses its own channels."""
    with Server(workers=4 if is_long() else 3) as running:
        yield running


@pytest.fixture(scope="module")
def redis_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that a module's servers share, and that its tests kill, pause and start again."""
    from conftest import RedisServer

    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    yield redis
    redis.kill()
