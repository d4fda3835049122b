"""What the leader does, in a control plane with a real Redis."""

from redpoll.cluster.redis.keys import Keys
from redpoll.ipc.messages import Lead

DEAD = "0123456789ab.1.0"


async def test_reaping_begins_and_ends_with_the_lead_and_sending_webhooks_with_the_term_in_the_store(plane, wait_until):
    link, keys, control = plane.plane.link, Keys("rp"), plane.plane
    control.receive(Lead(None))
    await wait_until(lambda: control.leadership.term is None and control.webhooks.schedule is None)
    control.leadership.work.begin()
    await link.ask(b"HSET", keys.beat, DEAD, -1)
    await wait_until(lambda: control.reaper.reaped == 1)
    assert control.webhooks.schedule is None
    control.leadership.work.end()
    control.leadership.work.end()
    control.receive(Lead(2))
    await wait_until(lambda: control.webhooks.schedule is not None)


async def test_a_node_that_lost_the_lead_shows_no_waiting_rows(plane, wait_until):
    control = plane.plane
    await wait_until(lambda: control.webhooks.schedule is not None)
    work = control.leadership.work
    await control.webhooks.stop(0.0)
    work._outbox.waiting, work._outbox.leaves, work._outbox.oldest_ms = 12_345, 1, 1
    await work.end_with_store()
    assert control.counters.read()["webhook_rows_waiting"] == 0
    assert (work._outbox.leaves, work._outbox.oldest_ms) == (0, None)
