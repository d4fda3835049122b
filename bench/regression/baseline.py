"""The recorded figures of the cases, and the comparison of new ones with them.

`baseline.json` holds instruction counts for each environment in which somebody recorded them (interpreter build,
compiler, Cython, libc, msgspec), because counts are comparable only within one. For any other environment, and where
the calibration case differs, `of_commit` builds the commit that last changed `baseline.json` and counts its cases on
this machine. Times are stored as ratios to the calibration case of the same run.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import counting
import msgspec

ROOT = Path(__file__).parent.parent.parent
FILE = Path(__file__).parent / "baseline.json"
CALIBRATION = "calibration"
# Equal code gives counts within 0.3 %. Code of few instructions a cycle adds less to the count than to the time, so the
# limit is well below the 10 % that must be found.
MAX_GROWTH = 0.02
# The same calibration code gives the same count in the same environment.
MAX_CALIBRATION_DRIFT = 0.01
# Times can't show 10 % on a shared machine. They show what instructions don't: more system calls.
MAX_TIME_GROWTH = 1.0

Counts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Finding:
    """One case beside its baseline. `growth` is 0.1 for 10 % more; `functions` says in which it grew or shrank most."""

    case: str
    before: float
    now: float
    functions: list[tuple[str, float, float]]

    @property
    def growth(self) -> float:
        return self.now / self.before - 1

    @property
    def slower(self) -> bool:
        return self.growth > MAX_GROWTH

    def __str__(self) -> str:
        lines = [f"{self.case}: {self.before:,.0f} -> {self.now:,.0f} instructions ({self.growth:+.1%})"]
        lines += [f"    {name}: {before:,.0f} -> {now:,.0f}" for name, before, now in self.functions]
        return "\n".join(lines)


def interpreter() -> str:
    """What must be equal for times to be comparable: the calibration is Python, and some cases are system calls."""
    version = f"{platform.python_implementation()} {platform.python_version()} {' '.join(platform.python_build())}"
    return f"{version}, {platform.machine()}"


def environment() -> str:
    """What must be equal for counts to be comparable."""
    cc = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    try:
        import Cython

        cython = Cython.__version__
    except ImportError:
        cython = "none"
    libc = " ".join(platform.libc_ver())
    # A new release of msgspec, in which some cases spend a part of their instructions, is no change of ours.
    return f"{interpreter()}, {cc}, Cython {cython}, {libc}, msgspec {msgspec.__version__}"


def read() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"environments": {}, "times": {}}
    return recorded


def write(recorded: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def recorded_counts(now: Counts) -> Counts | None:
    """The counts recorded in this environment, if their calibration agrees with today's."""
    recorded: Counts | None = read()["environments"].get(environment())
    if recorded is None:
        return None
    drift = now[CALIBRATION]["instructions"] / recorded[CALIBRATION]["instructions"] - 1
    return recorded if abs(drift) <= MAX_CALIBRATION_DRIFT else None


def base_commit() -> str | None:
    """The commit that last changed baseline.json; None without git or its history."""
    if shutil.which("git") is None:
        return None
    command = ["git", "log", "-1", "--format=%H", "--", str(FILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def of_commit(commit: str) -> Counts:
    """Builds `commit` in build/regression and counts its own cases here. A minute; the build is reused."""
    tree = counting.BUILD / commit[:12]
    if not (tree / "built").exists():
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=tree, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (tree / "built").touch()
    return counting.count(tree)


def compare(now: Counts, before: Counts) -> list[Finding]:
    """The cases that both have, in their order; `calibration` isn't one."""
    findings = []
    for case, counted in now.items():
        if case == CALIBRATION or case not in before:
            continue
        were, are = before[case]["functions"], counted["functions"]
        # A function in one list only was or is too cheap to be in the other.
        changed = [(name, were.get(name, 0.0), are.get(name, 0.0)) for name in {*were, *are}]
        changed.sort(key=lambda item: -abs(item[2] - item[1]))
        functions = [item for item in changed[:5] if abs(item[2] - item[1]) > 0.01 * counted["instructions"]]
        findings.append(Finding(case, before[case]["instructions"], counted["instructions"], functions))
    return findings


def changed_files() -> str:
    """What changed under src and ext since the baseline was recorded, for the report of a failure."""
    commit = base_commit()
    if commit is None:
        return ""
    command = ["git", "diff", "--stat=100", commit, "--", "src", "ext"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
