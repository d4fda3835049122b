"""`redpoll store copy`: an existing server's records move to another database."""

import contextlib
import json
import sqlite3
import stat

import pytest

from helpers.server import Server, ServerFailed
from redpoll.config import data_files
from redpoll.host import datafolder
from redpoll.store.postgres import described


def test_records_move_to_postgres_and_the_next_server_finds_them(typed, app_id, tmp_path, postgres_url, monkeypatch):
    file = tmp_path / "data" / "redpoll.sqlite"
    # The command checkpoints and shrinks the file as it closes it.
    shown = typed("app", "show", app_id, "--json").stdout
    before = file.read_bytes()
    result = typed("store", "copy", f"sqlite:{file}", postgres_url, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    copied = json.loads(result.stdout)
    assert (copied["rows"]["apps"], copied["rows"]["keys"]) == (1, 1)
    assert file.read_bytes() == before
    again = typed("store", "copy", f"sqlite:{file}", postgres_url)
    assert (again.exit_code, "isn't empty" in again.stderr) == (1, True)
    file.unlink()
    monkeypatch.setenv("REDPOLL_DATABASE_URL", postgres_url)
    assert typed("app", "show", app_id, "--json").stdout == shown
    back = tmp_path / "other" / "redpoll.sqlite"
    assert "copied" in typed("store", "copy", postgres_url, f"sqlite:{back}").stdout
    monkeypatch.delenv("REDPOLL_DATABASE_URL")
    assert typed("app", "show", app_id, "--json", "--data-dir", str(back.parent)).stdout == shown


def test_a_server_with_database_url_marks_its_folder_until_the_records_are_copied_back(
    typed, app_id, tmp_path, postgres_url, redis
):
    with Server(workers=1, redis_url=redis.url) as server:
        data = server.folder / "data"
        server.stop()
        assert not (data / data_files.MARKER).exists()
        assert typed("store", "copy", f"sqlite:{data}/redpoll.sqlite", postgres_url).exit_code == 0
        # SQLite is in use until a server has used the copy.
        assert typed("app", "list", "--data-dir", str(data)).exit_code == 0
        server.settings["database_url"] = postgres_url
        server.start()
        marker = data / data_files.MARKER
        assert (stat.S_IMODE(marker.stat().st_mode), marker.read_text()) == (0o600, f"{described(postgres_url)}\n")
        # The running server knows where its records are.
        later = json.loads(typed("app", "create", "later", "--json", "--data-dir", str(data)).stdout)["id"]
        server.stop()
        assert typed("app", "show", later, "--data-dir", str(data)).exit_code == 2
        del server.settings["database_url"]
        with pytest.raises(ServerFailed, match="set database_url"):
            server.start()
        (data / "redpoll.sqlite").rename(data / "redpoll.sqlite.old")
        assert typed("store", "copy", postgres_url, f"sqlite:{data}/redpoll.sqlite").exit_code == 0
        assert not marker.exists()
        server.start()
        assert typed("app", "show", later, "--data-dir", str(data)).exit_code == 0


@pytest.mark.parametrize(
    ("source", "target", "code", "fault"),
    [
        ("mysql://db/x", "sqlite:x", 2, "SOURCE must begin with sqlite: or postgresql://"),
        ("sqlite:data/redpoll.sqlite", "postgresql://u:a/b@db/x", 2, "TARGET has a special character that isn't esc"),
        ("postgresql://u@[::1/x", "sqlite:x", 2, "SOURCE is not a URL"),
        ("sqlite:missing", "sqlite:x", 1, "there is no record store at"),
        ("sqlite:data/redpoll.sqlite", "sqlite:data/redpoll.sqlite", 1, "the target must be a new file"),
    ],
)
def test_what_cant_be_copied_is_said(typed, app_id, tmp_path, monkeypatch, source, target, code, fault):
    monkeypatch.chdir(tmp_path)
    result = typed("store", "copy", source, target)
    assert (result.exit_code, fault in result.stderr) == (code, True), result.output


def test_folder_of_a_running_server_is_not_copied(typed, app_id, tmp_path):
    with datafolder.lock(tmp_path / "data", "serve"):
        result = typed("store", "copy", f"sqlite:{tmp_path}/data/redpoll.sqlite", f"sqlite:{tmp_path}/new/x")
    assert (result.exit_code, "stop the server first" in result.stderr) == (1, True)


def test_a_copy_leaves_a_file_that_another_command_made_while_it_waited(typed, app_id, tmp_path, monkeypatch):
    source, target = tmp_path / "data" / "redpoll.sqlite", tmp_path / "new" / "redpoll.sqlite"

    def find_it_made(stack, path) -> None:
        if path == target:
            path.parent.mkdir()
            path.write_bytes(b"another's")

    monkeypatch.setattr("redpoll.cli.store._lock", find_it_made)
    failed = typed("store", "copy", f"sqlite:{source}", f"sqlite:{target}")
    assert (failed.exit_code, "exists; the target must be a new file" in failed.stderr) == (1, True), failed.output
    assert target.read_bytes() == b"another's"


def test_a_copy_that_failed_leaves_no_file_and_can_be_repeated(typed, app_id, tmp_path):
    source, target = tmp_path / "data" / "redpoll.sqlite", tmp_path / "new" / "redpoll.sqlite"

    def move_key(app: str) -> None:
        with contextlib.closing(sqlite3.connect(source)) as database, database:
            database.execute("UPDATE keys SET app_id = ?", [app])

    move_key("gone")
    failed = typed("store", "copy", f"sqlite:{source}", f"sqlite:{target}")
    assert (failed.exit_code, "nothing was kept" in failed.stderr) == (1, True), failed.output
    assert [path.name for path in target.parent.iterdir()] == ["lock"]
    move_key(app_id)
    assert typed("store", "copy", f"sqlite:{source}", f"sqlite:{target}").exit_code == 0
    assert typed("app", "show", app_id, "--data-dir", str(target.parent)).exit_code == 0
