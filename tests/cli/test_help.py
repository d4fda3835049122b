"""The help of every command: it has examples that the command accepts, and --json. The man pages are made of it."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from redpoll.cli import main

ROOT = Path(__file__).parents[2]


def visible(command, words=()):
    yield command, words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if not child.hidden:
                yield from visible(child, (*words, name))


COMMANDS = list(visible(main))
each_command = pytest.mark.parametrize(("command", "words"), COMMANDS, ids=[" ".join(words) for _, words in COMMANDS])


def examples_in(command):
    text = command.help.partition("Examples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in text.splitlines() if line.strip()]


@each_command
def test_every_example_is_a_command_line_that_redpoll_accepts(command, words, tmp_path):
    examples = examples_in(command)
    assert examples
    backup = tmp_path / "backup.sqlite"
    backup.touch()
    for example in examples:
        name, *arguments = shlex.split(example.partition(" > ")[0])
        assert name == "redpoll"
        arguments = [str(backup) if word.endswith(".sqlite") else word for word in arguments]
        parse(main, arguments)
        if not isinstance(command, click.Group):
            assert tuple(arguments[: len(words)]) == words


def parse(command, arguments):
    """Parses the arguments as click does, without running the command. Raises click.UsageError."""
    context = click.Context(command, info_name="redpoll")
    if isinstance(command, click.Group):
        if arguments:
            _, child, rest = command.resolve_command(context, arguments)
            parse(child, rest)
    else:
        command.parse_args(context, arguments)


@each_command
def test_every_command_prints_json(command, words):
    if not isinstance(command, click.Group) and words != ("serve",):
        assert any("--json" in parameter.opts for parameter in command.params)


@each_command
def test_the_help_is_shown(command, words):
    result = CliRunner().invoke(main, [*words, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.stdout


def test_a_man_page_for_every_command(tmp_path):
    subprocess.run([sys.executable, ROOT / "deploy" / "build-man", tmp_path], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"-".join(("redpoll", *words)) + ".1" for _, words in COMMANDS}
    page = (tmp_path / "redpoll-publish.1").read_text()
    for part in (".SH SYNOPSIS", ".SH EXAMPLES", "\\-\\-socket\\-id", ".SH EXIT STATUS"):
        assert part in page
    if shutil.which("groff"):
        pages = sorted(map(str, tmp_path.iterdir()))
        made = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-z", *pages], capture_output=True, text=True, check=True
        )
        assert made.stderr == ""
