"""`redpoll backup` and `restore`, without a server and beside a running one."""

import asyncio
import contextlib
import json
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.certs import self_signed
from helpers.server import Server
from helpers.wire import Api, Socket, eventually
from redpoll.cli import backup
from redpoll.config import data_files
from redpoll.config.data_files import is_own_file
from redpoll.ipc.command_socket import CommandError, ask, socket_path


def test_what_changed_since_the_backup_is_gone_after_the_restore(typed, app_id, tmp_path):
    file = tmp_path / "saved.sqlite"
    saved = json.loads(typed("backup", str(file), "--json").stdout)
    assert saved == {"file": str(file), "bytes": file.stat().st_size}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "saved.sqlite"]
    later = json.loads(typed("app", "create", "later", "--json").stdout)
    restored = typed("restore", str(file))
    assert (restored.exit_code, restored.stdout.startswith("restored to")) == (0, True), restored.stderr
    assert [row["id"] for row in json.loads(typed("app", "list", "--json").stdout)] == [app_id]
    before = tmp_path / "data" / "redpoll.sqlite.before-restore"
    with sqlite3.connect(before) as database:
        assert {row[0] for row in database.execute("SELECT id FROM apps")} == {app_id, later["id"]}
    database.close()


def test_a_backup_is_replaced_only_by_force(typed, app_id, tmp_path):
    file = tmp_path / "saved.sqlite"
    for words, code in (((), 0), ((), 2), (("--force",), 0)):
        assert typed("backup", str(file), *words).exit_code == code


def test_backups_to_one_file_at_a_time_do_not_disturb_each_other(typed, app_id, tmp_path, monkeypatch):
    file = tmp_path / "saved.sqlite"
    words = [sys.executable, "-m", "redpoll", "backup", str(file), "--data-dir", str(tmp_path / "data")]
    copy_database = backup.copy_database

    def copy_while_another_does(source: Path, target: Path) -> None:
        copy_database(source, target)
        subprocess.run(words, check=True, capture_output=True)

    monkeypatch.setattr(backup, "copy_database", copy_while_another_does)
    result = typed("backup", str(file))
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "saved.sqlite"]


def test_a_backup_replaces_no_file_that_a_server_uses(typed, app_id, tmp_path):
    data = tmp_path / "data"
    (tmp_path / "link").symlink_to(data / "redpoll.sqlite")
    (tmp_path / "hard").hardlink_to(data / "redpoll.sqlite")
    (tmp_path / "folder").symlink_to(data)
    (data / "redis").mkdir()
    refused = [data / name for name in ("redpoll.sqlite", "redpoll.sqlite-wal", "events.sqlite", "charts.sqlite-shm")]
    refused += [data / name for name in ("lock", "tls.pem", "first-login", "records-in-postgresql", "redis/dump.rdb")]
    refused += [tmp_path / name for name in ("link", "hard", "folder/redpoll.sqlite", "data/../data/redpoll.sqlite")]
    before = (data / "redpoll.sqlite").stat()
    for file in refused:
        result = typed("backup", str(file), "--force")
        assert (result.exit_code, "that a server itself uses" in result.stderr) == (2, True), file
    assert (data / "redpoll.sqlite").stat().st_ino == before.st_ino
    assert (data / "redpoll.sqlite").stat().st_size == before.st_size
    assert typed("backup", str(data / "today.sqlite")).exit_code == 0
    assert typed("backup", str(data / "today.sqlite"), "--force").exit_code == 0


def test_a_backup_replaces_no_record_store_of_another_server(typed, app_id, tmp_path):
    other = tmp_path / "other"
    assert typed("app", "create", "other", "--data-dir", str(other)).exit_code == 0
    result = typed("backup", str(other / "redpoll.sqlite"), "--force")
    assert (result.exit_code, "that a server itself uses" in result.stderr) == (2, True)
    (tmp_path / "backups").mkdir()
    assert typed("backup", str(tmp_path / "backups" / "redpoll.sqlite")).exit_code == 0


def test_a_backup_replaces_nothing_in_the_folder_of_a_running_server(typed, tmp_path):
    cert, key = self_signed(tmp_path)
    with Server(workers=1, tls_port=0, tls_cert=cert, tls_key=key) as server:
        data = server.folder / "data"
        names = {path.name for path in data.iterdir()}
        assert {"redpoll.sqlite-wal", "events.sqlite", "charts.sqlite", "control.sock", "tls.pem"} <= names
        assert [name for name in sorted(names) if not is_own_file(data / name, data)] == []
        committed = json.loads(typed("app", "create", "committed", "--json", "--data-dir", str(data)).stdout)
        refused = typed("backup", str(data / "redpoll.sqlite"), "--force", "--data-dir", str(data))
        assert refused.exit_code == 2
        server.stop()
        assert typed("app", "show", committed["id"], "--data-dir", str(data)).exit_code == 0


