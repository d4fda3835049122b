"""The lock of the data folder."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
from contextlib import ExitStack

import pytest

from redpoll.host import datafolder
from redpoll.host.datafolder import DataFolderError


def test_folder_is_created_private(tmp_path):
    folder = tmp_path / "a" / "data"
    with datafolder.lock(folder, "serve"):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "lock").stat().st_mode & 0o777 == 0o600


def test_second_holder_is_refused_and_learns_who_holds_the_lock(tmp_path):
    with datafolder.lock(tmp_path, "serve"):
        with pytest.raises(DataFolderError) as caught, datafolder.lock(tmp_path, "app list", wait_s=0.0):
            pytest.fail("two hold it")
        assert str(caught.value) == (f"the data folder {tmp_path} is in use by redpoll serve, process {os.getpid()}")
    with datafolder.lock(tmp_path, "app list", wait_s=0.0):
        pass


def test_lock_of_a_killed_holder_is_free(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from redpoll.host import datafolder\n"
        "with datafolder.lock(Path(sys.argv[1]), 'serve'):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
        holder.wait()
    with datafolder.lock(tmp_path, "serve", wait_s=0.0):
        pass


def test_file_in_place_of_the_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataFolderError, match="can't be used: "), datafolder.lock(tmp_path / "file", "serve"):
        pytest.fail("held a file")


def test_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "lock").symlink_to("file")
    with pytest.raises(DataFolderError, match="can't be used: "), datafolder.lock(tmp_path, "serve"):
        pytest.fail("held a link")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_server_waits_for_a_command_and_says_for_which(tmp_path, monkeypatch):
    # It would not wait for another server.
    monkeypatch.setattr("redpoll.host.datafolder._WAIT_FOR_SERVER_S", 0.0)
    waited_for = []
    with ExitStack() as command:
        command.enter_context(datafolder.lock(tmp_path, "app set"))

        def command_ends(holder):
            waited_for.append(holder)
            command.close()

        with datafolder.lock(tmp_path, "serve", waiting=command_ends):
            assert waited_for == [f"redpoll app set, process {os.getpid()}"]
            with pytest.raises(DataFolderError, match="in use by redpoll serve"), datafolder.lock(tmp_path, "restore"):
                pytest.fail("two hold it")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can act as somebody else")
def test_root_acts_as_the_owner_inside_the_block_only(tmp_path):
    tmp_path.chmod(0o755)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65_534, 65_534)
    before = os.environ["HOME"]
    with datafolder.as_owner(theirs):
        assert (os.geteuid(), os.getegid(), os.getgroups()) == (65_534, 65_534, [65_534])
        with datafolder.as_owner(tmp_path):
            assert os.geteuid() == 0
        assert os.geteuid() == 65_534
        assert os.environ["HOME"] != before
    assert (os.geteuid(), os.environ["HOME"], datafolder.foreign_owner(theirs)) == (0, before, "nobody")
    with pytest.raises(DataFolderError, match="who can't read this installation"), datafolder.as_owner(theirs):
        raise ModuleNotFoundError("No module named 'x'")
    assert os.geteuid() == 0


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (0o700, None),
        (0o755, "mode 0755 lets other users of this machine see the names of its files; close it with: chmod 700 "),
        (0o770, "mode 0770 lets other users of this machine replace its files, and so take over this server; "),
    ],
)
def test_folder_open_to_others_is_reported_and_keeps_its_mode(tmp_path, mode, text):
    tmp_path.chmod(mode)
    with datafolder.lock(tmp_path, "serve"):
        found = datafolder.openness(tmp_path)
    assert found is None if text is None else found is not None and found.startswith(text)
    assert tmp_path.stat().st_mode & 0o777 == mode


def test_a_lock_that_cannot_be_written_is_reported(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may grow, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(DataFolderError) as caught, datafolder.lock(tmp_path, "serve"):
            pytest.fail("held without its name")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == f"the data folder {tmp_path} can't be written: File too large"
    with datafolder.lock(tmp_path, "serve", wait_s=0.0):
        pass


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch):
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DataFolderError) as caught, datafolder.lock(tmp_path, "serve"):
        pytest.fail("held without a lock")
    assert str(caught.value) == f"the data folder {tmp_path} can't be locked: No locks available"
