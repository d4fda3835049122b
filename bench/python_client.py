"""Publishes from Python: redpoll-client beside Pusher's library, Sockudo's, and bare HTTP clients, at one redpoll.

    python -m bench.python_client [--seconds 2] [--rounds 3] [--at 1,16,64] [--rate 200]
    python -m bench.python_client --tls
    python -m bench.python_client --only Publisher,pusher-requests
    python -m bench.python_client --events 20000 --rounds 3        Subscriber beside pysher, without TLS

Starts a redpoll with one worker. Each publisher runs in a process of its own, in turns, with 1, 16 and 64 publishes at
a time: threads for blocking ones, tasks for asyncio. `us` is the processor time of that process for one publish; on a
machine that has other things to do, it says more than rates. `p99` is the latency at a steady 200 a second, timed from
the moment at which the publish was due. The bare clients send requests that were signed before: they are what
redpoll-client could be built on. `sockudo-…`, `httpx2-…` and `pusher-asyncio-…` are left out where their packages
(`sockudo-http-python`, `httpx2`) aren't installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.arguments import parser_of
from bench.report import print_table, save
from helpers.certs import self_signed
from helpers.server import Server, rss_bytes
from redpoll_client import AsyncPublisher, Publisher
from redpoll_client.calls import Call, target
from redpoll_client.settings import endpoint_of

DATA = {"id": 4711, "state": "paid", "text": "x" * 80}
LIMIT_S = 120

Blocking = Callable[[], object]
Waiting = Callable[[], Awaitable[object]]


def _signed(url: str) -> tuple[str, bytes]:
    """The URL and the body of a signed request, for the bare clients."""
    endpoint = endpoint_of(url=url)
    body = json.dumps({"name": "e", "channels": ["bench"], "data": json.dumps(DATA)}).encode()
    return endpoint.origin + target(endpoint, Call("POST", f"/apps/{endpoint.app_id}/events", body=body)), body


def _publisher(url: str, at_once: int) -> Blocking:
    publisher = Publisher(url=url, connections=at_once)
    return lambda: publisher.trigger("bench", "e", DATA)


def _pusher(url: str, at_once: int, backend: str = "") -> Any:
    import pusher

    end = endpoint_of(url=url)
    options: dict[str, Any] = {"host": end.host, "port": end.port, "ssl": end.ssl}
    if backend:
        options["backend"] = importlib.import_module("pusher.aiohttp").AsyncIOBackend
    client = pusher.Pusher(end.app_id, end.key, end.secret, **options)
    if end.ssl and not backend:
        # It trusts a list of its own, and no option changes that.
        client._pusher_client.http.options["verify"] = os.environ["REQUESTS_CA_BUNDLE"]
    return lambda: client.trigger("bench", "e", DATA)


def _sockudo(url: str, at_once: int) -> Blocking:
    client = importlib.import_module("sockudo_http_python").Sockudo.from_url(url)
    return lambda: _right(client.trigger("bench", "e", DATA).ok)


def _right(ok: bool) -> None:
    if not ok:
        raise RuntimeError("a publish failed")


def _urllib3(url: str, at_once: int) -> Blocking:
    import urllib3

    pool = urllib3.PoolManager(maxsize=at_once, block=True)
    signed, body = _signed(url)
    return lambda: _right(pool.request("POST", signed, body=body, retries=False).status == 200)


def _httpx2(url: str, at_once: int) -> Blocking:
    client = importlib.import_module("httpx2").Client()
    signed, body = _signed(url)
    return lambda: _right(client.post(signed, content=body).status_code == 200)


async def _async_publisher(url: str, at_once: int) -> Waiting:
    publisher = AsyncPublisher(url=url, connections=at_once)
    return lambda: publisher.trigger("bench", "e", DATA)


async def _pusher_asyncio(url: str, at_once: int) -> Waiting:
    trigger: Waiting = _pusher(url, at_once, "asyncio")
    return trigger


async def _sockudo_async(url: str, at_once: int) -> Waiting:
    client = importlib.import_module("sockudo_http_python").AsyncSockudo.from_url(url)

    async def publish() -> None:
        _right((await client.trigger("bench", "e", DATA)).ok)

    return publish


async def _aiohttp(url: str, at_once: int) -> Waiting:
    import aiohttp
    from yarl import URL

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once))
    signed, body = _signed(url)

    async def publish() -> None:
        async with session.post(URL(signed, encoded=True), data=body) as response:
            await response.read()
            _right(response.status == 200)

    return publish


async def _httpx2_async(url: str, at_once: int) -> Waiting:
    client = importlib.import_module("httpx2").AsyncClient()
    signed, body = _signed(url)

    async def publish() -> None:
        _right((await client.post(signed, content=body)).status_code == 200)

    return publish


BLOCKING: dict[str, Callable[[str, int], Blocking]] = {
    "Publisher": _publisher,
    "pusher-requests": _pusher,
    "sockudo": _sockudo,
    "bare-urllib3": _urllib3,
    "bare-httpx2": _httpx2,
}
WAITING: dict[str, Callable[[str, int], Awaitable[Waiting]]] = {
    "AsyncPublisher": _async_publisher,
    "pusher-asyncio": _pusher_asyncio,
    "sockudo-async": _sockudo_async,
    "bare-aiohttp": _aiohttp,
    "bare-httpx2-async": _httpx2_async,
}
REFERENCE = {"Publisher": "pusher-requests", "AsyncPublisher": "pusher-asyncio"}
NEEDS = {"sockudo": "sockudo_http_python", "bare-httpx2": "httpx2"}


# -- one publisher, in its own process


class _Load:
    """Counts publishes until the time is over, or times them at a steady rate."""

    def __init__(self, seconds: float, rate: float) -> None:
        self.interval_s = 1 / rate if rate else 0.0
        self.began = time.perf_counter()
        self.until = self.began + seconds
        self.count = 0
        self.latencies_s: list[float] = []
        self._due = 0
        self._lock = threading.Lock()

    def next_due(self) -> float | None:
        """When the next publish is due; None at the end."""
        with self._lock:
            due = self.began + self._due * self.interval_s if self.interval_s else time.perf_counter()
            self._due += 1
        return due if due < self.until else None

    def done(self, due: float) -> None:
        with self._lock:
            self.count += 1
            self.latencies_s.append(time.perf_counter() - due)


def _run_blocking(publish: Blocking, at_once: int, load: _Load) -> None:
    def run() -> None:
        while (due := load.next_due()) is not None:
            time.sleep(max(0.0, due - time.perf_counter()))
            publish()
            load.done(due)

    threads = [threading.Thread(target=run) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _run_waiting(publish: Waiting, at_once: int, load: _Load) -> None:
    async def run() -> None:
        while (due := load.next_due()) is not None:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await publish()
            load.done(due)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(run())


def one(name: str, url: str, at_once: int, seconds: float, rate: float) -> dict[str, float]:
    """Rate, processor time for each publish in µs, and p99 in ms, of one publisher in this process."""

    def used_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    if name in BLOCKING:
        publish = BLOCKING[name](url, at_once)
        publish()
        before, load = used_s(), _Load(seconds, rate)
        _run_blocking(publish, at_once, load)
    else:

        async def main() -> tuple[float, _Load]:
            publish = await WAITING[name](url, at_once)
            await publish()
            before, load = used_s(), _Load(seconds, rate)
            await _run_waiting(publish, at_once, load)
            return before, load

        before, load = asyncio.run(main())
    spent_s, wall_s = used_s() - before, time.perf_counter() - load.began
    p99_s = sorted(load.latencies_s)[int(len(load.latencies_s) * 0.99)]
    return {"rate": load.count / wall_s, "us": spent_s / load.count * 1e6, "p99_ms": p99_s * 1e3}


# -- one subscriber, in its own process


async def _receive(url: str, events: int, connections: int) -> float:
    """Redpoll's Subscriber: the memory of each connection in bytes. Ends after `events` on the first one."""
    from redpoll_client import Subscriber

    before = rss_bytes(os.getpid())
    async with contextlib.AsyncExitStack() as stack:
        channels = []
        for _ in range(connections):
            subscriber = await stack.enter_async_context(Subscriber(url=url, queue=events + 1))
            channels.append(await stack.enter_async_context(subscriber.subscribe(f"bench-{len(channels)}")))
        connection_bytes = (rss_bytes(os.getpid()) - before) / connections
        print("ready", flush=True)
        for _ in range(events):
            (await anext(channels[0])).json()
    return connection_bytes