def test_a_backup_without_an_app_says_so(typed, tmp_path):
    """A command in a wrong folder has made a record store there, which is saved without a fault."""
    typed("app", "list")
    file = tmp_path / "saved.sqlite"
    saved = typed("backup", str(file))
    assert (saved.exit_code, f"{tmp_path / 'data' / 'redpoll.sqlite'} has no app" in saved.stderr) == (0, True)
    typed("app", "create", "shop")
    assert typed("backup", str(file), "--force").stderr == ""


def test_without_records_there_is_no_backup(typed, tmp_path):
    result = typed("backup", str(tmp_path / "saved.sqlite"))
    assert (result.exit_code, "no record store" in result.stderr) == (1, True)


def test_a_folder_that_cannot_be_looked_at_gets_one_sentence(typed, tmp_path):
    result = typed("backup", str(tmp_path / "saved.sqlite"), "--data-dir", str(tmp_path / ("a" * 300)))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.exception


def test_a_damaged_record_store_can_be_restored(typed, app_id, tmp_path):
    file = tmp_path / "saved.sqlite"
    typed("backup", str(file))
    (tmp_path / "data" / "redpoll.sqlite").write_bytes(b"damaged" * 1000)
    assert typed("backup", str(tmp_path / "again.sqlite")).exit_code == 1
    assert typed("restore", str(file)).exit_code == 0
    assert json.loads(typed("app", "list", "--json").stdout)[0]["id"] == app_id


@pytest.mark.parametrize("content", [b"", b"not a database, but text" * 100])
def test_what_is_no_backup_changes_nothing(typed, app_id, tmp_path, content):
    file = tmp_path / "wrong.sqlite"
    file.write_bytes(content)
    result = typed("restore", str(file))
    assert (result.exit_code, "the restore failed" in result.stderr) == (1, True)
    assert json.loads(typed("app", "list", "--json").stdout)[0]["id"] == app_id


def migrate_further(file):
    """As a newer redpoll does whose tables this one can't use."""
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.execute("UPDATE meta SET value = '9998' WHERE name = 'compatible'")
        database.execute("UPDATE meta SET value = '99.0' WHERE name = 'migrated_by'")
        database.commit()


def test_a_backup_of_a_newer_redpoll_changes_nothing(typed, app_id, tmp_path):
    file = tmp_path / "saved.sqlite"
    typed("backup", str(file))
    migrate_further(file)
    result = typed("restore", str(file))
    assert result.exit_code == 1
    assert f"the record store {file} was migrated by redpoll 99.0" in result.stderr
    assert json.loads(typed("app", "list", "--json").stdout)[0]["id"] == app_id
    assert sorted(path.name for path in (tmp_path / "data").glob("*.*.*")) == []


async def test_a_server_is_backed_up_while_it_runs_and_serves_the_restored_records(typed, tmp_path):
    file = tmp_path / "saved.sqlite"
    with Server(workers=1) as server:
        where = ("--data-dir", str(server.folder / "data"))
        assert typed("backup", str(file), *where).exit_code == 0
        later = json.loads(typed("app", "create", "later", "--json", *where).stdout)
        server.stop()
        assert typed("restore", str(file), *where).exit_code == 0
        server.start()
        client = await Socket.connect(server)
        client.abort()
        gone = typed("app", "show", later["id"], *where)
        assert (gone.exit_code, later["id"] in gone.stderr) == (1, True)
        key = server.app_key
        server.app_key = later["key"]
        with pytest.raises(ConnectionError, match="4001"):
            await Socket.connect(server)
        server.app_key = key


async def test_channels_are_where_they_were_after_a_restore_into_an_empty_folder(typed, tmp_path, redis):
    file = tmp_path / "saved.sqlite"
    rule = ("--prefix", "stored-", "--keep", "10", "--seconds", "3600")
    with Server(workers=1, redis_url=redis.url) as server:
        where = ("--data-dir", str(server.folder / "data"))
        assert typed("history", "rule", "add", server.app_id, *rule, *where).exit_code == 0
        async with Api(server) as api:
            await api.publish("stored-a", "before", "{}")
        assert typed("backup", str(file), *where).exit_code == 0
        keys = server.keys()
        server.stop()
        for path in (server.folder / "data").glob("redpoll.sqlite*"):
            path.unlink()
        assert typed("restore", str(file), *where).exit_code == 0
        server.start()
        assert server.keys().history(server.app_id, "stored-a") == keys.history(server.app_id, "stored-a")
        async with Api(server) as api:
            found = await api.get("/channels/stored-a/history")
        assert [message["event"] for message in found["messages"]] == ["before"]


