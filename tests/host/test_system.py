"""Listening sockets and their options, and notifications to systemd."""

import os
import socket
import subprocess
import sys

import pytest

from helpers.namespaces import may_unshare
from redpoll.host.system import StartError, listen, notify_systemd, notify_watchdog


def test_port_of_our_sockets_is_in_use_for_others():
    ours = listen("127.0.0.1", 0, count=3)
    port = ours[0].getsockname()[1]
    assert {sock.getsockname()[1] for sock in ours} == {port}
    for count in (1, 3):
        with pytest.raises(StartError, match="Address already in use"):
            listen("127.0.0.1", port, count=count)
    for sock in ours:
        sock.close()


def test_accepted_connections_inherit_socket_options():
    (ours,) = listen("127.0.0.1", 0)
    with ours, socket.create_connection(ours.getsockname()), ours.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


@pytest.mark.skipif(not may_unshare("-n"), reason="no network namespace: the setting is the machine's")
def test_all_addresses_include_those_of_ipv4_where_the_system_says_otherwise():
    program = """
import socket
from redpoll.host.system import listen
(ours,) = listen("::", 0)
assert not ours.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
"""
    command = 'cd /proc/sys/net/ipv6; test -w bindv6only || exit 77; echo 1 > bindv6only; exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-n", "sh", "-ec", command, sys.executable, program], check=False, timeout=60)
    if done.returncode == 77:
        pytest.skip("the system's setting can't be changed here")
    assert done.returncode == 0


def test_unknown_host_is_reported():
    with pytest.raises(StartError, match=r"can't listen on 'no\.such\.host\.invalid'"):
        listen("no.such.host.invalid", 0)


def test_watchdog_is_fed_only_by_the_process_that_systemd_watches(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        for usec, pid in ((None, None), ("30000000", str(os.getpid() + 1))):
            for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
                monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
            notify_watchdog()
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        notify_watchdog()
        assert systemd.recv(100) == b"WATCHDOG=1"


def test_systemd_is_notified_only_if_it_listens(tmp_path, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_systemd("READY=1")
    for name in (str(tmp_path / "notify"), f"@redpoll-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(name.replace("@", "\0"))
            monkeypatch.setenv("NOTIFY_SOCKET", name)
            notify_systemd("STOPPING=1")
            assert systemd.recv(100) == b"STOPPING=1"
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify_systemd("READY=1")
