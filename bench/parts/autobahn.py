"""Runs Autobahn's fuzzing client, the common test suite for WebSocket servers, against the engine.

`python -m bench.parts.autobahn [--cases 1.* 2.* …] [--engine picows] [--tls]` makes a virtual environment of Python 2.7
or PyPy 2.7 with the test suite in build/autobahn (once), starts bench/parts/echo_server.py, runs sections 1 to 7, 9 and
10, and prints the failed cases. With `--tls` a relay of this script encrypts for the test suite, whose Python may be
too old for our suites. Exit codes: 1 if a case fails, 2 if there is no Python 2.7. Reports:
build/autobahn/reports/index.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

from bench.arguments import parser_of
from bench.report import save
from helpers.certs import self_signed

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "autobahn"
SECTIONS = ["1.*", "2.*", "3.*", "4.*", "5.*", "6.*", "7.*", "9.*", "10.*"]
# Autobahn's outcomes of cases that haven't failed. NON-STRICT is correct, but later than possible.
PASSED = {"OK", "NON-STRICT", "INFORMATIONAL"}
# Chapter 9 sends messages of 16 MiB.
MAX_MESSAGE_BYTES = 16 << 20


def python27() -> tuple[str, dict[str, str]]:
    """A Python 2.7 and the environment to run it in. PyPy first: it is several times faster."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    candidates = [(os.environ.get("REDPOLL_PYTHON27", ""), {})]
    candidates += [
        ("pypy", {}),
        ("pypy2.7", {}),
        ("python2.7", {}),
        ("python2.7", {"PYENV_VERSION": "2.7.18"}),
    ]
    for command, extra in candidates:
        path = shutil.which(command) if command else None
        if path is None:
            continue
        probe = [path, "-c", "import sys; sys.exit(sys.version_info[:2] != (2, 7))"]
        if subprocess.run(probe, env=environment | extra, capture_output=True).returncode == 0:
            return path, environment | extra
    print("no Python 2.7: install pypy or python2.7, or name one in REDPOLL_PYTHON27", file=sys.stderr)
    sys.exit(2)


def wstest() -> Path:
    """The test suite's command, installed on the first call."""
    command = FOLDER / "venv" / "bin" / "wstest"
    if command.exists():
        return command
    python, environment = python27()
    FOLDER.mkdir(parents=True, exist_ok=True)
    tools = FOLDER / "tools"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The last virtualenv that runs on 2.7, in its own folder, so that the Python isn't changed.
    subprocess.run([*pip, "--target", tools, "virtualenv==20.15.1"], env=environment, check=True)
    made = [python, "-m", "virtualenv", "--quiet", FOLDER / "venv"]
    subprocess.run(made, env=environment | {"PYTHONPATH": str(tools)}, check=True)
    install = [FOLDER / "venv" / "bin" / "pip", "install", "--quiet", "autobahntestsuite"]
    subprocess.run(install, env=environment, check=True)
    return command


def run(cases: list[str], port: int) -> dict[str, dict[str, str]]:
    """Case id -> Autobahn's outcome for its behaviour and for its close."""
    reports = FOLDER / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    spec = {
        "outdir": str(reports),
        "servers": [{"agent": "redpoll", "url": f"ws://127.0.0.1:{port}"}],
        "cases": cases,
        "exclude-cases": [],
        "exclude-agent-cases": {},
    }
    path = FOLDER / "fuzzingclient.json"
    path.write_text(json.dumps(spec))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with (FOLDER / "wstest.log").open("w") as log:
        command = [wstest(), "-m", "fuzzingclient", "-s", path]
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
    return json.loads((reports / "index.json").read_text())["redpoll"]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes one direction on, to its end."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _relay(port: int, context: ssl.SSLContext, started: Future[int]) -> None:
    """Serves plain connections by TLS connections to `port`."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
        # Autobahn counts how the server closes: the end of TLS becomes the end of TCP.
        await asyncio.gather(_pump(reader, ours), _pump(theirs, writer))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    started.set_result(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def relayed(port: int, cert: Path) -> int:
    """The port of a relay to `port`, until the end of this process."""
    started: Future[int] = Future()
    context = ssl.create_default_context(cafile=cert)
    threading.Thread(target=lambda: asyncio.run(_relay(port, context, started)), daemon=True).start()
    return started.result(30)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--cases", nargs="+", default=SECTIONS)
    parser.add_argument("--engine", choices=["redpoll", "picows"], default="redpoll")
    arguments = parser.parse_args()
    wstest()
    command = [sys.executable, "-m", "bench.parts.echo_server", f"--engine={arguments.engine}"]
    command.append(f"--max-message-bytes={MAX_MESSAGE_BYTES}")
    if arguments.tls:
        cert, key = self_signed(FOLDER)
        command += ["--tls", str(cert), str(key)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().split()[1])
        if arguments.tls:
            port = relayed(port, cert)
        started = time.monotonic()
        results = run(arguments.cases, port)
        took_s = time.monotonic() - started
        alive = server.poll() is None
    finally:
        server.kill()
        server.wait()
    verdicts = Counter(result["behavior"] for result in results.values())
    closes = Counter(result["behaviorClose"] for result in results.values())
    failed = {
        case: result
        for case, result in results.items()
        if result["behavior"] not in PASSED or result["behaviorClose"] not in PASSED
    }
    print(f"{len(results)} cases in {took_s:.0f} s: {dict(verdicts)}; closes: {dict(closes)}")
    for case, result in sorted(failed.items(), key=lambda item: [int(part) for part in item[0].split(".")]):
        print(f"FAILED {case}: {result['behavior']}, close {result['behaviorClose']}")
    if not alive:
        print("FAILED: the server is gone")
    if arguments.json is not None:
        engine = {"engine": arguments.engine, "tls": arguments.tls}
        figures = {**engine, "cases": len(results), "failed": len(failed), **dict(verdicts)}
        save(arguments.json, "autobahn", {**figures, "seconds": round(took_s)}, failed_cases=sorted(failed))
    sys.exit(1 if failed or not alive or not results else 0)


if __name__ == "__main__":
    main()
