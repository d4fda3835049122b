"""The lock of the data folder."""

import os
import subprocess
import sys

import pytest

from redpoll import datafolder
from redpoll.datafolder import DataFolderError


def test_the_folder_is_made_for_its_owner_only(tmp_path):
    folder = tmp_path / "a" / "data"
    with datafolder.hold(folder, "serve"):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "lock").stat().st_mode & 0o777 == 0o600


def test_a_second_one_is_told_who_holds_it(tmp_path):
    with datafolder.hold(tmp_path, "serve"):
        with pytest.raises(DataFolderError) as caught, datafolder.hold(tmp_path, "app list", wait_s=0.0):
            pytest.fail("two hold it")
        assert str(caught.value) == (f"the data folder {tmp_path} is in use by redpoll serve, process {os.getpid()}")
    with datafolder.hold(tmp_path, "app list", wait_s=0.0):
        pass


def test_a_holder_that_was_killed_holds_nothing(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from redpoll import datafolder\n"
        "with datafolder.hold(Path(sys.argv[1]), 'serve'):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
        holder.wait()
    with datafolder.hold(tmp_path, "serve", wait_s=0.0):
        pass


def test_a_folder_that_is_none_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataFolderError, match="can't be used: "), datafolder.hold(tmp_path / "file", "serve"):
        pytest.fail("held a file")
