"""`python -m redpoll`, as the supervisor starts its children."""

import os
import subprocess
import sys
from pathlib import Path

import redpoll


def test_the_module_is_the_command(tmp_path):
    """Also from a folder whose files have the names of our dependencies."""
    (tmp_path / "redis.py").write_text("raise SystemExit('the wrong redis')")
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "redpoll", "version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(redpoll.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.startswith("redpoll ")
