"""The endpoints for liveness and readiness."""

import pytest

from redpoll.cluster.lifecycle import Life, Lifecycle
from redpoll.control.observe.health import Health
from redpoll.protocol.errors import ApiError


async def test_ready_only_if_redis_directory_and_workers_are_ready():
    answers = {"redis": False}
    life = Life()
    health = Health(life, lambda: answers["redis"])
    assert health.obstacle() == "Redis doesn't answer"
    answers["redis"] = True
    assert health.obstacle() == "the directory of apps isn't written yet"
    health.directory_written = True
    assert health.obstacle() == "not every worker is ready yet"
    health.workers_ready = True
    assert health.obstacle() is None
    assert (await health.ready(None)).status == 200
    health.cut_off = [0, 2]
    assert health.obstacle() == "worker 0 and worker 2 can't reach Redis"
    life.become(Lifecycle.EVACUATING)
    assert health.obstacle() == "an operator drains this server"
    life.become(Lifecycle.DRAINING)
    assert health.obstacle() == "this server is stopping"


async def test_not_ready_is_503_with_a_reason():
    with pytest.raises(ApiError) as error:
        await Health(Life(), lambda: False).ready(None)
    assert error.value.status == 503
    assert "Redis" in error.value.message


async def test_live_is_200_even_without_redis():
    health = Health(Life(), lambda: False)
    assert (await health.live(None)).status == 200
    assert (await health.root(None)).body == b"OK"
