"""What benches report: a table for people, and figures with date, commit, machine and command, as JSON.

`save` writes one; `bench/compare/render.py` makes the tables of bench/README.md and README.md from those in
bench/results. Not a bench by itself.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["command_line", "machine", "percentile", "print_table", "save"]

HERE = Path(__file__).parent


def machine() -> dict[str, Any]:
    """When, at which commit, and on what: figures without these mean nothing."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "none",
        "machine": {
            "cpu": model,
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
    }


def command_line() -> str:
    """The running command, to be repeated from the root of the checkout; without the files that it writes."""
    words = iter(sys.argv[1:])
    shown = []
    for word in words:
        if word in ("--json", "--png"):
            next(words, None)
        elif not word.startswith(("--json=", "--png=")):
            shown.append(word)
    name = ".".join(Path(sys.argv[0]).resolve().relative_to(HERE.parent).with_suffix("").parts)
    return shlex.join(["python", "-m", name, *shown])


def save(path: Path, bench: str, figures: dict[str, Any], command: str = "", **more: Any) -> None:
    """Writes a result. `more` is beside the figures: samples over time, single runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"bench": bench, **machine(), "command": command or command_line(), "figures": figures, **more}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def percentile(counts: Mapping[float, int], share: float) -> float:
    """The smallest value that `share` of all don't exceed, of values and how often each came; 0 without values."""
    total, seen = sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= share * total:
            return value
    return 0.0


def print_table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A Markdown table, aligned, so that it can be pasted into a note."""
    table = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for index, row in enumerate(table):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if index == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
