"""`redpoll webhook listen`: pulls deliveries, runs a command for each, and acknowledges those that are done."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from redpoll.cli.common import safe
from redpoll.cli.remote import RemoteError, call, session
from redpoll.text import json_text

if TYPE_CHECKING:
    import aiohttp

    from redpoll.doctor.target import Target

__all__ = ["CannotStart", "Listener"]

# How long the server waits for a delivery, what one acknowledgement may name, how many deliveries are known as done,
# and the pauses after errors.
_POLL_S: Final = 30
_MAX_IDS: Final = 1_000
_MAX_KNOWN: Final = 10_000
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
_INTERRUPTED: Final = 130


class CannotStart(Exception):
    """The command can't be started. The text says why."""


class Listener:
    """Pulls the deliveries of `target`, and runs `command` for each, at most `jobs` at a time.

    Each is acknowledged when its command has ended well; those that end while an acknowledgement is under way share the
    next one. A delivery whose command runs or has ended well isn't run again, also if its acknowledgement was lost.
    """

    def __init__(
        self, target: Target, command: Sequence[str], endpoint: str | None, jobs: int, token: str, as_json: bool
    ) -> None:
        self._target = target
        self._command = command
        self._params = {"wait": str(_POLL_S)} | ({"endpoint": endpoint} if endpoint else {})
        self._jobs = jobs
        self._token = token
        self._as_json = as_json
        # By the id of the delivery.
        self._running: dict[str, asyncio.Task[None]] = {}
        # Those that ended well: not acknowledged yet, and the last ones.
        self._done: list[str] = []
        self._known: deque[str] = deque(maxlen=_MAX_KNOWN)
        self._has_done = asyncio.Event()
        self._stopping = asyncio.Event()
        self._fault: RemoteError | CannotStart | None = None
        self._interrupted = False

    async def run(self) -> int:
        """Runs until a signal ends it, and returns the exit code. Raises RemoteError if the server refuses, CannotStart
        if the command can't be started."""
        work = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(number, self._stop, work)
        async with session() as http:
            click.echo(f"redpoll: listening at {self._target.origin}; Ctrl-C ends it", err=True)
            acknowledging = asyncio.create_task(self._acknowledge_repeatedly(http))
            try:
                await self._pull_repeatedly(http)
                await asyncio.gather(*self._running.values())
            except asyncio.CancelledError:
                if not self._interrupted:
                    raise
                return _INTERRUPTED
            finally:
                await _cancel([acknowledging, *self._running.values()])
            if not isinstance(self._fault, RemoteError):
                await self._acknowledge(http)
        if self._fault is not None:
            raise self._fault
        return 0

    def _stop(self, work: asyncio.Task[Any] | None) -> None:
        if self._stopping.is_set() and work is not None:
            self._interrupted = True
            work.cancel()
        elif self._running:
            click.echo("redpoll: waiting for the commands that run; a second Ctrl-C ends them", err=True)
        self._stopping.set()

    def _fail(self, fault: RemoteError | CannotStart) -> None:
        """Ends as after a signal, with this fault."""
        self._fault = self._fault or fault
        self._stopping.set()

    # -- the server

    async def _pull_repeatedly(self, http: aiohttp.ClientSession) -> None:
        while not self._stopping.is_set():
            if len(self._running) >= self._jobs:
                await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            await self._patiently(lambda: self._pull(http))

    async def _acknowledge_repeatedly(self, http: aiohttp.ClientSession) -> None:
        while True:
            await self._has_done.wait()
            self._has_done.clear()
            await self._patiently(lambda: self._acknowledge(http))

    async def _patiently(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Asks the server until it answers, or this is to stop. Another error than one that may pass ends all."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await ask()
            except RemoteError as error:
                if error.status and error.status != 429 and error.status < 500:
                    return self._fail(error)
                if self._stopping.is_set():
                    return None
                click.echo(f"redpoll: {error}; next try in {pause_s:g} s", err=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _pull(self, http: aiohttp.ClientSession) -> None:
        """Starts the next deliveries, as many as jobs are free; none when it is to stop."""
        params = {**self._params, "limit": str(self._jobs - len(self._running))}
        asked = asyncio.ensure_future(
            call(http, self._target, "GET", "/webhooks/stream", params, token=self._token, waits_s=float(_POLL_S))
        )
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((asked, stop), return_when=asyncio.FIRST_COMPLETED)
            deliveries = (await asked).body["deliveries"] if asked.done() else []
        finally:
            stop.cancel()
            asked.cancel()
        for delivery in deliveries:
            self._begin(delivery)

    async def _acknowledge(self, http: aiohttp.ClientSession) -> None:
        while self._done:
            ids = self._done[:_MAX_IDS]
            body = json.dumps({"ids": ids}).encode()
            await call(http, self._target, "POST", "/webhooks/ack", body=body, token=self._token)
            del self._done[: len(ids)]

    # -- the commands

    def _begin(self, delivery: dict[str, Any]) -> None:
        delivery_id = delivery["id"]
        if delivery_id in self._known:
            self._acknowledge_later(delivery_id)
        elif delivery_id not in self._running:
            task = self._running[delivery_id] = asyncio.create_task(self._handle(delivery))
            task.add_done_callback(lambda _: self._running.pop(delivery_id))

    def _acknowledge_later(self, delivery_id: str) -> None:
        self._done.append(delivery_id)
        self._has_done.set()

    async def _handle(self, delivery: dict[str, Any]) -> None:
        began_s = time.monotonic()
        headers = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in delivery["headers"].items()}
        headers["CONTENT_TYPE"] = headers.pop("HTTP_CONTENT_TYPE", "")
        try:
            # In a group of its own: Ctrl-C is for us.
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, env={**os.environ, **headers}, process_group=0
            )
        except OSError as error:
            self._fail(CannotStart(f"{safe(self._command[0])} can't be started: {error.strerror}"))
            return
        try:
            await process.communicate(delivery["body"].encode())
        finally:
            if process.returncode is None:
                _terminate(process)
        if process.returncode == 0:
            self._known.append(delivery["id"])
            self._acknowledge_later(delivery["id"])
        self._print(delivery, process.returncode, time.monotonic() - began_s)

    def _print(self, delivery: dict[str, Any], code: int | None, took_s: float) -> None:
        shown = {name: delivery[name] for name in ("id", "event", "channel", "attempt")}
        if self._as_json:
            click.echo(json_text.compact({**shown, "exit": code, "took_ms": round(took_s * 1_000)}))
            return
        end = "done" if code == 0 else f"exit {code}, it comes again"
        words = safe(f"{shown['id']}  {shown['event']}  {shown['channel']}", 400)
        click.echo(f"{words}  attempt {shown['attempt']}  {took_s:.2f} s  {end}")


def _terminate(process: asyncio.subprocess.Process) -> None:
    """Ends the command, and what it has started in its group."""
    if sys.platform == "win32":
        process.terminate()
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
