"""A change is answered when all workers use it: a worker's directory and its answers, on a real Redis."""

import asyncio

import pytest
from structlog.testing import capture_logs

from helpers.leading import command
from helpers.server import Server
from helpers.wire import Socket
from redpoll.cluster.directory import Directory, DirectoryChanged, DirectoryWriter
from redpoll.cluster.questions import KnowDirectory
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Answerers, Survey
from redpoll.control.records.spreading import Spreading

W = "abcdefabcdef.0.0"
KEYS = Keys()


class Worker:
    """What a worker has of the app directory. It counts the questions."""

    def __init__(self, redis_url: str) -> None:
        self.link = Link(redis_url)
        self.directory = Directory(self.link, KEYS, again_s=0.01)
        self.asked: list[int] = []
        self._answerers = Answerers(self.link, KEYS, lambda: W)
        self._answerers.answer_later(KnowDirectory, self._known)
        self._answerers.hear(DirectoryChanged, self.directory.apply)

    async def _known(self, question: KnowDirectory) -> bool:
        self.asked.append(question.version)
        return await self.directory.reached(question.version)

    async def start(self) -> None:
        self.link.start(on_push=lambda topic, payload: self._answerers.received(payload))
        await self.link.wait_up()
        self.link.subscribe([KEYS.sys])
        await self.link.ask(b"HSET", KEYS.beat, W, b"1")

    async def finish(self) -> None:
        await self._answerers.finish()
        self.directory.close()
        await self.link.close()


@pytest.fixture
async def worker(redis):
    worker = Worker(redis.url)
    await worker.start()
    yield worker
    await worker.finish()


@pytest.fixture
def spreading(records, link):
    return Spreading(records, Survey(link, KEYS, answer_s=60))


async def test_waits_until_the_worker_has_the_change(worker, spreading, records, link, wait_until):
    writer = DirectoryWriter(link, KEYS)
    both = [asyncio.ensure_future(spreading.wait()) for _ in range(2)]
    await wait_until(lambda: worker.asked)
    assert not any(waiting.done() for waiting in both)
    await writer.fill(records.apps.values(), records.directory.number, records.directory.id)
    async with asyncio.timeout(60):
        await asyncio.gather(*both)
    assert worker.directory.version == records.directory.number
    # One question for both.
    assert len(worker.asked) == 1


async def test_silent_worker_is_named_in_the_log_and_waited_for_once(worker, records, link):
    spreading = Spreading(records, Survey(link, KEYS, answer_s=0.5))
    with capture_logs() as logs:
        await asyncio.gather(*(spreading.wait() for _ in range(3)))
    (line,) = [line for line in logs if "confirmed" in line["event"]]
    assert W.rpartition(".")[0] in line["reason"] or "Redis" in line["reason"]


async def test_rule_is_in_effect_on_all_workers_when_its_command_returns(redis):
    with Server(workers=2, redis_url=redis.url) as server:
        for number in range(20):
            rule = ("--prefix", f"kept-{number}", "--keep", "10", "--seconds", "60")
            await asyncio.to_thread(command, server, "history", "rule", "add", server.app_id, *rule)
            socket = await Socket.connect(server, query="protocol=7&recover=1")
            assert "epoch" in (await socket.subscribe(f"kept-{number}"))["data"]
            socket.abort()
