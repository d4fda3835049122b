"""What control asks all workers at once: a message on `sys`, answers in a list of its own.

For the rare things that only who has the sockets can do or know; counts and members stand in Redis. Nobody is
waited for who can't answer: a worker that was given up, an earlier name of one that lives (cluster.md 7).
"""

import asyncio
import secrets
from typing import Any, Final

import hiredis
import msgspec

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown

__all__ = ["Survey"]

# The answer to who asked us is to be there after 2 s.
ANSWER_S: Final = 2.0
_KEPT_S: Final = 10
_FIRST_LOOK_S: Final = 0.002
_LONGEST_LOOK_S: Final = 0.05


class Survey:
    """Control's `ask`, and the worker's `answer` to what comes over `sys`."""

    def __init__(self, link: Link, keys: Keys, *, answer_s: float = ANSWER_S) -> None:
        self._link = link
        self._keys = keys
        self._answer_s = answer_s

    async def ask(self, what: str, **about: Any) -> dict[str, Any]:
        """Tells every worker `{"ask": what, "id": …, **about}` and returns the answers by W, when all have
        answered who live. Raises Unavailable: some didn't in time, though they may have done what was asked."""
        question = secrets.token_hex(8)
        answers: dict[str, Any] = {}
        silent: set[str] = set()
        try:
            async with asyncio.timeout(self._answer_s):
                await self._link.wait_up()
                message = msgspec.json.encode({"ask": what, "id": question, **about})
                await self._link.ask(self._keys.publish, self._keys.sys, message)
                look_s = _FIRST_LOOK_S
                while True:
                    told, beats = await asyncio.gather(
                        self._link.ask(b"LRANGE", self._keys.answers(question), 0, -1),
                        self._link.ask(b"HGETALL", self._keys.beat),
                    )
                    answers = dict(msgspec.json.decode(each) for each in told)
                    silent = _living(beats) - {_process(w) for w in answers}
                    if not silent:
                        return answers
                    await asyncio.sleep(look_s)
                    look_s = min(2 * look_s, _LONGEST_LOOK_S)
        except TimeoutError:
            who = ", ".join(sorted(silent)) or "Redis"
            raise Unavailable(f"no answer from {who} within {self._answer_s:g} s") from None
        except (LinkDown, hiredis.ReplyError) as error:
            raise Unavailable(str(error)) from None

    def answer(self, question: str, w: str, answer: Any) -> None:
        """The worker's part: `question` is the `id` that came over `sys`, `answer` anything that JSON knows.
        Every worker answers every question, also if there was nothing to do."""
        key = self._keys.answers(question)
        self._link.call(b"RPUSH", key, msgspec.json.encode((w, answer)))
        self._link.call(b"EXPIRE", key, _KEPT_S)


def _process(w: str) -> str:
    # <run>.<k>: whatever name a process has by now, its sockets are the same.
    return w.rpartition(".")[0]


def _living(beats: dict[bytes, bytes]) -> set[str]:
    newest: dict[str, tuple[int, bool]] = {}
    for name, beat in beats.items():
        process, _, n = name.decode().rpartition(".")
        newest[process] = max(newest.get(process, (-1, False)), (int(n), beat != b"-1"))
    return {process for process, (_, alive) in newest.items() if alive}
