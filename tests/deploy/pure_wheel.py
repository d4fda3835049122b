"""Builds the wheel without the engine, which macOS and Windows get, and uses it.

The command `python tests/deploy/pure_wheel.py` installs it into a clean environment with what pip installs beside it
(about a minute). tests/cli/test_engine.py uses it without that, in the suite.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "MANIFEST.in", "src")

# What is to work without the engine. `blocked` are modules that other systems don't have, or that pip installs on Linux
# only: importing one fails.
USE = r"""
import asyncio, json, os, socket, sys, urllib.request
blocked = set(sys.argv[1:])
# Only Linux has it. Python 3.13 asks it here, and counts like this where it is missing.
del os.sched_getaffinity
os.process_cpu_count = os.cpu_count

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder)
from click.testing import CliRunner
from redpoll.cli import main
from redpoll.testing import FakeServer

def run(*words, code=0):
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code, (words, result.output, result.exception)
    return result.output

run("version")
run("check-config")
run("completion", "bash")
run("serve", "--help")
said = run("serve", code=1)
assert said.count("\n") == 1 and "redpoll serve needs" in said, said
for words in (["app", "list"], ["doctor"], ["publish", "a", "b", "c"], ["openapi"], ["backup", "x"]):
    assert "needs" in run(*words, code=1), words
for words in (["webhook", "test", "x"], ["webhook", "listen", "x"]):
    assert "needs" in run(*words, code=1), words
with FakeServer() as server:
    assert "FAIL" not in run("doctor", server.url, "--patience", "0")
    run("publish", "news", "hello", '{"n":1}', "--url", server.pusher_url)
    assert server.assert_published("hello", "news").json == {"n": 1}
    run("channels", "--url", server.pusher_url)
    # The fake server has no such route.
    assert "refused" in run("webhook", "listen", "--url", server.pusher_url, "--", sys.executable, code=1)
print("the wheel works")
"""

# Of ext/, and of Unix: they don't exist elsewhere.
UNIX_ONLY = ("fcntl", "grp", "pwd", "resource", "termios")


def build(folder: Path) -> Path:
    """The wheel, in `folder`. Needs setuptools; Cython is not used."""
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    environment = {**os.environ, "REDPOLL_PURE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(command, cwd=tree, env=environment, check=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    return wheel


def linux_only(wheel: Path) -> list[str]:
    """The modules of the packages that pip installs on Linux only."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    names = re.findall(r"^Requires-Dist: ([\w-]+).*; sys_platform == \"linux\"$", text, re.MULTILINE)
    assert "uvloop" in names
    return [{"argon2-cffi": "argon2"}.get(name, name.replace("-", "_")) for name in names]


def use(python: str, wheel: Path, environment: dict[str, str] | None = None) -> None:
    """Runs what is to work. Raises AssertionError with what it printed."""
    command = [python, "-c", USE, *linux_only(wheel), *UNIX_ONLY]
    done = subprocess.run(command, env=environment, cwd=wheel.parent, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("the wheel works\n"), done.stdout + done.stderr


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        python = str(folder / "venv" / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "-q", f"{wheel}[testing]"], check=True)
        use(python, wheel)
        print(f"{wheel.name} works in a clean environment of Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
