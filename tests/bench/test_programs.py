"""Every program of bench/ can be started: what it imports is there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Runs as it would from the root, without pytest's path; bench/regression isn't part of the package.
IMPORT_ALL = """
import importlib, sys, traceback
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        traceback.print_exc()
"""


def test_programs_find_what_they_import() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "bench").rglob("*.py"))
        if '__name__ == "__main__"' in path.read_text() and path.parent.name != "regression"
    ]
    assert "bench.load.publish" in names
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.stderr == ""
    assert ran.returncode == 0
