"""Commands find the only app of the server by themselves."""

import json

import click
import pytest

from redpoll.cli import main
from redpoll.cli.records_command import AppCommand

# What a command needs besides the app. The others need nothing.
WORDS = {
    ("app", "set"): ["max_connections=5"],
    ("grant", "check"): ["key:a.b.c"],
    ("grant", "mint"): ["--user", "7", "--channel", "private-*"],
    ("grant", "revoke"): ["--jti", "nothing"],
    ("history", "clear"): ["news"],
    ("history", "rule", "add"): ["--prefix", "news-", "--keep", "5", "--seconds", "60"],
    ("history", "rule", "remove"): ["nothing"],
    ("history", "show"): ["news"],
    ("key", "disable"): ["nothing"],
    ("connections", "kick"): ["1.2"],
    ("connections", "show"): ["1.2"],
    ("token", "create"): ["--name", "CI", "--scope", "read"],
    ("webhook", "create"): ["https://example.com/hook"],
}


def commands_of_apps(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            found += commands_of_apps(command, (*path, name))
        elif any(isinstance(param, click.Argument) and param.name == "app_id" for param in command.params):
            found.append((*path, name))
    return found


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


# `app delete` wants the id in any case, and `usage` without an app shows all of them.
COMMANDS = [path for path in commands_of_apps(main) if path != ("app", "delete")]


def test_every_command_that_takes_an_app_is_covered():
    assert WORDS.keys() <= set(COMMANDS)
    assert all(isinstance(command_at(path), AppCommand) for path in COMMANDS if path != ("usage",))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_only_app_needs_no_name(typed, app_id, command):
    words = WORDS.get(command, [])
    without = typed(*command, *words, "--json")
    # A second rule of the same name would be refused.
    named = typed(*command, app_id, *(word.replace("news-", "more-") for word in words), "--json")
    # Some need a running server, a channel or a key, and say so.
    assert without.exit_code in (0, 1), without.stderr
    assert (without.exit_code, without.stderr) == (named.exit_code, named.stderr)


def test_of_several_apps_one_must_be_named(typed, app_id):
    other = json.loads(typed("app", "create", "other", "--json").stdout)["id"]
    result = typed("key", "list")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("this server has 2 apps: choose one with APP_ID (")
    assert {app_id, other} <= set(result.stderr.strip(")\n").replace("(", " ").replace(",", " ").split())
    changed = typed("app", "set", "max_connections=5")
    assert (changed.exit_code, "has 2 apps" in changed.stderr) == (2, True)


def test_without_an_app_there_is_none_to_find(typed):
    result = typed("key", "list")
    assert (result.exit_code, result.stderr.endswith("\nthere is no app\n")) == (2, True)


def test_what_else_is_missing_is_said(typed, app_id):
    result = typed("key", "disable")
    assert (result.exit_code, "Missing argument 'KEY'" in result.stderr) == (2, True)
