"""Stock pusher-js over wss while the operator changes the certificate: a new file and SIGHUP, no restart."""

import shutil
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clients.node import Node
from helpers.certs import self_signed
from helpers.server import Server
from helpers.wire import Api

# A certificate that Node trusts additionally, for fetch and for pusher-js' WebSockets.
TRUST_VARIABLES = ("NODE_EXTRA_CA_CERTS", "WEBSOCKET_CLIENT_CA_BUNDLE")


@asynccontextmanager
async def node_that_trusts(certificate: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """Official clients that accept only this certificate."""
    for name in TRUST_VARIABLES:
        monkeypatch.setenv(name, str(certificate))
    async with Node(server) as node:
        yield node


async def connect_over_tls(node: Node, client: str, server: Server) -> None:
    port = int(server.tls_url.rpartition(":")[2])
    options = node.options(None, wsHost="localhost", wssPort=port, forceTLS=True)
    await node.call("connect", client=client, key=server.app_key, options=options)


def shown_by(server: Server) -> bytes:
    """The certificate of the next handshake."""
    pem = ssl.get_server_certificate(("127.0.0.1", int(server.tls_url.rpartition(":")[2])))
    return ssl.PEM_cert_to_DER_cert(pem)


async def test_open_sockets_stay_and_new_ones_are_shown_the_new_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable
) -> None:
    old_cert, old_key = self_signed(tmp_path, "old")
    new_cert, new_key = self_signed(tmp_path, "new")
    cert, key = Path(shutil.copy(old_cert, tmp_path / "cert.pem")), Path(shutil.copy(old_key, tmp_path / "key.pem"))
    with Server(workers=2, tls_port=0, tls_cert=cert, tls_key=key) as server:
        async with (
            node_that_trusts(old_cert, server, monkeypatch) as early,
            node_that_trusts(new_cert, server, monkeypatch) as late,
            Api(server) as api,
        ):
            before = [f"before-{number}" for number in range(8)]
            for client in before:
                await connect_over_tls(early, client, server)
                await early.seen(client=client, state="connected")
                await early.subscribe(client, "news")
            ids = {client: await early.call("socket_id", client=client) for client in before}

            shutil.copy(new_cert, cert)
            shutil.copy(new_key, key)
            server.signal(signal.SIGHUP)
            new = ssl.PEM_cert_to_DER_cert(new_cert.read_text())
            # Each worker reads the files itself. All have done so when no handshake shows the old one many times in a
            # row.
            await wait_until(lambda: all(shown_by(server) == new for _ in range(32)))

            await connect_over_tls(late, "after", server)
            await late.seen(client="after", state="connected")
            await late.subscribe("after", "news")
            await api.publish("news", "changed", '{"n":1}')
            for node, clients in ((early, before), (late, ["after"])):
                for client in clients:
                    assert (await node.seen(client=client, event="changed"))["data"] == {"n": 1}
            assert ids == {client: await early.call("socket_id", client=client) for client in before}
