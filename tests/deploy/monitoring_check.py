"""Runs the alert rules and the queries of the Grafana dashboard in a Prometheus that scrapes a server under load.

python tests/deploy/monitoring_check.py [PNG]

Needs prometheus on PATH. Exit code 1 if a rule or query fails, if a panel that the load must fill is empty, or if an
alert of a healthy server fires. Then it ends the server and waits until RedpollDown is pending. With PNG it draws
the dashboard's panels into that file. It takes about two minutes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.receiver import Receiver
from helpers.server import Server
from helpers.wire import Api, Socket
from redpoll.ipc.command_socket import ask, socket_path

DEPLOY = Path(__file__).parents[2] / "deploy"
# Rates need some scrapes, and workers report every 5 s.
LOAD_S = 75
VARIABLES = {"$instance": ".*", "$app": ".*", "$__rate_interval": "1m", "$__range": "1m", "$__interval": "5s"}
# What a healthy server doesn't have: their queries must work, and may find nothing.
MAY_BE_EMPTY = ("redpoll_workers_reaped_total", "redpoll_webhook_attempts_total")


def queries() -> list[tuple[str, str]]:
    """Title and query of each panel of the dashboard."""
    found = []
    for panel in json.loads((DEPLOY / "grafana" / "redpoll.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            found.append((panel["title"], query))
    return found


class Prometheus:
    """Prometheus with our rules, scraping one server."""

    def __init__(self, folder: Path, control_port: int) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{control_port}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{bound.getsockname()[1]}"
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stderr=log,
            )
        self.url = f"http://{address}"

    async def get(self, session: aiohttp.ClientSession, path: str, **params: str) -> dict:
        async with session.get(f"{self.url}/api/v1/{path}", params=params) as answer:
            return await answer.json()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


async def load(server: Server, seconds: float) -> None:
    """Subscribers, members, publishes, client events, a webhook, and requests with wrong signatures."""
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(Receiver())
        hook = {"url": receiver.url, "events": ["all"], "format": "service", "channels": [], "pin": False}
        path = socket_path(server.folder / "data")
        await asyncio.to_thread(ask, path, "webhook create", {"app": server.app_id, **hook})
        api = await stack.enter_async_context(Api(server))
        clients = [await Socket.connect(server) for _ in range(100)]
        for number, client in enumerate(clients):
            await client.subscribe(f"room-{number % 10}")
            if number % 2:
                await client.subscribe("presence-all", user_id=str(number))
        await clients[0].subscribe("private-talk")
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        number = 0
        while loop.time() < until:
            await asyncio.gather(*(api.publish(f"room-{room}", "tick", "{}") for room in range(10)))
            await api.get("/channels")
            clients[0].send({"event": "client-x", "channel": "private-talk", "data": {"n": number}})
            if number % 5 == 0:
                client = await Socket.connect(server)
                await client.subscribe("presence-all", user_id="guest")
                await client.close()
            number += 1
            await asyncio.sleep(0.1)
        for client in clients:
            await client.close()


async def draw(prometheus: Prometheus, session: aiohttp.ClientSession, file: Path) -> None:
    """Draws the panels of the dashboard, each with its queries over the time of the load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[str]] = {}
    for title, query in queries():
        panels.setdefault(title, []).append(query)
    columns = 4
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 2.6 * rows), constrained_layout=True)
    now = time.time()
    for axis, (title, wanted) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title(title, fontsize=10)
        for query in wanted:
            span = {"start": str(now - LOAD_S), "end": str(now), "step": "2"}
            for series in (await prometheus.get(session, "query_range", query=query, **span))["data"]["result"]:
                points = [(float(at) - now, float(value)) for at, value in series["values"]]
                axis.plot(*zip(*points, strict=True), linewidth=1)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
    figure.savefig(file, dpi=80)


async def check(picture: Path | None) -> list[str]:
    faults: list[str] = []
    intranet = {"webhook_allow_http": True, "webhook_allow_addresses": "127.0.0.0/8"}
    with tempfile.TemporaryDirectory() as name, Server(workers=2, **intranet) as server:
        prometheus = Prometheus(Path(name), server.control_port)
        try:
            async with aiohttp.ClientSession() as session:
                await load(server, LOAD_S)
                for title, query in queries():
                    answer = await prometheus.get(session, "query", query=query)
                    found = answer.get("data", {}).get("result", [])
                    print(f"  {title:<44} {len(found):3} series  {found[0]['value'][1][:12] if found else ''}")
                    if answer["status"] != "success":
                        faults.append(f"{title}: {answer['error']}")
                    elif not found and not any(name in query for name in MAY_BE_EMPTY):
                        faults.append(f"{title}: no series for {query}")
                rules = [
                    rule
                    for group in (await prometheus.get(session, "rules"))["data"]["groups"]
                    for rule in group["rules"]
                ]
                for rule in rules:
                    print(f"  {rule['name']:<44} {rule['health']:>4} {rule['state']}")
                    if rule["health"] != "ok" or rule["state"] == "firing":
                        faults.append(f"{rule['name']}: {rule['health']}, {rule['state']} {rule.get('lastError', '')}")
                if picture is not None:
                    await draw(prometheus, session, picture)
                await asyncio.to_thread(server.stop)
                pending: set[str] = set()
                for _ in range(60):
                    alerts = (await prometheus.get(session, "alerts"))["data"]["alerts"]
                    pending = {alert["labels"]["alertname"] for alert in alerts}
                    if "RedpollDown" in pending:
                        break
                    await asyncio.sleep(0.5)
                print(f"  after the server's end, pending: {', '.join(sorted(pending))}")
                if "RedpollDown" not in pending:
                    faults.append("RedpollDown isn't pending after the server's end")
                server.start()
        finally:
            prometheus.end()
    return faults


def main() -> None:
    faults = asyncio.run(check(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
    print(*faults, sep="\n")
    print(f"{len(queries())} queries, {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
