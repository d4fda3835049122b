"""The form of every result of bench/: date, commit, machine, command and figures, as JSON.

`save` writes one; `bench/render.py` makes the tables of bench/README.md and README.md from those in bench/results.
Not a bench by itself.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["command_line", "machine", "save"]

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
    return shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *shown])


def save(path: Path, bench: str, figures: dict[str, Any], command: str = "", **more: Any) -> None:
    """Writes a result. `more` is beside the figures: samples over time, single runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"bench": bench, **machine(), "command": command or command_line(), "figures": figures, **more}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
