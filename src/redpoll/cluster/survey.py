"""Asks all workers, or the control planes of all other nodes, a question and collects their answers.

The question is a message on `sys` or `controls` (questions.py); each answer is an entry of a list in Redis that belongs
to the question. Each process has a table of what it answers (`Answerers`). Surveys are for rare requests, such as
closing a user's connections or searching the nodes' event logs; counts and members are in Redis.

The asker reads the list every 2 to 50 ms until all have answered. It can't wait for pushes instead: a worker that dies
sends none, and only heartbeats show that it needn't be waited for. A blocking read (BLPOP) would hold up every other
command on the process's one connection to Redis.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, NamedTuple, TypeVar, Union

import hiredis
import msgspec
import structlog

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.nodes import Node, NodesView
from redpoll.cluster.questions import Question, TopicMessage, encode, publication
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import WRITE

__all__ = ["Answerers", "NodeAnswers", "NodeSurvey", "Survey"]

log = structlog.get_logger()

# The HTTP API answers within about 2 s.
ANSWER_S: Final = 2.0
_NODES_ANSWER_S: Final = 1.0
_LIFETIME_S: Final = 10
# Between two reads of the answers; doubles from one to the other.
_FIRST_DELAY_S: Final = 0.002
_MAX_DELAY_S: Final = 0.05
# Questions that a process answers at a time, of those that take more than one pass of the loop. It refuses more.
_MAX_RUNNING: Final = 100

T = TypeVar("T", bound=TopicMessage)
Q = TypeVar("Q", bound=Question)


class Answerers:
    """What a process does with the messages of its topic: a table kind -> function. `name()` is who answers.

    A message that is malformed or of an unknown kind is refused with a line in the log, and changes nothing.
    """

    def __init__(self, link: Link, keys: Keys, name: Callable[[], str], *, answer_s: float = ANSWER_S) -> None:
        self._link = link
        self._keys = keys
        self._name = name
        self.answer_s = answer_s
        self._table: dict[type[TopicMessage], Callable[[Any], object]] = {}
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(TopicMessage)
        self._tasks: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        """Whether this process answers anything."""
        return bool(self._table)

    def hear(self, kind: type[T], handler: Callable[[T], None]) -> None:
        """Calls `handler` with each message of this kind. It answers by itself, if at all."""
        self._table[kind] = handler
        self._decoder = msgspec.json.Decoder(Union[tuple(self._table)])  # noqa: UP007

    def answer(self, kind: type[Q], answerer: Callable[[Q], object]) -> None:
        """Answers each question of this kind with what `answerer` returns, any value that msgspec encodes."""
        self.hear(kind, lambda question: self._send(question, answerer(question)))

    def answer_later(self, kind: type[Q], answerer: Callable[[Q], Awaitable[object]]) -> None:
        """As `answer`, for an answer that takes more than one pass of the loop."""
        self.hear(kind, lambda question: self._begin(answerer, question))

    def received(self, payload: bytes) -> None:
        """Takes a message of the topic."""
        try:
            message = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            log.error("message on a topic refused", reason=str(error))
            return
        # Control planes hear their own questions.
        if not (isinstance(message, Question) and message.asker == self._name()):
            self._table[type(message)](message)

    async def finish(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, answerer: Callable[[Q], Awaitable[object]], question: Q) -> None:
        if len(self._tasks) >= _MAX_RUNNING:
            _not_answered(question, f"{_MAX_RUNNING} others are being answered")
            return
        task = asyncio.get_running_loop().create_task(self._finish(answerer, question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, answerer: Callable[[Q], Awaitable[object]], question: Q) -> None:
        try:
            async with asyncio.timeout(self.answer_s):
                answer = await answerer(question)
        except TimeoutError:
            return
        except Exception as error:
            _not_answered(question, str(error) or type(error).__name__)
            return
        self._send(question, answer)

    def _send(self, question: Question, answer: object) -> None:
        key = self._keys.answers(question.id)
        self._link.run(WRITE, (key,), (b"RPUSH", msgspec.json.encode((self._name(), answer))))
        self._link.call(b"EXPIRE", key, _LIFETIME_S)


def _not_answered(question: Question, reason: str) -> None:
    # The asker names this process as one that didn't answer.
    log.error("question not answered", question=type(question).__name__, reason=reason)


def _delays_s() -> Iterator[float]:
    """The pauses between two reads of the answers, without an end."""
    delay_s = _FIRST_DELAY_S
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, _MAX_DELAY_S)


async def _read_answers(link: Link, keys: Keys, question: Question) -> dict[str, msgspec.Raw]:
    """The answers so far, as JSON, by who answered. Raises LinkDown or ReplyError."""
    listed = await link.ask(b"LRANGE", keys.answers(question.id), 0, -1)
    return dict(msgspec.json.decode(answer, type=tuple[str, msgspec.Raw]) for answer in listed)


class Survey:
    """Questions to all workers. Dead workers, earlier names of living workers, and workers that are out of service and
    have no sockets aren't waited for. `answer_s` is how long answers are waited for.

    `ready()` returns when all workers are subscribed. Before that, Redis may not know a living worker (its data may be
    lost), and a question would reach nobody.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        *,
        answer_s: float = ANSWER_S,
        ready: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._link = link
        self._ready = ready or link.wait_up
        self._keys = keys
        self.answer_s = answer_s

    async def ask(self, question: Question) -> dict[str, Any]:
        """Returns the answers by W when every living worker process has answered. Raises Unavailable if some didn't
        answer in time; they may have done what was asked."""
        question = msgspec.structs.replace(question, id=secrets.token_hex(8))
        answers: dict[str, Any] = {}
        silent: set[str] = set()
        asked = False
        try:
            async with asyncio.timeout(self.answer_s):
                await self._ready()
                asked = True
                await self._link.ask(*publication(self._keys, question))
                for delay_s in _delays_s():
                    raw, beats = await asyncio.gather(
                        _read_answers(self._link, self._keys, question), self._link.ask(b"HGETALL", self._keys.beat)
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
            if not asked:
                raise Unavailable("Redis is disconnected, or not all workers are subscribed again") from None
            missing = ", ".join(sorted(silent)) or "Redis"
            raise Unavailable(f"no answer from {missing} within {self.answer_s:g} s") from None
        except (LinkDown, hiredis.ReplyError) as error:
            raise Unavailable(str(error)) from None

    async def _without_clients(self) -> set[str]:
        """The worker processes that can't reach Redis and have no clients, as their supervisors say."""
        processes: set[str] = set()
        for run, entry in (await self._link.ask(b"HGETALL", self._keys.nodes)).items():
            # A node of another version may be unreadable here; its supervisor's readers log that.
            with contextlib.suppress(msgspec.DecodeError):
                node = msgspec.json.decode(entry, type=Node)
                processes |= {f"{run.decode()}.{k}" for k in node.without_clients}
        return processes


def _process(w: str) -> str:
    # <run>.<k>: a process keeps its sockets when it takes another name.
    return w.rpartition(".")[0]


def _living(beats: dict[bytes, bytes]) -> set[str]:
    newest: dict[str, tuple[int, bool]] = {}
    for name, beat in beats.items():
        process, _, n = name.decode().rpartition(".")
        newest[process] = max(newest.get(process, (-1, False)), (int(n), beat != b"-1"))
    return {process for process, (_, alive) in newest.items() if alive}


class NodeAnswers(NamedTuple):
    """The answers as JSON, by node name, and the names of the nodes that didn't answer in time."""

    answers: dict[str, msgspec.Raw]
    missing: list[str]


class NodeSurvey:
    """Questions to the control planes of all other nodes, and `answerers` for theirs. A node that doesn't answer in
    time is named instead of waited for, so that a dead or slow node delays nobody for longer.

    Call `link_up` when Redis is connected, `nodes_changed` when the view has changed, and `received` with each message.
    A node without others, or without answerers, subscribes nothing.
    """

    def __init__(self, link: Link, keys: Keys, view: NodesView, *, answer_s: float = _NODES_ANSWER_S) -> None:
        self.answerers = Answerers(link, keys, lambda: view.run, answer_s=answer_s)
        self._link = link
        self._keys = keys
        self._view = view
        self.answer_s = answer_s
        self._subscribed = False

    def link_up(self) -> None:
        self._subscribed = False
        self.nodes_changed()

    def nodes_changed(self) -> None:
        if not self.alone and self.answerers and not self._subscribed and self._link.up:
            self._subscribed = True
            self._link.subscribe([self._keys.controls])

    @property
    def alone(self) -> bool:
        return not self._others()

    def _others(self) -> dict[str, str]:
        """The names of the other live nodes that have a control plane, by run."""
        return {run: node.name for run, node in self._view.others.items() if node.alive and node.control}

    async def ask(self, question: Question) -> NodeAnswers:
        """What every other live node answers within a second."""
        others = self._others()
        if not others:
            return NodeAnswers({}, [])
        question = msgspec.structs.replace(question, id=secrets.token_hex(8), asker=self._view.run)
        answers: dict[str, msgspec.Raw] = {}
        try:
            async with asyncio.timeout(self.answer_s):
                await self._link.wait_up()
                await self._link.ask(self._keys.publish, self._keys.controls, encode(question))
                for delay_s in _delays_s():
                    answers = await _read_answers(self._link, self._keys, question)
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
        if topic == self._keys.controls:
            self.answerers.received(payload)

    async def finish(self) -> None:
        await self.answerers.finish()
