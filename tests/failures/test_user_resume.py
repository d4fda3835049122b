"""A user whose worker is killed gets what was published until the return to another worker, with `user_resume_s`.

See deploy/failures.md "Worker killed".
"""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
import pytest
from click.testing import CliRunner

from failures.publishing import numbers, publish_number
from helpers.server import Server
from helpers.wire import connect_patiently, sockets_by_worker
from redpoll.cli import main

CHANNEL = "presence-stored"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two workers on an embedded Redis, whose app has user resume and stores the messages of the channel."""
    with Server(workers=2) as running:
        for words in (
            ("app", "set", running.app_id, "user_resume_s=600", "idempotency=true"),
            ("history", "rule", "add", running.app_id, "--channel", CHANNEL, "--keep", "1000", "--seconds", "600"),
        ):
            result = CliRunner().invoke(main, [*words, "--data-dir", str(running.folder / "data")])
            assert result.exit_code == 0, result.output
        yield running


async def test_a_user_of_a_killed_worker_gets_what_was_published_meanwhile(server: Server) -> None:
    held = await sockets_by_worker(server, 1)
    (victim, (member, *_)), (_, (observer, *_)) = held.items()
    await member.subscribe(CHANNEL, "member")
    await observer.subscribe(CHANNEL, "observer")
    async with aiohttp.ClientSession() as session:

        async def publish(number: int) -> None:
            while not await publish_number(server, session, CHANNEL, number):
                pass

        await publish(0)
        await member.next("n", CHANNEL)
        server.kill_worker(server.worker_pids().index(victim))
        # Redis lists the user no longer.
        await observer.next("pusher_internal:member_removed", CHANNEL)
        for number in range(1, 4):
            await publish(number)
    again = await connect_patiently(server)
    await again.subscribe(CHANNEL, "member")
    await again.until(lambda: numbers(again)[-1:] == [3], what="the missed events")
    assert numbers(again)[-3:] == [1, 2, 3]
    for socket in (again, *(socket for sockets in held.values() for socket in sockets)):
        if not socket.lost:
            await socket.close()
