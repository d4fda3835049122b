"""An installation without the engine, as macOS and Windows have it. tests/deploy/pure_wheel.py does it in a clean
environment."""

import os
import sys
import zipfile
from pathlib import Path

import click
from click.testing import CliRunner

from deploy.pure_wheel import build, use
from redpoll import cli
from redpoll.cli import main
from redpoll.config import engine


def test_the_wheel_without_the_engine_works(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".so", ".pyx"))]
        archive.extractall(unpacked)
    use(sys.executable, wheel, {**os.environ, "PYTHONPATH": str(unpacked)})


def test_the_sentence_names_the_system_and_the_image(monkeypatch) -> None:
    for module in (engine, cli):
        monkeypatch.setattr(module, "has_engine", lambda: False)
    for platform, words in (("darwin", "on macOS, run"), ("win32", "on Windows, run"), ("linux", "sdist")):
        monkeypatch.setattr(sys, "platform", platform)
        result = CliRunner().invoke(main, ["app", "list"])
        assert (result.exit_code, words in result.stderr) == (1, True), result.stderr
        assert result.stderr.count("\n") == 1


def test_commands_that_run_everywhere_exist() -> None:
    context = click.Context(main)
    for words in cli.EVERYWHERE:
        command: click.Command | None = main
        for word in words.split():
            assert isinstance(command, click.Group)
            command = command.get_command(context, word)
        assert command is not None, words
