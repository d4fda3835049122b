"""What `redpoll serve` does before the supervisor runs: the data folder, sockets, limits."""

import asyncio
import fcntl
import os
import resource
import shutil
import socket
import subprocess
import tempfile

import pytest

from helpers.redis_data import REDIS_8, written
from host.supervised import Tree
from redpoll.config.certificate_files import unbundle
from redpoll.config.config import Settings
from redpoll.host.serve import StartError, child_command, serve


async def test_data_folder_that_others_can_list_is_logged(tree, wait_until):
    (tree.folder / "data").mkdir()
    (tree.folder / "data").chmod(0o755)
    tree.start()
    await wait_until(lambda: tree.is_ready)
    assert "data folder open to others" in tree.err
    assert f"chmod 700 {tree.folder / 'data'}" in tree.err


async def test_port_in_use_is_reported_and_nothing_starts(tree, tmp_path, wait_until):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tree.start(port=port)
        assert tree.process.wait(60) == 1
    assert tree.err.splitlines()[-1] == f"refused: can't listen on 127.0.0.1 port {port}: Address already in use"
    assert tree.pids("control") == []


def test_start_without_a_temporary_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    # `serve` sets the mask of its process.
    mask = os.umask(0o077)
    try:
        with pytest.raises(StartError, match="no temporary folder can be made: No such file or directory"):
            serve(Settings(data_dir=str(tmp_path / "data"), redis_url="redis://h", workers=1, port=0, control_port=0))
    finally:
        os.umask(mask)


async def test_folder_of_sockets_is_locked_against_what_cleans_up_temporary_folders(tree, wait_until, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    tree.start(environment={"TMPDIR": str(temporary)})
    await wait_until(lambda: tree.is_ready)
    (run_dir,) = temporary.glob("redpoll-*")
    descriptor = os.open(run_dir, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    if shutil.which("systemd-tmpfiles"):
        (temporary / "unlocked").mkdir()
        (tmp_path / "tmp.conf").write_text(f"d {temporary} - - - 0\n")
        command = ["systemd-tmpfiles", "--clean", tmp_path / "tmp.conf"]
        await asyncio.to_thread(subprocess.run, command, check=True)
        assert list(temporary.iterdir()) == [run_dir]
    assert tree.stop() == 0
    assert list(temporary.iterdir()) == []


async def test_second_server_in_the_same_folder_is_refused(tree, wait_until, tmp_path):
    tree.start()
    await wait_until(lambda: tree.is_ready)
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = Tree(other_folder, tree.redis_url)
    other.start(data_dir=tree.folder / "data")
    assert other.process.wait(60) == 1
    assert f"is in use by redpoll serve, process {tree.process.pid}" in other.err


async def test_data_that_no_redis_here_reads_is_reported(tree, tmp_path):
    written(tmp_path / "data" / "redis", REDIS_8)
    tree.start(redis_url="", environment={"PATH": str(tmp_path)})
    assert tree.process.wait(60) == 1
    refusal = f"no Redis or Valkey 7 or newer was found that reads {tmp_path}/data/redis, which Redis 8.0.2 wrote"
    assert tree.err.splitlines()[-1].startswith(f"refused: {refusal}")


async def test_file_limit_is_raised_for_all_children(tree, wait_until):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tree.start(before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)))
    await wait_until(lambda: tree.is_ready)
    assert tree.notes("worker0")[0]["files"] == hard
    assert f"file limit raised before=256 now={hard}" in tree.err


async def test_files_in_the_data_folder_are_private(tree, wait_until):
    tree.start(redis_url="")
    await wait_until(lambda: tree.is_ready)
    folder = tree.folder / "data"
    modes = {path: path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]}
    assert not any(modes.values()), modes


# -- TLS


async def test_tls_port_in_use_is_reported(tree, pair):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tree.start(**pair | {"tls_port": port})
        assert tree.process.wait(60) == 1
    assert tree.err.splitlines()[-1] == f"refused: can't listen on 127.0.0.1 port {port}: Address already in use"


async def test_workers_read_a_copy_of_the_pair_that_is_deleted_at_stop(tree, pair, wait_until):
    tree.start(**pair)
    await wait_until(lambda: tree.is_ready)
    ours = tree.folder / "data" / "tls.pem"
    assert tree.notes("worker0")[0]["certificates"] == [str(ours)]
    (certificate,) = unbundle(ours.read_bytes(), str(ours))
    assert certificate.pem == pair["tls_key"].read_bytes() + pair["tls_cert"].read_bytes()
    assert ours.stat().st_mode & 0o777 == 0o600
    assert tree.stop() == 0
    assert not ours.exists()


def test_command_line_of_a_child_names_its_role():
    assert child_command("worker", 3, 9)[1:] == ["-P", "-m", "redpoll", "worker", "3", "--pipe", "9"]
    assert child_command("control", 0, 9)[-3:] == ["control", "--pipe", "9"]


def test_certificates_that_cannot_be_written_are_reported(tree, pair):
    (tree.folder / "data" / "tls.pem.new").mkdir(parents=True)
    tree.start(**pair)
    assert tree.process.wait(60) == 1
    folder = tree.folder / "data"
    last = tree.err.splitlines()[-1]
    assert last == f"refused: the TLS certificates can't be written to {folder}: Is a directory"
