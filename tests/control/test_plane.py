"""The control plane: messages of the supervisor, failures of Redis, both ports, changes of records."""

import asyncio

import pytest
import redis.asyncio

from redpoll.cluster.redis.keys import Keys
from redpoll.ipc.messages import BeginStop, Fatal, FitnessReport, LivingWorkers, Ready, WorkersReady


async def test_control_reports_that_it_is_ready_and_readyz_waits_for_the_workers(make_plane, redis, wait_until):
    plane = await make_plane(redis.url)
    assert [message for message in plane.heard if not isinstance(message, FitnessReport)] == [Ready()]
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


async def test_without_redis_control_is_alive_but_not_ready_and_responds_503_in_time(make_plane, tmp_path):
    plane = await make_plane(f"unix://{tmp_path}/none.sock", ready=False)
    assert (await plane.ask("GET", "/healthz")).status == 200
    assert (await plane.ask("GET", "/readyz")).status == 503
    reply = await plane.trigger()
    assert (reply.status, reply.json()["code"], reply.headers["retry-after"]) == (503, "unavailable", "1")
    assert (await plane.call("GET", "/apps/3/channels")).status == 503
    assert (await plane.ask("GET", "/metrics")).status == 200


async def test_an_unsuitable_redis_ends_the_start_with_a_reason(make_plane, own_redis, wait_until):
    async with redis.asyncio.Redis(unix_socket_path=own_redis.path) as admin:
        await admin.execute_command("ACL", "SETUSER", "poor", "on", ">pass", "~*", "resetchannels", "+@all")
    plane = await make_plane(own_redis.url + "?username=poor&password=pass", ready=False)
    await wait_until(lambda: any(isinstance(message, Fatal) for message in plane.heard))
    (fatal,) = [message.reason for message in plane.heard if isinstance(message, Fatal)]
    assert "may not use PUBLISH on our keys or topics" in fatal
    assert "&rp:*" in fatal


async def test_publishes_get_503_while_redis_is_killed_and_then_work_again(make_plane, own_redis, wait_until):
    plane = await make_plane(own_redis.url)
    assert (await plane.trigger()).status == 200
    own_redis.kill()
    assert (await plane.trigger()).status == 503
    own_redis.start()
    await wait_until(lambda: plane.plane.publisher.open)
    assert (await plane.trigger()).status == 200


async def test_publishes_get_503_in_time_while_redis_hangs(make_plane, own_redis):
    plane = await make_plane(own_redis.url)
    own_redis.pause()
    try:
        assert (await plane.trigger()).status == 503
    finally:
        own_redis.resume()


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


async def test_the_public_port_has_the_api_and_health_but_no_metrics(plane, workers_request, sign):
    for path, status in (("/healthz", 200), ("/", 200), ("/readyz", 200), ("/metrics", 404), ("/dashboard", 404)):
        assert (await workers_request("GET", path)).status == status
    body = b'{"name":"e","channel":"c","data":""}'
    reply = await workers_request("POST", sign("POST", "/api/v1/apps/3/events", body), body)
    assert (reply.status, reply.body) == (200, b"{}")


async def test_an_exception_in_the_loop_is_counted(plane, wait_until):
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await wait_until(lambda: plane.plane._own_counters()["loop_exceptions_total"] == 1)


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
    await wait_until(lambda: plane.plane.publisher.open)
    assert (await plane.trigger(correlation_id="1")).status == 200


async def test_the_daily_counter_continues_after_redis_lost_its_data(make_plane, own_redis, wait_until):
    plane = await make_plane(own_redis.url)
    await plane.records.set_app("3", {"plan": "free"})
    for _ in range(5):
        before = await plane.trigger()
    assert before.headers["x-ratelimit-remaining"] == "199995"
    own_redis.kill()
    await wait_until(lambda: not plane.plane.publisher.open)
    for file in own_redis.folder.rglob("*.*of*"):
        if file.is_file():
            file.unlink()
    own_redis.start()
    await wait_until(lambda: plane.plane.publisher.open)
    after = await plane.trigger()
    # A new day begins at zero.
    is_same_day = after.headers["x-ratelimit-reset"] == before.headers["x-ratelimit-reset"]
    assert after.headers["x-ratelimit-remaining"] == ("199994" if is_same_day else "199999")
