"""The Host headers that the control port answers to."""

import socket

import pytest

from redpoll.config.settings import Settings
from redpoll.control.http.host_names import HostNames

REBOUND = ["evil.example:9601", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1", "a:b:c"]


@pytest.fixture
def host_names():
    return HostNames.of(
        Settings(
            control_names=("Dash.example.com", "*.svc.local"),
            control_host="control.example.com",
            public_url="https://ws.example.com",
        )
    )


@pytest.mark.parametrize(
    "host",
    [
        None,
        "localhost:9601",
        "LOCALHOST.",
        "redpoll.localhost",
        "127.0.0.1:9601",
        "10.1.2.3:9601",
        "203.0.113.9",
        "[::1]:9601",
        "[2001:db8::1]",
        "dash.example.com",
        "dash.example.com:443",
        "a.svc.local:9601",
        "control.example.com:9601",
        "ws.example.com",
        socket.gethostname(),
    ],
)
def test_own_names_and_every_address_are_allowed(host_names, host):
    assert host_names.allow(host)


@pytest.mark.parametrize("host", [*REBOUND, "x.dash.example.com", "svc.local", "evilsvc.local", "example.com"])
def test_other_names_are_refused(host_names, host):
    assert not host_names.allow(host)


async def test_rebound_name_reads_no_metrics_and_tries_no_login(plane):
    async def status(target, host, method="GET"):
        head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n"
        return await plane.wire.ask(head.encode())

    for target, method in (("/metrics", "GET"), ("/dashboard/login", "GET"), ("/dashboard/login", "POST")):
        refused = await status(target, "evil.example:9601", method)
        assert refused.status == 403
        assert b"control_names (REDPOLL_CONTROL_NAMES)" in refused.body
    assert b"redpoll_" not in (await status("/metrics", "evil.example")).body
    # Prometheus and health checks use addresses; the API has its own credentials.
    assert (await status("/metrics", f"127.0.0.1:{plane.port}")).status == 200
    assert (await status("/dashboard/login", "localhost:9601")).status == 200
    assert (await status("/healthz", "evil.example")).status == 200
    assert (await status("/apps/3/channels", "evil.example")).status == 401
