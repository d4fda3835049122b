"""The files in the data folder: redpoll's own names, and the marker of records in PostgreSQL."""

import os

import pytest

from redpoll.config.data_files import MARKER, forget_postgres, is_own_file, note_postgres, noted_postgres


@pytest.mark.parametrize(
    "name",
    [
        "redpoll.sqlite",
        "redpoll.sqlite-journal",
        "redpoll.sqlite.before-restore",
        "redpoll.sqlite.before-restore-wal",
        "redpoll.sqlite.restoring",
        "redpoll.sqlite.4711.partial",
        "events.sqlite.old-shm",
        "charts.sqlite",
        "tls.pem.new",
        "redis/dump.rdb",
        "redis.sock",
        "control.sock",
        "lock",
        "first-login",
        MARKER,
    ],
)
def test_what_redpoll_writes_into_the_folder_is_its_own(tmp_path, name):
    assert is_own_file(tmp_path / name, tmp_path)
    assert not is_own_file(tmp_path / "backups" / name, tmp_path)


@pytest.mark.parametrize("name", ["today.sqlite", "redpoll.sqlite.bak", "redpoll.sqlite.2027-01-01", "my-lock"])
def test_other_names_in_the_folder_are_free(tmp_path, name):
    assert not is_own_file(tmp_path / name, tmp_path)


def test_the_marker_is_private_and_stays_until_it_is_removed(tmp_path):
    assert noted_postgres(tmp_path) is None
    for database in ("PostgreSQL at db/redpoll", "PostgreSQL at other/redpoll"):
        note_postgres(tmp_path, database)
        assert noted_postgres(tmp_path) == database
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]
    assert (tmp_path / MARKER).stat().st_mode & 0o777 == 0o600
    forget_postgres(tmp_path)
    forget_postgres(tmp_path)
    assert noted_postgres(tmp_path) is None


def test_a_marker_that_is_not_ours_is_a_marker_and_shows_nothing(tmp_path):
    marker, other = tmp_path / MARKER, tmp_path / "other"
    other.write_text("a secret")
    marker.symlink_to(other)
    assert noted_postgres(tmp_path) == "PostgreSQL"
    marker.unlink()
    for content in (b"", b"\x1b[2J", b"\xff\n\n"):
        marker.write_bytes(content)
        assert noted_postgres(tmp_path) in ("PostgreSQL", "\ufffd")
    marker.unlink()
    os.mkfifo(marker)
    assert noted_postgres(tmp_path) == "PostgreSQL"


def test_without_a_folder_there_is_no_marker(tmp_path):
    for folder in (tmp_path / "missing", tmp_path / ("a" * 300)):
        assert noted_postgres(folder) is None