async def test_a_running_server_takes_restored_records_and_keeps_its_connections(typed, tmp_path):
    file, other = tmp_path / "saved.sqlite", tmp_path / "other.sqlite"
    for words in (("app", "create", "demo"), ("backup", str(other))):
        assert (await asyncio.to_thread(typed, *words)).exit_code == 0
    with Server(workers=1) as server:
        where = ("--data-dir", str(server.folder / "data"))

        async def run(*words):
            return await asyncio.to_thread(typed, *words, *where)

        assert (await run("backup", str(file))).exit_code == 0
        later = json.loads((await run("app", "create", "later", "--json")).stdout)
        client = await Socket.connect(server)
        await client.subscribe("room")
        lost = await Socket.connect(server, key=later["key"])
        restored = await run("restore", str(file))
        assert (restored.exit_code, restored.stdout.startswith("restored to")) == (0, True), restored.stderr
        assert [row["id"] for row in json.loads((await run("app", "list", "--json")).stdout)] == [server.app_id]
        assert await lost.until_closed() == 4001
        async with Api(server) as api:
            event = {"name": "again", "channels": ["room"], "data": "{}"}

            async def published() -> int:
                return (await api.ask("POST", "/events", event))[0]

            await eventually(published, 200)
        await client.next("again")
        client.abort()
        refused = await run("restore", str(other))
        assert (refused.exit_code, "a backup of another server" in refused.stderr) == (1, True)
        migrate_further(file)
        refused = await run("restore", str(file))
        assert (refused.exit_code, "was migrated by redpoll 99.0" in refused.stderr) == (1, True)
        other.write_bytes(b"damaged" * 1000)
        refused = await run("restore", str(other))
        assert (refused.exit_code, "the restore failed" in refused.stderr) == (1, True)
        assert sorted(path.name for path in (server.folder / "data").glob("*.partial*")) == []


async def test_the_server_has_the_file_before_it_answers_so_the_command_may_end(typed, tmp_path):
    file = tmp_path / "saved.sqlite"
    with Server(workers=1) as server:
        data = server.folder / "data"
        for words in (("backup", str(file)), ("app", "create", "later")):
            assert (await asyncio.to_thread(typed, *words, "--data-dir", str(data))).exit_code == 0
        given = data / "given.partial"
        backup.copy_database(file, given)
        backup._raise_directory_version(given)
        await asyncio.to_thread(ask, socket_path(data), "server restore", {"file": str(given)})
        assert not given.exists()

        async def apps() -> list[str]:
            try:
                return [row["id"] for row in await asyncio.to_thread(ask, socket_path(data), "app list", {})]
            except (OSError, CommandError):
                return []

        await eventually(apps, [server.app_id])
        assert {path.name for path in data.glob("redpoll.sqlite.*")} == {"redpoll.sqlite.before-restore"}
        with pytest.raises(CommandError, match="can't be put in place"):
            await asyncio.to_thread(ask, socket_path(data), "server restore", {"file": str(given)})


@pytest.mark.parametrize(("command", "tool"), [("backup", "pg_dump"), ("restore", "pg_restore")])
def test_records_in_postgres_are_left_to_its_own_tools(typed, app_id, tmp_path, monkeypatch, command, tool):
    file = tmp_path / "saved.sqlite"
    typed("backup", str(file))
    monkeypatch.setenv("REDPOLL_DATABASE_URL", "postgresql://redpoll:hunter2@db/redpoll")
    result = typed(command, str(file), *(["--force"] if command == "backup" else []))
    assert (result.exit_code, tool in result.stderr, "hunter2" in result.stderr) == (1, True, False)


@pytest.mark.parametrize(("command", "tool"), [("backup", "pg_dump"), ("restore", "pg_restore")])
def test_an_old_record_store_is_left_alone_when_the_records_are_in_postgres(typed, app_id, tmp_path, command, tool):
    file = tmp_path / "saved.sqlite"
    typed("backup", str(file))
    data_files.note_postgres(tmp_path / "data", "PostgreSQL at db/redpoll")
    before = [(path.read_bytes()) for path in (file, tmp_path / "data" / "redpoll.sqlite")]
    result = typed(command, str(file), *(["--force"] if command == "backup" else []))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "are in PostgreSQL at db/redpoll: " in result.stderr
    assert tool in result.stderr
    assert [(path.read_bytes()) for path in (file, tmp_path / "data" / "redpoll.sqlite")] == before


def test_root_restores_with_the_rights_of_the_folders_owner(typed, foreign, tmp_path, monkeypatch):
    file, victim = tmp_path / "saved.sqlite", tmp_path / "victim"
    assert typed("app", "create", "demo").exit_code == 0
    # The backup is in a folder that the owner of the data folder can't enter.
    assert typed("backup", str(file)).exit_code == 0
    assert (file.stat().st_uid, tmp_path.stat().st_mode & 0o077) == (0, 0)
    victim.write_text("root's")
    raise_version = backup._raise_directory_version

    def interfered(partial):
        raise_version(partial)
        # What the owner's process may do at this moment.
        partial.unlink()
        partial.symlink_to(victim)

    monkeypatch.setattr(backup, "_raise_directory_version", interfered)
    typed("restore", str(file))
    assert (victim.stat().st_uid, victim.read_text()) == (0, "root's")
    (foreign / "redpoll.sqlite").unlink()
    monkeypatch.setattr(backup, "_raise_directory_version", raise_version)
    restored = typed("restore", str(file))
    assert restored.exit_code == 0, restored.output
    assert {path.name: path.lstat().st_uid for path in foreign.iterdir()}["redpoll.sqlite"] == 65_534
