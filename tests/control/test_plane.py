"""The control plane: messages of the supervisor, failures of Redis, both ports, changes of records."""

import asyncio

import pytest

from redpoll.cluster.redis.keys import Keys
from redpoll.control.api.history import ChannelHistory
from redpoll.control.http import entrance
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.ipc.messages import BeginStop, FitnessReport, LivingWorkers, WorkersReady


async def test_readyz_waits_for_the_workers(make_plane, redis, wait_until):
    plane = await make_plane(redis.url)
    assert all(isinstance(message, FitnessReport) for message in plane.heard)
    assert (await plane.ask("GET", "/readyz")).status == 200
    plane.plane.health.workers_ready = False
    reply = await plane.ask("GET", "/readyz")
    assert (reply.status, reply.json()["code"], reply.headers["retry-after"]) == (503, "unavailable", "1")
    plane.plane.receive(WorkersReady())
    assert (await plane.ask("GET", "/readyz")).status == 200
    plane.plane.receive(BeginStop())
    assert (await plane.ask("GET", "/readyz")).status == 503
    # While draining it serves until the supervisor sends `Stop`.
    assert (await plane.trigger()).status == 200
    assert not plane.plane.finished.is_set()


async def test_a_request_without_a_client_ends_before_what_it_uses_is_closed(make_plane, redis, monkeypatch, sign):
    """The store was closed under it, and the log had a traceback."""
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), []
    show, finish = ChannelHistory.show, Webhooks.finish

    async def slow(*args):
        begun.set()
        try:
            await may_end.wait()
            return await show(*args)
        finally:
            ended.append("request")

    async def noted(webhooks):
        ended.append("webhooks")
        await finish(webhooks)

    monkeypatch.setattr(ChannelHistory, "show", slow)
    monkeypatch.setattr(Webhooks, "finish", noted)
    # Control closes its connection before it ends, as a worker does that exits.
    monkeypatch.setattr(entrance, "_FINISH_WITHIN_S", 0.01)
    plane = await make_plane(redis.url)
    plane.wire.send(f"GET {sign('GET', '/apps/3/channels/c/history')} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    await begun.wait()
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    await plane.plane.finish()
    assert ended == ["request", "webhooks"]


async def test_without_redis_control_is_alive_but_not_ready_and_responds_503_in_time(make_plane, tmp_path):
    plane = await make_plane(f"unix://{tmp_path}/none.sock", ready=False)
    assert (await plane.ask("GET", "/healthz")).status == 200
    assert (await plane.ask("GET", "/readyz")).status == 503
    reply = await plane.trigger()
    assert (reply.status, reply.json()["code"], reply.headers["retry-after"]) == (503, "unavailable", "1")
    assert (await plane.call("GET", "/apps/3/channels")).status == 503
    assert (await plane.ask("GET", "/metrics")).status == 200


async def test_workers_that_leave_the_supervisors_list_are_reaped(plane, wait_until):
    link, keys = plane.plane.link, Keys("rp")
    await link.ask(b"HSET", keys.beat, "0123456789ab.1.1", 5)
    plane.plane.receive(LivingWorkers([1], 1))
    await wait_until(lambda: plane.plane.reaper.workers() == ["0123456789ab.1.1"])
    plane.plane.receive(LivingWorkers([2], 2))
    await wait_until(lambda: plane.plane.reaper.reaped == 1)
    assert await link.ask(b"HLEN", keys.beat) == 0


async def test_a_new_app_is_usable_at_once(plane, sign):
    app = await plane.records.create_app("later")
    key = app.signing_key()
    body = b'{"name":"e","channel":"c","data":""}'
    target = sign("POST", f"/apps/{app.id}/events", body, key=key.key, secret=key.secret)
    assert (await plane.ask("POST", target, body)).status == 200
    assert await plane.plane.link.ask(b"HEXISTS", Keys("rp").directory, app.id)


@pytest.mark.parametrize("how", ["away", "hanging"])
async def test_the_deadline_of_503_includes_the_daily_limit_and_the_idempotency_claim(
    make_plane, own_redis, wait_until, how
):
    plane = await make_plane(own_redis.url)
    await plane.records.set_app("3", {"plan": "free", "idempotency": True})
    loop = asyncio.get_running_loop()
    if how == "away":
        own_redis.kill()
    else:
        own_redis.pause()
    for event in ({}, {"correlation_id": "1"}, {"channels": ["a", "b"], "info": "subscription_count"}):
        began = loop.time()
        reply = await plane.trigger(**event)
        # The deadline is 2 s. A busy machine may take longer; three waits in sequence would take 5.6 s.
        assert loop.time() - began < 5.5
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    if how == "away":
        own_redis.start()
    else:
        own_redis.resume()
    await wait_until(lambda: plane.plane.publishing.publisher.open)
    assert (await plane.trigger(correlation_id="1")).status == 200


async def test_the_daily_counter_continues_after_redis_lost_its_data(make_plane, own_redis, wait_until):
    plane = await make_plane(own_redis.url)
    await plane.records.set_app("3", {"plan": "free"})
    for _ in range(5):
        before = await plane.trigger()
    assert before.headers["x-ratelimit-remaining"] == "199995"
    own_redis.kill()
    await wait_until(lambda: not plane.plane.publishing.publisher.open)
    for file in own_redis.folder.rglob("*.*of*"):
        if file.is_file():
            file.unlink()
    own_redis.start()
    await wait_until(lambda: plane.plane.publishing.publisher.open)
    after = await plane.trigger()
    # A new day begins at zero.
    is_same_day = after.headers["x-ratelimit-reset"] == before.headers["x-ratelimit-reset"]
    assert after.headers["x-ratelimit-remaining"] == ("199994" if is_same_day else "199999")
