"""`redpoll migrate`: shows and runs the migrations of the record store."""

import json
import sqlite3

import pytest
from alembic import command
from sqlalchemy import create_engine

from redpoll.host import datafolder
from redpoll.store import migrating
from redpoll.store.schema import NEWEST


@pytest.fixture
def old_store(tmp_path):
    """A record store as redpoll left it two migrations ago."""
    file = tmp_path / "data" / "redpoll.sqlite"
    file.parent.mkdir(mode=0o700)
    engine = create_engine(f"sqlite:///{file}")
    with engine.begin() as connection:
        config = migrating._config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0005")
    engine.dispose()
    return file


def test_missing_migrations_are_shown_then_applied(typed, old_store):
    before = old_store.read_bytes()
    shown = typed("migrate", "--check")
    assert (shown.exit_code, old_store.read_bytes()) == (1, before)
    assert shown.stdout.splitlines()[0].startswith("missing  0006  ")
    assert "is at revision 0005" in shown.stderr
    applied = json.loads(typed("migrate", "--json").stdout)
    assert (applied["revision"], applied["missing"]) == (NEWEST, [])
    assert [one["revision"] for one in applied["applied"]][:2] == ["0006", "0007"]
    again = typed("migrate")
    assert (again.exit_code, again.stdout) == (0, f"{old_store} is up to date (revision {NEWEST})\n")
    assert typed("app", "create", "demo").exit_code == 0


def test_a_store_that_does_not_exist_is_not_created_by_the_check(typed, tmp_path):
    checked = typed("migrate", "--check")
    assert (checked.exit_code, "doesn't exist yet" in checked.stderr) == (1, True)
    assert not (tmp_path / "data").exists()
    assert typed("migrate").exit_code == 0
    assert typed("migrate", "--check").exit_code == 0


def test_a_store_in_use_is_checked_but_not_migrated(typed, old_store):
    with datafolder.lock(old_store.parent, "serve"):
        assert "missing  0006" in typed("migrate", "--check").stdout
        refused = typed("migrate")
    assert (refused.exit_code, "it migrates at its start" in refused.stderr) == (1, True)


def test_a_store_of_a_newer_redpoll_is_refused(typed, app_id, tmp_path):
    with sqlite3.connect(tmp_path / "data" / "redpoll.sqlite") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.execute("UPDATE meta SET value = '9999' WHERE name = 'compatible'")
    for words in (("migrate",), ("migrate", "--check")):
        refused = typed(*words)
        assert (refused.exit_code, "install the newer one" in refused.stderr) == (1, True)


def test_postgres_is_migrated_without_the_lock_of_the_data_folder(typed, tmp_path, postgres_server, monkeypatch):
    name = postgres_server.create_database(empty=True)
    monkeypatch.setenv("REDPOLL_DATABASE_URL", postgres_server.url(name))
    assert typed("migrate", "--check").exit_code == 1
    with datafolder.lock(tmp_path / "data", "serve"):
        assert typed("migrate").exit_code == 0
    assert json.loads(typed("migrate", "--check", "--json").stdout)["revision"] == NEWEST
    postgres_server.drop_database(name)
