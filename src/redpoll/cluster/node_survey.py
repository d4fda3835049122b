"""Asks the control planes of all other nodes a question and collects their answers.

The question is a message on the topic `controls`; each answer is an entry of a list in Redis, as in survey.py. A node
that doesn't answer in time is named instead of waited for, so that a dead or slow node delays nobody for longer.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

import hiredis
import msgspec
import structlog

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.survey import delays_s, read_answers, send_answer

__all__ = ["NodeAnswers", "NodeSurvey"]

log = structlog.get_logger(__name__)

_ANSWER_S: Final = 1.0
_MAX_RUNNING: Final = 100

# Takes the question's fields, returns any value that msgspec encodes.
Answerer = Callable[[Mapping[str, Any]], Awaitable[Any]]


class NodeAnswers(NamedTuple):
    """The answers as JSON, by node name, and the names of the nodes that didn't answer in time."""

    answers: dict[str, msgspec.Raw]
    missing: list[str]


class NodeSurvey:
    """`answerers` has a function for each question that this node answers. Call `link_up` when Redis is connected,
    `set_others` when the nodes change, and `received` with each message. A node without others subscribes nothing."""

    def __init__(self, link: Link, keys: Keys, run: str, *, answer_s: float = _ANSWER_S) -> None:
        self.answerers: dict[str, Answerer] = {}
        self._link = link
        self._keys = keys
        self._run = run
        self._answer_s = answer_s
        # The names of the other live nodes by run.
        self._others: Mapping[str, str] = {}
        self._subscribed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def link_up(self) -> None:
        self._subscribed = False
        self.set_others(self._others)

    def set_others(self, others: Mapping[str, str]) -> None:
        """The names of the other live nodes that have a control plane, by run."""
        self._others = others
        if others and not self._subscribed and self._link.up:
            self._subscribed = True
            self._link.subscribe([self._keys.controls])

    @property
    def alone(self) -> bool:
        return not self._others

    async def ask(self, what: str, **about: Any) -> NodeAnswers:
        """What every other live node answers within a second."""
        others = dict(self._others)
        if not others:
            return NodeAnswers({}, [])
        question = secrets.token_hex(8)
        answers: dict[str, msgspec.Raw] = {}
        try:
            async with asyncio.timeout(self._answer_s):
                await self._link.wait_up()
                message = msgspec.json.encode({"ask": what, "id": question, "from": self._run, **about})
                await self._link.ask(self._keys.publish, self._keys.controls, message)
                for delay_s in delays_s():
                    answers = await read_answers(self._link, self._keys, question)
                    if others.keys() <= answers.keys():
                        break
                    await asyncio.sleep(delay_s)
        except (TimeoutError, LinkDown, hiredis.ReplyError):
            pass
        return NodeAnswers(
            {name: answers[run] for run, name in others.items() if run in answers},
            sorted(name for run, name in others.items() if run not in answers),
        )

    def received(self, topic: bytes, payload: bytes) -> None:
        if topic != self._keys.controls:
            return
        question = msgspec.json.decode(payload)
        answerer = self.answerers.get(question["ask"])
        if question["from"] == self._run or answerer is None or len(self._tasks) >= _MAX_RUNNING:
            return
        task = asyncio.get_running_loop().create_task(self._answer(answerer, question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, answerer: Answerer, question: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await answerer(question)
        except TimeoutError:
            return
        except Exception as error:
            # The asker names this node as one that didn't answer.
            log.error("survey of nodes not answered", ask=question["ask"], reason=str(error) or type(error).__name__)
            return
        send_answer(self._link, self._keys, question["id"], self._run, answer)

    async def finish(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
