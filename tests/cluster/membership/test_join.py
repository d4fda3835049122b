"""A join says where it is."""

import re

import pytest

from redpoll.cluster.membership.join import Stage


def as_printed(text: str) -> str:
    """Without the address of the test's socket and the time."""
    return re.sub(r"^.*? to ", "", re.sub(r"\d+\.\d s", "… s", text))


async def test_join_prints_what_it_waits_for_all_the_way(start_worker, wait_until, link, keys):
    worker = await start_worker(retry_s=60.0, max_retry_s=60.0)
    worker.deafen()
    first = worker.join("news")
    assert as_printed(str(first.join)) == "news of app 7: queued for … s, waits for the SUBSCRIBE of its topic"
    await wait_until(lambda: worker.registry.sync.in_flight == 1)
    second = worker.join("news")
    assert as_printed(str(first.join)) == "news of app 7: in flight for … s, waits for Redis' answer"
    assert as_printed(str(second.join)) == "news of app 7: queued for … s, waits for the answer to an earlier call"
    worker.hear()
    await wait_until(lambda: second.state == "attached")
    assert as_printed(str(first.join)) == "news of app 7: attached"
    await link.ask(b"SET", keys.counts("7", "bad"), b"no hash")
    failed = worker.join("bad")
    await wait_until(lambda: worker.registry.errors)
    reason = "the repetition of a call that failed"
    assert as_printed(str(failed.join)) == f"bad of app 7: queued for … s, waits for {reason}"
    worker.leave(failed)
    assert as_printed(str(failed.join)) == "bad of app 7: withdrawn"


async def test_joins_that_wait_are_reported_again_and_again(own_redis, start_worker, wait_until):
    worker = await start_worker(server=own_redis)
    own_redis.kill()
    await wait_until(lambda: not worker.link.up)
    joins = [worker.join("news").join for _ in range(2)]
    assert [as_printed(text) for text in worker.sockets.waiting] == []
    for join in joins:
        join.since -= 2
    await wait_until(lambda: len(worker.sockets.waiting) == 2)
    assert "news of app 7: queued" in worker.sockets.waiting[0]


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_says_what_it_waits_for(stage):
    assert stage.waits_for
