"""A bench that is ended by a signal stops the servers that it started."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCH = """
import asyncio, contextlib
import uvloop
from bench.arguments import parser_of

@contextlib.contextmanager
def server():
    try:
        yield
    finally:
        print("stopping", flush=True)
        input()
        print("stopped", flush=True)

async def measure():
    print("ready", flush=True)
    await asyncio.Event().wait()

parser_of("A bench.").parse_args()
with server():
    uvloop.run(measure())
"""


def test_sigterm_stops_what_a_bench_started() -> None:
    command = [sys.executable, "-c", BENCH]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline() == "ready\n"
        bench.send_signal(signal.SIGTERM)
        assert bench.stdout.readline() == "stopping\n"
        # Timeout of coreutils sends it to the process and to its group.
        bench.send_signal(signal.SIGTERM)
        output, _ = bench.communicate("\n")
    assert (output, bench.returncode) == ("stopped\n", 128 + signal.SIGTERM)