def _receive_pysher(url: str, events: int, connections: int) -> float:
    import pysher

    end, before = endpoint_of(url=url), rss_bytes(os.getpid())
    subscribed, done = threading.Semaphore(0), threading.Event()
    count = 0

    def received(text: str) -> None:
        nonlocal count
        json.loads(text)
        count += 1
        if count == events:
            done.set()

    def connect(number: int) -> None:
        client = pysher.Pusher(end.key, custom_host=end.host, port=end.port, secure=end.ssl)

        def connected(_: str) -> None:
            channel = client.subscribe(f"bench-{number}")
            channel.bind("pusher_internal:subscription_succeeded", lambda _: subscribed.release())
            channel.bind("n", received)

        client.connection.bind("pusher:connection_established", connected)
        client.connect()

    for number in range(connections):
        connect(number)
        subscribed.acquire()
    connection_bytes = (rss_bytes(os.getpid()) - before) / connections
    print("ready", flush=True)
    done.wait()
    return connection_bytes


def subscriber(name: str, url: str, events: int, connections: int) -> dict[str, float]:
    """Processor time for each event in µs, and memory for each connection in bytes, in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    if name == "Subscriber":
        connection_bytes = asyncio.run(_receive(url, events, connections))
    else:
        connection_bytes = _receive_pysher(url, events, connections)
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"us": spent_s / events * 1e6, "bytes": connection_bytes}


def compare_subscribers(url: str, events: int, rounds: int) -> dict[str, dict[str, float]]:
    """Both subscribers, in turns: processor time for each of `events`, which are published in batches, on one
    connection; and memory of 50 connections. The time for connecting is in it; it is the smaller the more events there
    are."""
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for name in ("Subscriber", "pysher"):
            one_connection = _subscribing(name, url, events, 1)
            many = _subscribing(name, url, 1, 50)
            runs.setdefault(name, []).append({"us": one_connection["us"], "bytes": many["bytes"]})
    return {
        name: {key: round(statistics.median(run[key] for run in results), 1) for key in ("us", "bytes")}
        for name, results in runs.items()
    }


def _subscribing(name: str, url: str, events: int, connections: int) -> dict[str, float]:
    words = ["--one", name, "--url", url, "--at", str(connections), "--events", str(events)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "bench.python_client", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            batch = [{"channel": "bench-0", "name": "n", "data": DATA}] * 10
            with Publisher(url=url) as publisher:
                for _ in range(events // 10):
                    publisher.trigger_batch(batch)
                publisher.trigger_batch(batch[: events % 10])
            result: dict[str, float] = json.loads(process.stdout.readline())
        except BaseException:
            # It would wait for events for ever.
            process.kill()
            raise
    return result


# -- all of them, in turns


def _measure(name: str, url: str, at_once: int, seconds: float, rate: float, ca: Path | None) -> dict[str, float]:
    words = ["--one", name, "--url", url, "--at", str(at_once), "--seconds", str(seconds), "--rate", str(rate)]
    environment = dict(os.environ)
    if ca is not None:
        environment |= {"SSL_CERT_FILE": str(ca), "REQUESTS_CA_BUNDLE": str(ca)}
    # `tests` is on our path, and must be on theirs.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(
        [sys.executable, "-m", "bench.python_client", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=LIMIT_S,
        check=True,
    )
    result: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return result


def _installed(name: str) -> bool:
    module = next((module for start, module in NEEDS.items() if name.startswith(start)), None)
    return module is None or importlib.util.find_spec(module) is not None


def compare(options: Any, url: str, ca: Path | None) -> dict[str, dict[str, Any]]:
    """Each publisher's figures: medians over the rounds."""
    chosen = [name for name in [*BLOCKING, *WAITING] if _installed(name)]
    if options.only:
        chosen = [name for name in chosen if name in options.only.split(",")]
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for at_once in map(int, options.at.split(",")):
            for name in chosen:
                result = _measure(name, url, at_once, options.seconds, 0, ca)
                runs.setdefault((name, str(at_once)), []).append(result)
        for name in chosen:
            result = _measure(name, url, 16, options.seconds, options.rate, ca)
            runs.setdefault((name, "rate"), []).append(result)
    figures: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    for (name, load), results in runs.items():
        keys = ("p99_ms", "us") if load == "rate" else ("rate", "us")
        figures[name][load] = {key: round(statistics.median(run[key] for run in results), 1) for key in keys}
    for name, reference in REFERENCE.items():
        if name in figures and reference in figures:
            for load, values in figures[name].items():
                values["x"] = round(figures[reference][load]["us"] / values["us"], 2)
    return figures


