"""A thread with an event loop of its own, so that tests without asyncio can use the server too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

__all__ = ["LoopThread"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Against hanging only: everything that runs in the loop takes milliseconds.
_WITHIN_S = 30.0


class LoopThread:
    """`start` begins the thread, `stop` ends it and waits for its end. `call` runs a function in its loop."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None

    @property
    def running(self) -> bool:
        return self._loop is not None

    def start(self, opened: Callable[[], Awaitable[None]], closed: Callable[[], Awaitable[None]]) -> None:
        """Begins, and returns when `opened` has returned; raises what it raises. `closed` runs last in the loop."""
        if self._thread is not None:
            raise RuntimeError("the server runs already")
        begun: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened, closed, begun), name="redpoll.testing", daemon=True
        )
        self._thread.start()
        try:
            begun.result(_WITHIN_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        loop, ending = self._loop, self._ending
        if loop is not None and ending is not None:
            loop.call_soon_threadsafe(ending.set)
        thread.join(_WITHIN_S)
        if thread.is_alive():
            raise TimeoutError(f"the fake server's thread did not end within {_WITHIN_S:g} s")

    def call(self, function: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> _T:
        """Runs it in the loop, and returns its result or raises what it raises."""
        loop = self._loop
        if loop is None:
            raise RuntimeError("the server isn't running: use `with FakeServer() as server:`, or call start()")
        if threading.current_thread() is self._thread:
            return function(*args, **more)
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **more))
            except BaseException as error:
                future.set_exception(error)

        loop.call_soon_threadsafe(run)
        return future.result(_WITHIN_S)

    def _run(
        self,
        opened: Callable[[], Awaitable[None]],
        closed: Callable[[], Awaitable[None]],
        begun: Future[None],
    ) -> None:
        async def main() -> None:
            loop: Any = asyncio.get_running_loop()
            self._ending = asyncio.Event()
            self._loop = loop
            try:
                try:
                    await opened()
                except BaseException as error:
                    begun.set_exception(error)
                    return
                begun.set_result(None)
                await self._ending.wait()
            finally:
                self._loop = None
                await closed()

        # Not the policy's loop, which an application may have set to another one.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(main())
