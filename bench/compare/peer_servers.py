"""Gets the servers that peers.py measures beside redpoll, and starts them.

    python -m bench.compare.peer_servers            gets all of them into build/peers
    python -m bench.compare.peer_servers soketi     gets one

Their configurations are in bench/peers: one app, no limits on rates, no logs, no metrics. soketi needs Node.js 20.19 or
newer and npm, Centrifugo Go, Sockudo Rust and protoc (Debian: `protobuf-compiler libprotobuf-dev`). soketi's
uWebSockets.js isn't in npm's registry; uws-pack is the same library there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.arguments import parser_of
from helpers.ports import reserved_ports

CONFIGURATIONS = Path(__file__).parents[1] / "peers"
FOLDER = Path(__file__).parents[2] / "build" / "peers"
STARTS_WITHIN_S = 30.0
# The app of the Pusher-compatible ones.
_URL = "http://app-key:app-secret@127.0.0.1:{port}/apps/app-id"


class PeerServer(NamedTuple):
    """`get` is the command that brings it into the folder, `start` the one that runs it, with its port in the variable
    `port` of the environment."""

    version: str
    get: tuple[str, ...]
    start: tuple[str, ...]
    port: str
    url: str = _URL


PEERS = {
    "soketi": PeerServer(
        "1.6.1",
        ("npm", "install", "--no-audit", "--no-fund", "--silent"),
        (
            *("node", f"{FOLDER}/soketi/node_modules/@soketi/soketi/bin/server.js", "start"),
            f"--config={FOLDER}/soketi/config.json",
        ),
        "SOKETI_PORT",
    ),
    "Centrifugo": PeerServer(
        "6.9.1",
        ("go", "install", "github.com/centrifugal/centrifugo/v6@v6.9.1"),
        (f"{FOLDER}/bin/centrifugo", "-c", f"{CONFIGURATIONS}/centrifugo.json"),
        "CENTRIFUGO_HTTP_SERVER_PORT",
        "centrifugo://app-secret@127.0.0.1:{port}",
    ),
    "Sockudo": PeerServer(
        "5.2.0",
        ("cargo", "install", "--quiet", "--locked", "sockudo@5.2.0", "--root", str(FOLDER)),
        (f"{FOLDER}/bin/sockudo", "--config", f"{CONFIGURATIONS}/sockudo.json"),
        "PORT",
    ),
}


def get(name: str) -> None:
    """Brings a server into FOLDER."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    if name == "soketi":
        shutil.copytree(CONFIGURATIONS / "soketi", folder, dirs_exist_ok=True)
    subprocess.run(PEERS[name].get, cwd=folder, env=os.environ | {"GOBIN": f"{FOLDER}/bin"}, check=True)
    if name == "soketi":
        # It offers itself to `import` only; soketi uses `require`.
        package = folder / "node_modules/uWebSockets.js/package.json"
        package.write_text(package.read_text().replace('"import": "./dist', '"default": "./dist'))


@contextlib.contextmanager
def started(name: str) -> Iterator[str]:
    """Runs a server on a free port, on the processors that this thread may use. Yields its address (`Address.parse`).

    Raises SystemExit if it wasn't got, or doesn't start.
    """
    peer = PEERS[name]
    # It is given back first: not all of them reuse an address.
    with reserved_ports(1) as (port,):
        pass
    environment = os.environ | {peer.port: str(port)}
    try:
        process = subprocess.Popen(peer.start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        raise SystemExit(f"{name} is missing: python -m bench.compare.peer_servers {name}") from None
    try:
        _wait(name, process, port)
        yield peer.url.format(port=port)
    finally:
        process.kill()
        process.wait()


def _wait(name: str, process: subprocess.Popen[bytes], port: int) -> None:
    ends_at = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < ends_at and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise SystemExit(f"{name} doesn't start: {' '.join(PEERS[name].start)}")


def main() -> None:
    parser = parser_of(__doc__, saves=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PEERS)}; all without it")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"unknown: {', '.join(unknown)}")
    for name in names or PEERS:
        print(f"{name} {PEERS[name].version}", flush=True)
        get(name)


if __name__ == "__main__":
    main()
