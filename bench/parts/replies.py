"""What it costs to hand out Redis' replies and messages, beside the same loop in Python, in turns.

`python -m bench.parts.replies [--items 500] [--rounds 300]` has hiredis parse so many items, and hands them out: the
replies of publishes to what answers these, any other replies and messages to a function. ns of processor time for each
item, the fastest of all rounds; parsing is part of it, and so is the answer to a publish.
"""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any

import hiredis

from bench.arguments import parser_of
from bench.report import save
from redpoll._replies import hand_out

AT_ONCE = 16
REPLY = b":0\r\n"
MESSAGE = b">3\r\n$7\r\nmessage\r\n$5\r\ntopic\r\n$100\r\n" + b"x" * 100 + b"\r\n"
FAST_PUBLISHING = Path(__file__).parents[2] / "tests" / "ext" / "fast_publishing.py"

Done = Callable[[Any], None]


class Receiver:
    """What a connection does with what hiredis has parsed."""

    def __init__(self) -> None:
        self.lost = False
        self.pending: deque[Done] = deque()
        self._nothing = object()
        reader = hiredis.Reader(notEnoughData=self._nothing)
        self.feed, self._gets = reader.feed, reader.gets

    def compiled(self) -> None:
        while hand_out(self, self._gets, self._nothing, self.pending, self.message, AT_ONCE):
            pass

    def python(self) -> None:
        gets, pending, message, nothing = self._gets, self.pending, self.message, self._nothing
        while True:
            item = gets()
            if type(item) is hiredis.PushNotification:
                kind = item[0]
                if kind == b"message" or kind == b"smessage":
                    message(item[1], item[2])
                else:
                    self.pushed(item)
            elif item is nothing:
                break
            elif type(item) is hiredis.ReplyError or not pending:
                self.failed(item)
            else:
                pending.popleft()(item)
            if self.lost:
                break

    def message(self, topic: bytes, payload: bytes) -> None:
        pass

    def pushed(self, push: list[Any]) -> None:
        raise AssertionError(push)

    def failed(self, reply: Any) -> None:
        raise AssertionError(reply)


def fast_publishing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fast_publishing", FAST_PUBLISHING)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def publishes(items: int) -> Callable[[], Done]:
    """Makes what waits for the replies of so many publishes."""
    parts = fast_publishing()
    requests = b"".join(parts.message(number, parts.body()) for number in range(1, items + 1))

    def waiting() -> Done:
        control = parts.Control()
        control.take(requests)
        ((_, published),) = control.published
        done: Done = published
        return done

    return waiting


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    items: int = options.items
    # The bytes of an item, and what waits for such items.
    kinds: dict[str, tuple[bytes, Callable[[], Done] | None]] = {
        "replies of publishes": (REPLY, publishes(items)),
        "other replies": (REPLY, lambda: lambda reply: None),
        "messages": (MESSAGE, None),
    }
    receiver = Receiver()
    figures: dict[str, dict[str, float]] = {}
    for name, (data, waiting) in kinds.items():
        best = {"compiled": float("inf"), "python": float("inf")}
        for _ in range(options.rounds):
            for way, take in (("compiled", receiver.compiled), ("python", receiver.python)):
                receiver.feed(data * items)
                if waiting is not None:
                    receiver.pending.extend(repeat(waiting(), items))
                began = time.thread_time_ns()
                take()
                best[way] = min(best[way], (time.thread_time_ns() - began) / items)
        figures[name] = {way: round(ns, 1) for way, ns in best.items()}
        print(f"{name:24}" + "".join(f"{way:>10} {ns:6.1f} ns" for way, ns in figures[name].items()))
    if options.json is not None:
        save(options.json, "replies", figures)


if __name__ == "__main__":
    main()
