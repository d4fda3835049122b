"""Runs the command `redpoll` in this process, without a server."""

import json
import os

import pytest
from click.testing import CliRunner

from redpoll.cli import main


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """`typed("app", "list")` → click's result; the data folder is `tmp_path / "data"`, the environment is
    clean.
    """
    for name in list(os.environ):
        if name.startswith(("REDPOLL_", "SOKETI_", "PUSHER_")) or name == "REDIS_URL":
            monkeypatch.delenv(name)
    monkeypatch.setenv("REDPOLL_DATA_DIR", str(tmp_path / "data"))
    umask = os.umask(0o022)

    def run(*words: str):
        return CliRunner().invoke(main, words)

    yield run
    os.umask(umask)


@pytest.fixture
def app_id(typed):
    """The id of an app that was created without a server."""
    return json.loads(typed("app", "create", "demo", "--json").stdout)["id"]


@pytest.fixture
def answering(monkeypatch):
    """`answering("history", value)`: every command of that module gets this value, as if from a server. Returns the
    list of requests."""

    def prepare(module: str, value: object) -> list[tuple[str, dict]]:
        asked = []

        def run(_settings: object, verb: str, args: dict) -> object:
            asked.append((verb, args))
            return value

        monkeypatch.setattr(f"redpoll.cli.{module}.run", run)
        return asked

    return prepare
