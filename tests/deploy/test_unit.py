"""The systemd unit: systemd accepts it, and its sandbox is as tight as deploy/README.md says."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "redpoll.service"

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def analyze(*words: str) -> str:
    done = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_systemd_understands_every_line(tmp_path):
    # Commands that exist here, in place of those of an installed redpoll.
    text = UNIT.read_text().replace("/opt/redpoll/.venv/bin/redpoll", shutil.which("true") or "/bin/true")
    (tmp_path / "redpoll.service").write_text(text)
    said = [line for line in analyze("verify", str(tmp_path / "redpoll.service")).splitlines() if "redpoll" in line]
    assert said == []


def test_exposure_is_what_the_manual_states():
    stated = re.search(r"`systemd-analyze security`: ([0-9.]+)", (DEPLOY / "README.md").read_text())
    found = re.search(
        r"exposure level for redpoll.service: ([0-9.]+)", analyze("security", "--offline=true", str(UNIT))
    )
    assert stated
    assert found
    assert float(found[1]) <= float(stated[1])
