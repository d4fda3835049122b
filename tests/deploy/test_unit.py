"""The systemd unit: systemd accepts it, and its sandbox is as tight as deploy/README.md says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "redpoll.service"

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def analyze(*words: str) -> str:
    done = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@needs_systemd
def test_systemd_understands_every_line(tmp_path):
    # Commands that exist here, in place of those of an installed redpoll.
    text = UNIT.read_text().replace("/opt/redpoll/.venv/bin/redpoll", shutil.which("true") or "/bin/true")
    (tmp_path / "redpoll.service").write_text(text)
    said = [line for line in analyze("verify", str(tmp_path / "redpoll.service")).splitlines() if "redpoll" in line]
    assert said == []


@needs_systemd
def test_exposure_is_what_the_manual_states():
    stated = re.search(r"`systemd-analyze security`: ([0-9.]+)", (DEPLOY / "README.md").read_text())
    found = re.search(
        r"exposure level for redpoll.service: ([0-9.]+)", analyze("security", "--offline=true", str(UNIT))
    )
    assert stated
    assert found
    assert float(found[1]) <= float(stated[1])


def test_one_process_without_memory_doesnt_end_the_server():
    """The supervisor starts it again. By default systemd would stop the whole unit."""
    assert "OOMPolicy=continue" in UNIT.read_text().splitlines()


def test_a_slow_start_isnt_killed():
    """A large Redis takes longer to load than systemd's default of 90 s, and the server waits for PostgreSQL."""
    assert "TimeoutStartSec=infinity" in UNIT.read_text().splitlines()


def test_a_start_that_fails_is_tried_again_for_as_long_as_it_takes():
    """Docker and Kubernetes do so too. By default systemd gives up after five starts in 10 s, although a full disk or a
    port in use may pass."""
    lines = UNIT.read_text().splitlines()
    assert "Restart=on-failure" in lines
    assert "StartLimitIntervalSec=0" in lines


def exit_code(command: str, folder: Path, *words: str) -> int:
    line = [sys.executable, "-P", "-m", "redpoll", command, "--data-dir", str(folder / "data"), *words]
    return subprocess.run(line, capture_output=True, timeout=60, check=False).returncode


@pytest.mark.parametrize(
    "words",
    [
        ("--tls-port", "0", "--tls-cert", "none.pem", "--tls-key", "none.key"),
        ("--redis-url", "rediss://127.0.0.1:1", "--redis-ca-file", "none.pem"),
    ],
)
def test_a_file_that_cannot_be_read_yet_is_tried_again(tmp_path, words):
    assert exit_code("serve", tmp_path, *words) == 1
    assert exit_code("check-config", tmp_path, *words) == 2
    assert exit_code("serve", tmp_path, *words, "--port", "x") == 2


def test_wrong_settings_are_not_tried_again(tmp_path):
    lines = UNIT.read_text().splitlines()
    assert f"RestartPreventExitStatus={exit_code('serve', tmp_path, '--port', 'x')}" in lines
    # After a failed ExecStartPre systemd starts the unit again, whatever its exit code is.
    assert not any(line.startswith("ExecStartPre=") for line in lines)
