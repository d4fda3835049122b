"""Measures the passes of an event loop by processor time, inside a server process that a bench started.

Python imports this module at its start when this folder is on PYTHONPATH (bench/load/passes.py puts it there). With
LOOP_PROFILE=FOLDER in the environment, each redpoll process that runs uvloop writes lines of JSON to FOLDER/<pid>, at
most four a second, with the longest pass since the line before.

A pass is measured by the thread's own clock: time in which another process had the processor doesn't count, as it does
in `redpoll_loop_lag_seconds`. A timer that is due every ms reads that clock, so what it finds is a pass and 1 ms at
most. `parts` names the callbacks that ran in that pass, with their processor time.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_LINE_EVERY_S = 0.25
_PERIOD_S = 0.001
# Shorter callbacks aren't named.
_NAMED_S = 0.0002


def _install(folder: str) -> None:
    import asyncio
    import gc
    import json
    from time import monotonic, thread_time

    import uvloop

    # What ran since the timer ran last, with its processor time.
    ran: list[tuple[Any, float]] = []

    def measured(callback: Any) -> Any:
        def run(*values: Any) -> Any:
            began = thread_time()
            try:
                return callback(*values)
            finally:
                ran.append((callback, thread_time() - began))

        return run

    class Loop(uvloop.Loop):
        watched = False

        def call_soon(self, callback: Any, *values: Any, context: Any = None) -> Any:
            return super().call_soon(measured(callback), *values, context=context)

        def call_later(self, delay: float, callback: Any, *values: Any, context: Any = None) -> Any:
            return super().call_later(delay, measured(callback), *values, context=context)

        def call_at(self, when: float, callback: Any, *values: Any, context: Any = None) -> Any:
            return super().call_at(when, measured(callback), *values, context=context)

        def add_reader(self, fd: Any, callback: Any, *values: Any) -> Any:
            return super().add_reader(fd, measured(callback), *values)

        def run_forever(self) -> None:
            if not self.watched:
                self.watched = True
                watch(self)
            super().run_forever()

    def name_of(callback: Any) -> str:
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, asyncio.Task):
            return f"task {owner.get_coro().__qualname__}"
        name = getattr(callback, "__qualname__", None) or type(callback).__name__
        return name if "." in name or owner is None else f"{type(owner).__name__}.{name}"

    def watch(loop: Loop) -> None:
        out = open(os.path.join(folder, str(os.getpid())), "a", buffering=1)  # noqa: SIM115
        begun: list[float] = []

        def garbage_collected(phase: str, info: Any) -> None:
            if phase == "start":
                begun.append(thread_time())
            elif begun:
                ran.append((garbage_collected, thread_time() - begun.pop()))

        gc.callbacks.append(garbage_collected)
        # uvloop calls a protocol itself; this one's bytes come from Redis.
        connection_class = sys.modules["redpoll.cluster.redis.connection"].RedisConnection
        received = measured(connection_class.buffer_updated)
        connection_class.buffer_updated = lambda connection, count: received(connection, count)
        longest = longest_wall = 0.0
        passes_over = 0
        parts: dict[str, float] = {}
        cpu, wall, written = thread_time(), monotonic(), monotonic()

        def look() -> None:
            nonlocal longest, longest_wall, passes_over, parts, cpu, wall, written
            cpu_now, wall_now = thread_time(), monotonic()
            used = cpu_now - cpu
            passes_over += used > 0.02
            longest_wall = max(longest_wall, wall_now - wall)
            if used > longest:
                longest, parts = used, {}
                for callback, took in ran:
                    if took > _NAMED_S:
                        parts[name_of(callback)] = parts.get(name_of(callback), 0.0) + took
            ran.clear()
            if wall_now - written >= _LINE_EVERY_S:
                line = {
                    "from": written,
                    "at": wall_now,
                    "ms": round(longest * 1000, 2),
                    "wall_ms": round(longest_wall * 1000, 2),
                    "over_20_ms": passes_over,
                    "parts": {name: round(took * 1000, 2) for name, took in parts.items()},
                }
                out.write(json.dumps(line) + "\n")
                longest = longest_wall = 0.0
                passes_over, written = 0, wall_now
            # From here on, so that writing a line is in no pass.
            cpu, wall = thread_time(), monotonic()
            uvloop.Loop.call_later(loop, _PERIOD_S, look)

        uvloop.Loop.call_later(loop, _PERIOD_S, look)

    def run(main: Any) -> Any:
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(main)

    uvloop.run = run


_folder = os.environ.get("LOOP_PROFILE")
if _folder and "--pipe" in sys.orig_argv:
    _install(_folder)
