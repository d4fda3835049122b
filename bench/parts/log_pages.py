"""What a call costs the event log by the size of its file's pages, in turns.

`python -m bench.parts.log_pages [--seconds 20] [--per-second 90000] [--rounds 3]` writes as many calls at a time as the
control plane does in a second of full load, and prunes as it does. `us` is processor time for each call, of all
threads, the median of the rounds. A file that exists keeps its pages, so each is made before the log opens it. The last
row is a new file, as the log makes it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

from bench.arguments import parser_of
from bench.report import save
from redpoll.store.call_batch import AppBatch, CallBatch, CallRow
from redpoll.store.eventlog import EventLog

PAGES = (4096, 8192, 16_384, 32_768, 65_536)
KEEP_CALLS, KEEP_S = 500_000, 86_400.0
AT_ONCE = 500


def made(path: Path, page_bytes: int) -> None:
    """An empty database with such pages."""
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA page_size = {page_bytes}")
        database.execute("VACUUM")


def rows(second: int) -> bytes:
    """Calls as a publish on the fast path adds them."""
    batch = AppBatch(second * 1000)
    for number in range(AT_ONCE):
        caller = "key 278d425bdf160c739803 from 192.0.2.17"
        trace_id, at_ms = f"{second * 1000:012x}{number:020x}", second * 1000
        batch.add(CallRow(trace_id, "1", None, at_ms, "new-message", ["news"], 160, caller, 200, False, at_ms * 1000))
    return bytes(batch.json[1:])


async def us_of_a_call(path: Path, seconds: int, per_second: int) -> float:
    log = await EventLog.open(path, KEEP_CALLS, KEEP_S)
    began_s = int(time.time())
    spent_s = 0.0
    for second in range(began_s, began_s + seconds):
        encoded = rows(second)
        before_s = time.process_time()
        calls = CallBatch()
        for _ in range(per_second // AT_ONCE):
            calls.add_encoded("1", encoded, AT_ONCE, second * 1000, second * 1000)
        await log.write([calls], [])
        await log.prune(second * 1000)
        spent_s += time.process_time() - before_s
    await log.close()
    return spent_s / (seconds * (per_second // AT_ONCE * AT_ONCE)) * 1e6


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--per-second", type=int, default=90_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    names = [f"{page_bytes // 1024} KiB" for page_bytes in PAGES] + ["as made"]
    rounds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, page_bytes in zip(names, (*PAGES, 0), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "events.sqlite"
                if page_bytes:
                    made(path, page_bytes)
                rounds[name].append(asyncio.run(us_of_a_call(path, options.seconds, options.per_second)))
    figures = {name: round(statistics.median(measured), 3) for name, measured in rounds.items()}
    for name, us in figures.items():
        print(f"{name:10}{us:8.3f} us")
    if options.json is not None:
        save(options.json, "log_pages", figures)


if __name__ == "__main__":
    main()
