"""What tests ask of a server, fake or real: what was published, and what comes within a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from redpoll.testing.recorder import ANYTHING, WAIT_S, Published, Recorder

__all__ = ["Expectations"]


class Expectations:
    """`host`, `port`, `app_id`, `app_key` and `app_secret` are what a client or a back end is configured with."""

    host: str
    port: int
    app_id: str
    app_key: str
    app_secret: str

    def __init__(self) -> None:
        self._recorder = Recorder()

    @property
    def pusher_url(self) -> str:
        """`http://KEY:SECRET@HOST:PORT/apps/ID`, as server libraries read it from PUSHER_URL."""
        credentials = f"{quote(self.app_key, safe='')}:{quote(self.app_secret, safe='')}"
        return f"http://{credentials}@{self._address}/apps/{self.app_id}"

    @property
    def url(self) -> str:
        """`ws://HOST:PORT/app/KEY`, the address that clients connect to."""
        return f"ws://{self._address}/app/{self.app_key}"

    @property
    def _address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def published(self) -> list[Published]:
        """All events so far, one for each channel, in order: those of the HTTP API and those of clients."""
        return self._recorder.all()

    def wait(
        self,
        name: str | None = None,
        channel: str | None = None,
        *,
        data: object = ANYTHING,
        count: int = 1,
        timeout_s: float = WAIT_S,
    ) -> Published:
        """Blocks until `count` such events were published, those before this call included; returns the last of them.

        `data` is compared with the decoded data, and with the string. Raises AssertionError at the deadline.
        """
        has_come = self._has_come(name, channel, data, count)
        if not self._recorder.wait(has_come, timeout_s):
            raise self._missing(name, channel, data, count, timeout_s)
        return self._recorder.matching(name, channel, data)[count - 1]

    async def wait_for(
        self,
        name: str | None = None,
        channel: str | None = None,
        *,
        data: object = ANYTHING,
        count: int = 1,
        timeout_s: float = WAIT_S,
    ) -> Published:
        """As `wait`, in an event loop."""
        has_come = self._has_come(name, channel, data, count)
        if not await self._recorder.wait_for(has_come, timeout_s):
            raise self._missing(name, channel, data, count, timeout_s)
        return self._recorder.matching(name, channel, data)[count - 1]

    def assert_published(
        self, name: str | None = None, channel: str | None = None, *, data: object = ANYTHING, times: int | None = None
    ) -> Published:
        """Raises AssertionError unless such an event was published; `times`: exactly so often. Returns the last one."""
        matching = self._recorder.matching(name, channel, data)
        if (times is None and not matching) or (times is not None and len(matching) != times):
            often = "" if times is None else f" {times} times, but {len(matching)} times"
            raise AssertionError(f"{_wanted(name, channel, data)} was not published{often}; {self._recorder.shown()}")
        if not matching:
            raise ValueError("times=0: use assert_not_published")
        return matching[-1]

    def assert_not_published(
        self, name: str | None = None, channel: str | None = None, *, data: object = ANYTHING
    ) -> None:
        """Raises AssertionError if such an event was published. Without arguments: if any was."""
        if self._recorder.matching(name, channel, data):
            raise AssertionError(f"{_wanted(name, channel, data)} was published; {self._recorder.shown()}")

    def _has_come(self, name: str | None, channel: str | None, data: object, count: int) -> Callable[[], bool]:
        return lambda: len(self._recorder.matching(name, channel, data)) >= count

    def _missing(
        self, name: str | None, channel: str | None, data: object, count: int, timeout_s: float
    ) -> AssertionError:
        often = "" if count == 1 else f" {count} times"
        text = f"{_wanted(name, channel, data)} was not published{often} within {timeout_s:g} s"
        return AssertionError(f"{text}; {self._recorder.shown()}")


def _wanted(name: str | None, channel: str | None, data: Any) -> str:
    parts = ["any event" if name is None else f"event {name!r}"]
    if channel is not None:
        parts.append(f"on {channel!r}")
    if data is not ANYTHING:
        parts.append(f"with {data!r}")
    return " ".join(parts)
