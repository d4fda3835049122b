"""Puts the messages of a session's requests into the order in which its page sent them.

pusher-js sends each message by a request of its own (`xhr_send`), and a browser sends them over several connections,
so they overtake each other. Each request of a page has a number `n`, one more than the one before. The requests for
streams and polls have numbers of the same row, which this session sees, and so have those of other sessions of the
page, which it doesn't. So a gap is waited for, but not for long.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["SendOrder"]

# What may wait for a gap.
_MAX_AHEAD: Final = 64
_MAX_AHEAD_BYTES: Final = 256 * 1024
# Numbers of the latest requests: a browser that loses a kept connection sends its request again.
_MAX_DONE: Final = 64

Messages = list[str]


class SendOrder:
    """`last`: all requests up to this number came, or are waited for no longer."""

    __slots__ = ("_ahead", "_bytes", "_done", "last")

    def __init__(self, last: int) -> None:
        self.last = last
        # Beyond the gap, by number: messages, or None for a stream or poll.
        self._ahead: dict[int, Messages | None] = {}
        self._bytes = 0
        self._done: deque[int] = deque(maxlen=_MAX_DONE)

    def waits(self, number: int) -> bool:
        """The request with this number came, and an earlier one hasn't."""
        return number in self._ahead

    def note(self, number: int | None) -> list[Messages]:
        """A request without messages has this number. Returns what may be delivered now."""
        if number is not None and number > self.last:
            self._ahead.setdefault(number, None)
        return self._advance()

    def take(self, number: int | None, messages: Messages) -> list[Messages]:
        """Take a request's messages. Returns what may be delivered now, in order: these, others that waited for them,
        or nothing."""
        if number is None:
            return [messages]
        if number in self._done or self._ahead.get(number) is not None:
            return []
        if number <= self.last:
            self._done.append(number)
            return [messages]
        self._ahead[number] = messages
        self._bytes += 1 + sum(map(len, messages))
        if len(self._ahead) > _MAX_AHEAD or self._bytes > _MAX_AHEAD_BYTES:
            return self.give_up()
        return self._advance()

    def give_up(self, until: int | None = None) -> list[Messages]:
        """Wait no longer for requests before the number `until`; None: for any. Returns what may be delivered now."""
        if until is None:
            until = max(self._ahead, default=self.last)
        self.last = max(self.last, until)
        ready = [self._deliver(number) for number in sorted(self._ahead) if number <= until]
        return [messages for messages in ready if messages is not None] + self._advance()

    def _advance(self) -> list[Messages]:
        ready: list[Messages] = []
        while self.last + 1 in self._ahead:
            self.last += 1
            messages = self._deliver(self.last)
            if messages is not None:
                ready.append(messages)
        if len(self._ahead) > _MAX_AHEAD:
            ready += self.give_up()
        return ready

    def _deliver(self, number: int) -> Messages | None:
        messages = self._ahead.pop(number)
        if messages is not None:
            self._bytes -= 1 + sum(map(len, messages))
            self._done.append(number)
        return messages
