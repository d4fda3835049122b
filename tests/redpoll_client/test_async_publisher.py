"""What is `AsyncPublisher`'s own: its loop, many requests at once, cancelling."""

import asyncio
import threading

from answering import Answering, reply
from redpoll_client import AsyncPublisher


async def test_many_tasks_share_the_pool():
    with Answering(reply(200)) as server:
        async with AsyncPublisher(url=server.url, connections=4) as publisher:
            await asyncio.gather(*(publisher.trigger("a", "e", number) for number in range(100)))
        assert server.connections <= 4
        assert len({asked.json["correlation_id"] for asked in server.asked}) == 100


async def test_it_belongs_to_one_loop():
    with Answering(reply(200)) as server:
        async with AsyncPublisher(url=server.url) as publisher:
            await publisher.trigger("a", "e", "")
            found = []

            def elsewhere() -> None:
                try:
                    asyncio.run(publisher.trigger("a", "e", ""))
                except RuntimeError as error:
                    found.append(str(error))

            thread = threading.Thread(target=elsewhere)
            thread.start()
            await asyncio.to_thread(thread.join)
            assert "another event loop" in found[0]
            assert len(server.asked) == 1
