"""The Dockerfile and the compose file: hadolint accepts the first, and both agree with the rest of the repository."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from redpoll.cli import main
from redpoll.settings import VARIABLES, Settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = (ROOT / "deploy" / "compose.yaml").read_text()
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint")
def test_hadolint_finds_no_fault():
    done = subprocess.run([str(HADOLINT), str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert done.returncode == 0


def test_dockerfile_uses_settings_commands_and_ports_that_exist():
    text = DOCKERFILE.read_text()
    assert set(re.findall(r"REDPOLL_[A-Z_]+", text)) <= VARIABLES
    assert f"EXPOSE {Settings().port} {Settings().control_port}" in text
    for words in re.findall(r'^(?:HEALTHCHECK .*\n\s+)?CMD \["(?:redpoll", ")?([a-z]+)"', text, re.MULTILINE):
        assert words in main.commands


def test_what_the_image_is_built_from_is_not_ignored():
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    shown = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for line in sources for name in line.split()} == shown
    assert all((ROOT / name).exists() for name in shown)


def test_compose_publishes_the_control_port_on_loopback_only():
    ports = re.findall(r'^\s+- "([0-9.:]+)"$', COMPOSE, re.MULTILINE)
    assert ports == [f"{Settings().port}:{Settings().port}", f"127.0.0.1:{Settings().control_port}:9601"]
    assert "read_only: true" in COMPOSE
