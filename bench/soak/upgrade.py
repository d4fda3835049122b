"""Upgrades a server from an earlier commit to this checkout, on its data folder, and checks that nothing is lost.

    python -m bench.soak.upgrade                          from the commit before several servers could share a Redis
    python -m bench.soak.upgrade --from v1.2.0            from any commit
    python -m bench.soak.upgrade --checkout DIR           from a checkout whose extensions are built already

The old server gets an app, a history rule, messages, a webhook whose receiver is down, and a client that recovers. It
is stopped with SIGTERM, and the new one starts on its data folder. Then app, keys, tokens, users, history (the same
offsets and epoch), webhook (the deliveries that waited, under their ids) and the client must be as before.
Building the old commit takes a few minutes; nothing of the repository but its list of worktrees changes meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.arguments import parser_of
from helpers.receiver import Receiver
from helpers.server import Server
from helpers.wire import Api, Socket

ROOT = Path(__file__).parents[2]
# The last commit before the work on several servers.
BEFORE = "f304412"
MESSAGES = 200
DOWN = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


class Upgraded(Server):
    """A server whose code comes from `checkout`; None is this one."""

    checkout: Path | None = None

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        if self.checkout is not None:
            environment["PYTHONPATH"] = str(self.checkout / "src")
        return environment

    def command(self, *words: str) -> Any:
        """Runs `redpoll …` of the same code, and returns its JSON."""
        line = [sys.executable, "-m", "redpoll", *words, "--json", "--data-dir", str(self.folder / "data")]
        environment = self.environment()
        if self.redis_url is not None:
            environment["REDPOLL_REDIS_URL"] = self.redis_url
        done = subprocess.run(line, env=environment, cwd=self.folder, stdout=subprocess.PIPE, check=True, timeout=60)
        return json.loads(done.stdout)


@contextlib.contextmanager
def built(commit: str) -> Iterator[Path]:
    """A checkout of the commit with its extensions built."""
    with tempfile.TemporaryDirectory(prefix="rpupgrade") as folder:
        checkout = Path(folder) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), commit], check=True)
        try:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(build, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
            yield checkout
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


async def joined(server: Server, place: dict[str, Any] | None) -> tuple[Socket, dict[str, Any]]:
    """A client that recovers from `place`, and the data of its success frame."""
    client = await Socket.connect(server, query="protocol=7&recover=1")
    request = client.subscribe_request("stored-news")
    if place is not None:
        request["data"]["since"] = place
    client.send(request)
    success = await client.next("pusher_internal:subscription_succeeded", "stored-news")
    return client, json.loads(success["data"])


async def history(server: Server) -> list[Any]:
    async with Api(server) as api:
        page = await api.get("/channels/stored-news/history", limit="1000")
    return [page["epoch"], page["messages"]]


def records(server: Upgraded) -> dict[str, Any]:
    """Everything that operators made, as the commands of this version show it. Fields that are newer are left out."""
    app = server.app_id
    return {
        # An old release lists those that it made itself last.
        "apps": sorted((row["id"], row["name"]) for row in server.command("app", "list")),
        "keys": [(row["key"], row["enabled"]) for row in server.command("key", "list", app)],
        "tokens": [(row["id"], row["name"]) for row in server.command("token", "list", app)],
        "rules": [(row["id"], row["keep"]) for row in server.command("history", "rule", "list", app)],
        "webhooks": [(row["id"], row["url"]) for row in server.command("webhook", "list", app)],
    }


async def upgrade(checkout: Path) -> None:
    intranet = {"webhook_allow_http": 1, "webhook_allow_addresses": "127.0.0.0/8", "webhook_debounce_s": 0}
    async with Receiver(answer=DOWN) as receiver:
        server = Upgraded(workers=2, **intranet)
        server.checkout = checkout
        with server:
            app = server.app_id
            server.command("history", "rule", "add", app, "--prefix", "stored-", "--keep", "1000", "--seconds", "3600")
            server.command("app", "create", "another")
            server.command("key", "add", app)
            server.command("token", "create", app, "--name", "deploy", "--scope", "publish")
            hook = server.command("webhook", "create", app, receiver.url, "--events", "member.added")
            before = records(server)
            client, place = await joined(server, None)
            member = await Socket.connect(server)
            await member.subscribe("presence-room", "anna")
            async with Api(server) as api:
                for number in range(MESSAGES):
                    await api.publish("stored-news", "n", str(number))
            await client.until(lambda: len(client.all("n")) == MESSAGES)
            first_half = client.all("n")[: MESSAGES // 2]
            place = {"epoch": place["epoch"], "offset": first_half[-1]["offset"]}
            while not receiver.requests:
                await asyncio.sleep(0.01)
            waiting = {request.headers["x-service-delivery"] for request in receiver.requests}
            stored = await history(server)
            await asyncio.to_thread(server.stop)
            codes = [await client.until_closed(), await member.until_closed()]

            receiver.answer, receiver.requests[:] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", []
            server.checkout = None
            began = time.monotonic()
            await asyncio.to_thread(server.start)
            started_s = time.monotonic() - began
            check("close codes of clients", codes, [4200, 4200])
            check("records", records(server), before)
            check("history: epoch, offsets and messages", await history(server), stored)
            client, success = await joined(server, place)
            async with Api(server) as api:
                await api.publish("stored-news", "n", "after")
            expected = [*map(str, range(MESSAGES // 2, MESSAGES)), "after"]
            await client.until(lambda: len(client.all("n")) >= len(expected))
            check("what a client that recovers gets", [one["data"] for one in client.all("n")], expected)
            check("recovered", success["recovered"], True)
            deadline = time.monotonic() + 120
            while not receiver.requests and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            delivered = {request.headers["x-service-delivery"] for request in receiver.requests}
            check("deliveries that waited", delivered, waiting)
            (shown,) = server.command("webhook", "list", app)
            check("the webhook's id", shown["id"], hook["id"])
            print(f"the new server was ready {started_s:.1f} s after its start")
            client.abort()


def check(what: str, seen: object, expected: object) -> None:
    if seen != expected:
        raise SystemExit(f"{what}: {seen!r} instead of {expected!r}")
    print(f"as before: {what}")


def main() -> None:
    parser = parser_of(__doc__, saves=False)
    parser.add_argument("--from", dest="commit", default=BEFORE, help="the commit to upgrade from")
    parser.add_argument("--checkout", type=Path, help="an existing checkout of it, with its extensions built")
    options = parser.parse_args()
    os.environ.pop("REDIS_URL", None)
    with contextlib.ExitStack() as stack:
        checkout = options.checkout or stack.enter_context(built(options.commit))
        asyncio.run(upgrade(checkout.resolve()))


if __name__ == "__main__":
    main()
