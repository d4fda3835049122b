"""The life cycle of a process: which states follow which, and who waits for one."""

import asyncio

from structlog.testing import capture_logs

from redpoll.cluster.lifecycle import Life, Lifecycle


def test_drain_of_an_operator_ends_and_every_change_is_logged():
    life = Life()
    with capture_logs() as logs:
        assert life.become(Lifecycle.EVACUATING)
        assert not life.become(Lifecycle.EVACUATING)
        assert not life.admits
        assert life.become(Lifecycle.SERVING)
    assert life.admits
    assert [(line["event"], line["before"], line["state"]) for line in logs] == [
        ("life cycle changed", "serving", "evacuating"),
        ("life cycle changed", "evacuating", "serving"),
    ]


def test_nothing_leads_back_from_a_stop():
    life = Life()
    assert life.become(Lifecycle.DRAINING)
    for state in (Lifecycle.SERVING, Lifecycle.EVACUATING):
        assert not life.become(state)
    assert (life.ends, life.admits) == (True, False)
    assert life.become(Lifecycle.STOPPED)
    assert not life.become(Lifecycle.DRAINING)
    assert life.state is Lifecycle.STOPPED


async def test_waiting_ends_with_the_state_or_one_that_only_follows_it():
    life = Life()
    draining = asyncio.create_task(life.until(Lifecycle.DRAINING))
    stopped = asyncio.create_task(life.until(Lifecycle.STOPPED))
    await asyncio.sleep(0)
    life.become(Lifecycle.EVACUATING)
    await asyncio.sleep(0)
    assert not draining.done()
    life.become(Lifecycle.DRAINING)
    life.become(Lifecycle.STOPPED)
    await asyncio.gather(draining, stopped)
