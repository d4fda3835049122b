"""Asks all workers a question and collects their answers.

The question is a message on `sys`; each answer is an entry of a list in Redis that belongs to the question. Surveys are
for rare requests about sockets, such as closing a user's connections; counts and members are in Redis. Dead workers,
earlier names of living workers, and workers that are out of service and have no sockets aren't waited for.

The asker reads the list every 2 to 50 ms, together with the heartbeats, until all living workers have answered. It
can't wait for pushes instead: a worker that dies sends none, and only heartbeats show that it needn't be waited for.
A blocking read (BLPOP) would hold up every other command on the process's one connection to Redis.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import Any, Final

import hiredis
import msgspec

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.nodes import Node
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown

__all__ = ["Survey", "delays_s", "read_answers", "send_answer"]

# The HTTP API answers within about 2 s.
ANSWER_S: Final = 2.0
_LIFETIME_S: Final = 10
# Between two reads of the answers; doubles from one to the other.
_FIRST_DELAY_S: Final = 0.002
_MAX_DELAY_S: Final = 0.05


def delays_s() -> Iterator[float]:
    """The pauses between two reads of the answers, without an end."""
    delay_s = _FIRST_DELAY_S
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, _MAX_DELAY_S)


async def read_answers(link: Link, keys: Keys, question: str) -> dict[str, msgspec.Raw]:
    """The answers so far, as JSON, by who answered. Raises LinkDown or ReplyError."""
    listed = await link.ask(b"LRANGE", keys.answers(question), 0, -1)
    return dict(msgspec.json.decode(answer, type=tuple[str, msgspec.Raw]) for answer in listed)


def send_answer(link: Link, keys: Keys, question: str, answerer: str, answer: Any) -> None:
    key = keys.answers(question)
    link.call(b"RPUSH", key, msgspec.json.encode((answerer, answer)))
    link.call(b"EXPIRE", key, _LIFETIME_S)


class Survey:
    """Control calls `ask`; a worker calls `answer` for each question that arrives on `sys`."""

    def __init__(self, link: Link, keys: Keys, *, answer_s: float = ANSWER_S) -> None:
        self._link = link
        self._keys = keys
        self._answer_s = answer_s

    async def ask(self, what: str, **about: Any) -> dict[str, Any]:
        """Publishes `{"ask": what, "id": …, **about}` on `sys`. Returns the answers by W when every living worker
        process has answered. Raises Unavailable if some didn't answer in time; they may have done what was asked."""
        question = secrets.token_hex(8)
        answers: dict[str, Any] = {}
        silent: set[str] = set()
        try:
            async with asyncio.timeout(self._answer_s):
                await self._link.wait_up()
                message = msgspec.json.encode({"ask": what, "id": question, **about})
                await self._link.ask(self._keys.publish, self._keys.sys, message)
                for delay_s in delays_s():
                    raw, beats = await asyncio.gather(
                        read_answers(self._link, self._keys, question), self._link.ask(b"HGETALL", self._keys.beat)
                    )
                    answers = {w: msgspec.json.decode(answer) for w, answer in raw.items()}
                    silent = _living(beats) - {_process(w) for w in answers}
                    if silent and delay_s == _MAX_DELAY_S:
                        silent -= await self._without_clients()
                    if not silent:
                        break
                    await asyncio.sleep(delay_s)
                return answers
        except TimeoutError:
            missing = ", ".join(sorted(silent)) or "Redis"
            raise Unavailable(f"no answer from {missing} within {self._answer_s:g} s") from None
        except (LinkDown, hiredis.ReplyError) as error:
            raise Unavailable(str(error)) from None

    async def _without_clients(self) -> set[str]:
        """The worker processes that can't reach Redis and have no clients, as their supervisors say."""
        found: set[str] = set()
        for run, entry in (await self._link.ask(b"HGETALL", self._keys.nodes)).items():
            # A node of another version may be unreadable here; its supervisor's readers log that.
            with contextlib.suppress(msgspec.DecodeError):
                node = msgspec.json.decode(entry, type=Node)
                found |= {f"{run.decode()}.{k}" for k in node.without_clients}
        return found

    def answer(self, question: str, w: str, answer: Any) -> None:
        """Answers a question. `question` is the message's `id`, `answer` any JSON value. Every worker answers every
        question, even if it had nothing to do."""
        send_answer(self._link, self._keys, question, w, answer)


def _process(w: str) -> str:
    # <run>.<k>: a process keeps its sockets when it takes another name.
    return w.rpartition(".")[0]


def _living(beats: dict[bytes, bytes]) -> set[str]:
    newest: dict[str, tuple[int, bool]] = {}
    for name, beat in beats.items():
        process, _, n = name.decode().rpartition(".")
        newest[process] = max(newest.get(process, (-1, False)), (int(n), beat != b"-1"))
    return {process for process, (_, alive) in newest.items() if alive}
