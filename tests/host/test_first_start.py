"""What the server prints when it is ready."""

import socket

from host.supervised import said, said_by
from redpoll.ipc.messages import (
    WorkersReady,
)


async def test_ready_line_is_printed_when_all_are_ready_and_names_the_ports(tree, wait_until):
    tree.start(control_host="::1")
    await wait_until(lambda: tree.is_ready)
    (line,) = tree.out.splitlines()
    public, control = line.removeprefix("ready ").split()
    assert public == f"public=http://127.0.0.1:{tree.port}"
    assert control.startswith("control=http://[::1]:")
    # The settings asked for port 0.
    ports = [tree.port, int(control.rpartition(":")[2]), None]
    assert tree.notes("control")[0]["ports"] == tree.notes("worker0")[0]["ports"] == ports
    await wait_until(lambda: said(WorkersReady()) in tree.notes("control"))
    assert said_by(tree.port).startswith("worker")
    assert tree.stop() == 0


async def test_systemd_is_notified_also_if_the_ready_line_cannot_be_printed(tree, wait_until):
    (tree.folder / "out").symlink_to("/dev/full")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tree.folder / "notify"))
        systemd.settimeout(60)
        tree.start(environment={"NOTIFY_SOCKET": str(tree.folder / "notify")})
        assert systemd.recv(100) == b"READY=1"
        await wait_until(lambda: "ready line not printed" in tree.err)
        assert tree.stop() == 0
    assert 'ready line not printed reason="No space left on device"' in tree.err
    assert "Exception in callback" not in tree.err


async def test_first_start_prints_no_secret_into_a_log_but_the_command_that_shows_them(tree, wait_until):
    tree.does("control", "create")
    tree.start()
    await wait_until(lambda: tree.is_ready)
    assert "a-secret" not in tree.out + tree.err
    assert "the-first-password" not in tree.out + tree.err
    said, ready = tree.out.splitlines()
    assert said.startswith("redpoll created an app and the user admin ")
    assert said.endswith(f"redpoll first-login --data-dir {tree.folder / 'data'}")
    assert ready.startswith("ready public=")


async def test_created_app_is_printed_before_the_ready_line_in_a_terminal(tree, wait_until):
    tree.does("control", "create")
    tree.start(terminal=True)
    await wait_until(lambda: tree.is_ready)
    assert f"PUSHER_URL=http://abc:a-secret@127.0.0.1:{tree.port}/apps/77" in tree.out
    assert tree.out.splitlines()[-1].startswith("ready public=")
    assert "a-secret" not in tree.err


async def test_first_password_is_printed_once_in_a_terminal_and_written_to_a_private_file(tree, wait_until):
    tree.does("control", "create")
    tree.start(terminal=True)
    await wait_until(lambda: tree.is_ready)
    (line,) = [line for line in tree.out.splitlines() if "the-first-password" in line]
    assert line.split() == ["password", "the-first-password"]
    path = tree.folder / "data" / "first-login"
    assert str(path) in tree.out
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("the-first-password\n", 0o600)
    assert "the-first-password" not in tree.err


async def test_ready_line_omits_tls_without_a_tls_port(tree, wait_until):
    tree.start()
    await wait_until(lambda: tree.is_ready)
    assert "tls=" not in tree.out
    assert tree.notes("worker0")[0]["certificates"] == []