def _show(figures: dict[str, dict[str, Any]]) -> None:
    loads = list(next(iter(figures.values())))
    head = ["publisher", *(f"{load} at a time: 1/s, us" for load in loads if load != "rate"), "steady: p99 ms, us", "x"]
    rows = []
    for name, by_load in figures.items():
        cells = [", ".join(f"{by_load[load][key]:g}" for key in by_load[load] if key != "x") for load in loads]
        rows.append([name, *cells, " ".join(str(by_load[load].get("x", "–")) for load in loads)])
    print_table(head, rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at", default="1,16,64", help="publishes at a time")
    parser.add_argument("--rate", type=float, default=200.0, help="publishes a second of the steady load")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--only", default="", help="names of publishers, comma list")
    parser.add_argument("--one", default="", help="measures one publisher in this process, at --url")
    parser.add_argument("--url", default="")
    parser.add_argument(
        "--events", type=int, default=0, help="compares subscribers instead, each with this many events"
    )
    options = parser.parse_args()
    if options.one and options.events:
        print(json.dumps(subscriber(options.one, options.url, options.events, int(options.at))), flush=True)
        # pysher's threads never end.
        os._exit(0)
    if options.one:
        print(json.dumps(one(options.one, options.url, int(options.at), options.seconds, options.rate)))
        return
    with contextlib.ExitStack() as stack:
        ca = None
        settings: dict[str, Any] = {}
        if options.tls:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ca, key = self_signed(folder)
            settings = {"tls_port": 0, "tls_cert": ca, "tls_key": key}
        server = stack.enter_context(Server(workers=1, **settings))
        credentials = f"{server.app_key}:{server.app_secret}"
        place = f"https://{credentials}@localhost:{server.tls_url.rpartition(':')[2]}" if ca else ""
        url = f"{place or f'http://{credentials}@127.0.0.1:{server.port}'}/apps/{server.app_id}"
        if options.events:
            received = compare_subscribers(url, options.events, options.rounds)
            head = ["subscriber", "us for each event", "bytes for each connection"]
            print_table(head, [[name, *values.values()] for name, values in received.items()])
            if options.json:
                save(options.json, "python_client-subscribers", received)
            return
        figures = compare(options, url, ca)
    _show(figures)
    if options.json:
        save(options.json, "python_client-tls" if options.tls else "python_client", figures)


if __name__ == "__main__":
    main()
