"""What a start costs: the processor time of each process until the server is ready, beside Python's own start.

    python -m bench.parts.start                  five starts with one worker
    python -m bench.parts.start --workers 4      with four

The first starts have a new data folder each, as in a stranger's first hour and in tests; `again` is a start in a folder
that has records. `worker back` is the next process of a worker that was killed, until it is ready. `python -c pass` is
measured in turns with the starts, so that other load counts for both: read the ratios. The least of all runs counts.
Also the memory of each process (PSS: pages that processes share are counted once).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from bench.arguments import parser_of
from bench.report import machine, print_table, save
from helpers.server import Server, cpu_s

BACK_WITHIN_S = 60.0
COMMANDS = {"redpoll version": ["version"], "redpoll publish --help": ["publish", "--help"]}


def processor_ms(pid: int) -> float:
    """The processor time of a running process, with all its threads, ended ones too."""
    return cpu_s(pid) * 1e3


def pss_kb(pid: int) -> float:
    """The memory of a process, with its part of shared pages."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("Pss:"))


def command_ms(arguments: list[str]) -> float:
    """The processor time of a command of Python's."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return (usage.ru_utime + usage.ru_stime) * 1e3


def processes(server: Server) -> dict[str, list[int]]:
    return {
        "supervisor": [server.pid],
        "control": [server.control_pid],
        "worker": server.worker_pids(),
        "redis": [server.redis_pid],
    }


def of_start(server: Server, measure: Callable[[int], float]) -> dict[str, float]:
    """A measure of each kind of process, the mean of all workers."""
    return {name: sum(map(measure, pids)) / len(pids) for name, pids in processes(server).items()}


def killed_worker_ms(server: Server) -> float:
    """The processor time of the next process of a killed worker, until its ready line is in the log."""
    log = server.folder / "err"
    ready, known = log.read_text().count("worker ready"), set(server.worker_pids())
    server.kill_worker(0)
    until = time.monotonic() + BACK_WITHIN_S
    while log.read_text().count("worker ready") == ready:
        if time.monotonic() > until:
            raise RuntimeError(f"the worker wasn't back within {BACK_WITHIN_S:g} s")
        time.sleep(0.002)
    (new,) = set(server.worker_pids()) - known
    return processor_ms(new)


def run(starts: int, workers: int) -> tuple[dict[str, float], dict[str, float]]:
    """The least processor times in ms and the least memory in kB, by process."""
    times: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    for _ in range(starts):
        times["python -c pass"].append(command_ms(["-c", "pass"]))
        for name, arguments in COMMANDS.items():
            times[name].append(command_ms(["-m", "redpoll", *arguments]))
        server = Server(workers=workers)
        with server:
            first = of_start(server, processor_ms)
            for name, used in of_start(server, pss_kb).items():
                memory[name].append(used)
            times["worker back"].append(killed_worker_ms(server))
            server.stop()
            server.start()
            again = of_start(server, processor_ms)
        for name, used in first.items():
            times[name].append(used)
        times["control, again"].append(again["control"])
        times["a start"].append(sum(used * (workers if name == "worker" else 1) for name, used in first.items()))
    return {name: min(values) for name, values in times.items()}, {name: min(values) for name, values in memory.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--starts", type=int, default=5, help="how many servers are started")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    print(machine())
    times, memory = run(options.starts, options.workers)
    least = times.pop("python -c pass")
    # Redis isn't Python.
    floor = {"a start": least * (2 + options.workers)}
    rows = [
        (
            name,
            f"{used:.0f}",
            f"{used / floor.get(name, least):.1f}",
            f"{memory[name] / 1024:.1f}" if name in memory else "",
        )
        for name, used in times.items()
    ]
    print(f"python -c pass: {least:.1f} ms. A start beside as many of these as it has processes of ours.\n")
    print_table(("process", "processor ms", "× python -c pass", "PSS MB"), rows)
    if options.json:
        figures = {"pass_ms": least, "times_ms": times, "memory_kb": memory, "workers": options.workers}
        save(options.json, "start", figures)


if __name__ == "__main__":
    main()
