"""Runs tests/failures at full length and compares the measured figures with their goals.

    python -m bench.soak.failures                 everything (about half an hour)
    python -m bench.soak.failures redis_away      only files whose name contains one of the words

Prints each figure with its goal; `--json FILE` writes them. On a busy machine, figures may miss goals that a quiet
machine meets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.arguments import parser_of
from bench.report import machine, print_table, save

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "failures"


def files_for(words: list[str]) -> list[str]:
    """Test files whose name contains one of the words; all without words."""
    chosen = []
    for path in sorted(FOLDER.glob("test_*.py")):
        if not words or any(word in path.name for word in words):
            chosen.append(str(path))
    return chosen


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("words", nargs="*", help="parts of file names")
    options = parser.parse_args()
    files = files_for(options.words)
    if not files:
        raise SystemExit(f"no file has a name with {' or '.join(options.words)}")
    about = machine()
    print(json.dumps(about))
    with tempfile.TemporaryDirectory(prefix="rpbench") as folder:
        figures = Path(folder) / "figures"
        environment = {**os.environ, "FAILURES_FIGURES": str(figures)}
        command = [sys.executable, "-m", "pytest", "-q", "--long", *files]
        with subprocess.Popen(command, cwd=ROOT, env=environment) as tests:
            try:
                code = tests.wait()
            except BaseException:
                # They end their servers themselves.
                tests.send_signal(signal.SIGINT)
                raise
        noted = json.loads(figures.read_text()) if figures.exists() else []
    print()
    print_table(["failure", "what", "figure", "goal"], noted)
    if options.json is not None:
        save(options.json, "failures", {"rows": noted})
    raise SystemExit(code)


if __name__ == "__main__":
    main()
