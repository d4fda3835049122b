"""When deliveries are attempted, on a fake clock: retries, limits, fairness, clock changes and restarts."""

import asyncio
import json
import time

import pytest

from control.webhooks.scheduled import RETRIES, World
from control.webhooks.transitions import NOW_S
from helpers.receiver import OK, Receiver, hang, status
from redpoll.store import deliveries as delivery_rows
from redpoll.store import due_deliveries
from redpoll.store import webhooks as endpoint_rows

BROKEN = status(500, "Internal Server Error")


@pytest.fixture
async def world(monkeypatch, store, records, clock):
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    made = World(store, records, clock)
    made.start()
    yield made
    await made.end(0.0)
    await made.sender.close()


def numbers(receiver):
    return [request.json()["n"] for request in receiver.requests]


# -- times of attempts


async def test_delivery_is_attempted_at_once(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    found, (attempt,) = await world.wait_state(one, "delivered", 1)
    (request,) = receiver.requests
    assert found.at == NOW_S
    assert (attempt.n, attempt.status, attempt.outcome, attempt.response) == (1, 200, "delivered", b"ok")
    expected = {"event": "channel.occupied", "delivery": "d1", "attempt": "1", "timestamp": str(int(NOW_S))}
    assert {name: request.headers[f"x-service-{name}"] for name in expected} == expected


async def test_delivery_that_another_node_made_due_is_found_when_the_schedule_looks_again(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    await world.wait_state(one, "delivered", 1)
    (other,) = await world.put(endpoint, "room", add=False)
    world.schedule.look_again(endpoint.id)
    await world.wait_state(other, "delivered", 1)
    assert len(receiver.requests) == 2


async def test_failures_are_retried_after_10_60_and_300_seconds_then_become_dead_letters(world, receiver):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    due = NOW_S
    for n, pause in enumerate(RETRIES, 1):
        found, attempts = await world.wait_state(one, "waiting", n)
        assert (found.at, attempts[-1].at, attempts[-1].reason) == (
            due + pause,
            due,
            "answered 500 Internal Server Error",
        )
        # Not a millisecond too early.
        world.later(endpoint, pause - 0.001)
        world.schedule._queues[endpoint.id].read_after = 0.0
        await world.schedule.step()
        assert (world.schedule.running, len(receiver.requests)) == (0, n)
        world.later(endpoint, 0.001)
        due += pause
    found, attempts = await world.wait_state(one, "failed", 4)
    assert [attempt.at - NOW_S for attempt in attempts] == [0, 10, 70, 370]
    assert found.dead_letter == "pending"
    assert [request.headers["x-service-attempt"] for request in receiver.requests] == ["1", "2", "3", "4"]
    assert {request.headers["x-service-delivery"] for request in receiver.requests} == {one}
    assert len({request.body for request in receiver.requests}) == 1
    world.later(endpoint, 10_000)
    world.schedule._queues[endpoint.id].read_after = 0.0
    await world.schedule.step()
    assert world.schedule.running == 0
    assert world.schedule.failed_total == 1
    assert world.schedule.attempts == {"status": 4}


async def test_endpoints_to_which_nothing_is_sent_cost_nothing(world, receiver):
    """Each delivery had the schedule look at all endpoints of the server, up to 50 times per second."""
    endpoints = [await world.endpoint(f"{receiver.url}?{n}") for n in range(40)]
    looked_at, known = [], world.endpoints.known
    world.endpoints.known = lambda endpoint_id: looked_at.append(endpoint_id) or known(endpoint_id)
    async with asyncio.timeout(60):
        await world.schedule.step()
        while looked_at:
            looked_at.clear()
            await asyncio.sleep(0.01)
            await world.schedule.step()
    (one,) = await world.put(endpoints[7], "room")
    await world.wait_state(one, "delivered", 1)
    await world.schedule.step()
    assert set(looked_at) == {endpoints[7].id}


async def test_successful_retry_ends_the_delivery(world, receiver):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    await world.wait_state(one, "waiting", 1)
    receiver.answer = OK
    world.later(endpoint, 10)
    _, attempts = await world.wait_state(one, "delivered", 2)
    assert [attempt.status for attempt in attempts] == [500, 200]


async def test_manual_retry_starts_a_full_cycle_of_retries(world, receiver):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    for n, pause in enumerate(RETRIES, 1):
        await world.wait_state(one, "waiting", n)
        world.later(endpoint, pause)
    await world.wait_state(one, "failed", 4)
    async with world.store.change() as connection:
        await delivery_rows.retry(connection, [one], world.clock())
    world.schedule.endpoint_changed(endpoint.id)
    begun = world.clock()
    for n, pause in enumerate(RETRIES, 5):
        found, _ = await world.wait_state(one, "waiting", n)
        assert found.dead_letter == "retrying"
        world.later(endpoint, pause)
    _, attempts = await world.wait_state(one, "failed", 8)
    assert [attempt.at - begun for attempt in attempts[4:]] == [0, 10, 70, 370]
    assert [request.headers["x-service-attempt"] for request in receiver.requests] == list("12345678")


# -- clock changes


@pytest.mark.parametrize("by_s", [3_600.0, -3_600.0])
async def test_clock_change_does_not_move_retries(world, receiver, by_s):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    await world.wait_state(one, "waiting", 1)
    world.clock.set(by_s)
    # Before the next delivery, which may be attempted as soon as it is written: its retry comes 10 s later.
    world.clock.advance(9.75)
    # A delivery that was written before the schedule noticed the change.
    (two,) = await world.put(endpoint, "lobby", add=False)
    world.schedule.endpoint_changed(endpoint.id)
    async with asyncio.timeout(60):
        while (await world.read(one))[0].at != NOW_S + 10 + by_s:
            await asyncio.sleep(0.01)
    await world.wait_state(two, "waiting", 1)
    receiver.answer = OK
    world.later(endpoint, 0.25)
    await world.wait_state(one, "delivered", 2)
    assert (await world.read(two))[0].attempts == 1


async def test_result_written_after_a_clock_change_uses_the_new_time(world, receiver, wait_until):
    go_on = asyncio.Event()

    async def slow(_request, writer):
        await go_on.wait()
        writer.write(BROKEN)

    receiver.answer = slow
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    await wait_until(lambda: receiver.requests)
    async with world.store.change():
        # This change blocks the schedule's writes, first the adjusted times and then the result of the attempt.
        world.clock.set(-3_600.0)
        world.schedule.endpoint_changed(endpoint.id)
        await wait_until(lambda: world.store._changing._waiters)
        go_on.set()
        await wait_until(lambda: world.schedule.results.unwritten)
    found, _ = await world.wait_state(one, "waiting", 1)
    assert found.at == NOW_S - 3_600 + 10


async def test_clock_set_back_while_stopped_does_not_block_deliveries(world, receiver):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "a")
    await world.wait_state(one, "waiting", 1)
    (two,) = await world.put(endpoint, "b", add=False)
    await world.end()
    world.clock.set(-3_600.0)
    receiver.answer = OK
    world.start()
    await world.wait_state(two, "delivered", 1)
    assert (await world.read(one))[0].at == world.clock() + RETRIES[0]


# -- changes of endpoints


async def test_deliveries_of_a_disabled_endpoint_wait_until_it_is_enabled(world, receiver):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    await world.wait_state(one, "waiting", 1)
    await world.endpoints.set_enabled(endpoint.id, False)
    (two,) = await world.put(endpoint, "lobby")
    world.later(endpoint, 1_000)
    await world.schedule.step()
    assert world.schedule.running == 0
    assert len(receiver.requests) == 1
    receiver.answer = OK
    await world.endpoints.set_enabled(endpoint.id, True)
    await world.wait_state(one, "delivered", 2)
    await world.wait_state(two, "delivered", 1)


async def test_next_attempt_uses_the_new_url_and_secret(world, receiver):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    await world.wait_state(one, "waiting", 1)
    async with Receiver() as moved:
        await world.endpoints.change(endpoint.id, moved.url, None, None, None)
        await world.endpoints.rotate(endpoint.id)
        world.later(endpoint, 10)
        await world.wait_state(one, "delivered", 2)
        (before,), (after,) = receiver.requests, moved.requests
        assert before.headers["x-service-signature"] == after.headers["x-service-signature-previous"]
        assert before.headers["x-service-signature"] != after.headers["x-service-signature"]


async def test_failing_since_is_set_by_the_first_failure_and_reset_by_a_success(world, receiver):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    await world.wait_state(one, "waiting", 1)
    assert world.endpoints.get(endpoint.id).failing_since == NOW_S
    world.later(endpoint, 10)
    await world.wait_state(one, "waiting", 2)

    async def stored():
        async with world.store.reading() as connection:
            return (await endpoint_rows.find_by_id(connection, endpoint.id)).failing_since

    while await stored() != NOW_S:
        await asyncio.sleep(0.01)
    receiver.answer = OK
    world.later(endpoint, 60)
    await world.wait_state(one, "delivered", 3)
    assert world.endpoints.get(endpoint.id).failing_since is None
    # It is written at the end at the latest.
    await world.end()
    assert await stored() is None


async def test_attempt_that_raises_is_repeated_like_any_other(world, receiver, monkeypatch):
    """Without an outcome, the delivery waited until the next process."""
    endpoint = await world.endpoint(receiver.url)

    async def fail(*_):
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(world.sender, "attempt", fail)
    (one,) = await world.put(endpoint, "room")
    _, (attempt,) = await world.wait_state(one, "waiting", 1)
    assert (attempt.outcome, attempt.status) == ("internal", None)
    world.later(endpoint, 10)
    await world.wait_state(one, "delivered", 2)


# -- many deliveries


async def test_hanging_endpoint_has_32_attempts_under_way_and_delays_no_other(world, receiver, wait_until):
    async with Receiver(answer=hang) as hanging:
        dead, quick = await world.endpoint(hanging.url), await world.endpoint(receiver.url)
        await world.put(dead, *(f"c{number}" for number in range(200)))
        await wait_until(lambda: len(hanging.requests) == 32)
        ids = await world.put(quick, *(f"c{number}" for number in range(200)))
        await world.wait_state(ids[-1], "delivered", 1)
        await wait_until(lambda: len(receiver.requests) == 200)
        assert len(hanging.requests) == 32
        await world.end(0.0)


async def test_failing_endpoint_gets_fewer_attempts_at_a_time(world, receiver, wait_until):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    begun = time.monotonic()
    await world.put(endpoint, *(f"c{number}" for number in range(150)))
    await wait_until(lambda: world.schedule.attempts["status"] == 150)
    # The first attempts run without pauses, the rest 5 ms apart.
    assert time.monotonic() - begun > (150 - 20 - 32) * 0.005
    receiver.answer = OK
    world.later(endpoint, 10)
    await wait_until(lambda: world.schedule.attempts["delivered"] == 150)
    assert world.endpoints.get(endpoint.id).failing_since is None


async def test_deliveries_beyond_the_memory_limit_all_arrive_once(world, receiver, wait_until):
    endpoint = await world.endpoint(receiver.url)
    total = 0
    for _ in range(4):
        total += len(await world.put(endpoint, *(f"c{number}" for number in range(600))))
        await asyncio.sleep(0.02)
    await wait_until(lambda: world.schedule.attempts["delivered"] == total)
    assert sorted(numbers(receiver)) == list(range(1, total + 1))


async def test_large_bodies_are_in_memory_up_to_a_bound_and_all_arrive(world, receiver, wait_until, monkeypatch):
    """With their number alone as a bound, an app's 50 endpoints that hang filled the memory."""
    monkeypatch.setattr(world, "body", lambda channel: json.dumps({"n": world.count, "fill": "x" * 100_000}).encode())
    async with Receiver(answer=hang) as hanging:
        endpoint = await world.endpoint(hanging.url)
        await world.put(endpoint, *(f"c{number}" for number in range(100)), add=False)
        world.schedule.endpoint_changed(endpoint.id)
        await wait_until(lambda: len(hanging.requests) >= 10)
        queue = world.schedule._queues[endpoint.id]
        in_memory = len(queue.ready) + queue.running
        assert (in_memory, in_memory * 100_000 <= queue.size < 1_200_000) == (10, True)
        # What is added meanwhile stays in the store too.
        await world.put(endpoint, "d")
        assert len(queue.loaded) == in_memory
        await world.end(0.0)
    await world.endpoints.change(endpoint.id, receiver.url)
    world.start()
    await wait_until(lambda: world.schedule.attempts["delivered"] == 101)
    assert sorted(numbers(receiver)) == list(range(1, 102))


async def test_deliveries_of_one_channel_arrive_in_order(world, wait_until):
    async def slower_and_slower(request, writer):
        # The earlier the delivery, the longer its answer takes.
        await asyncio.sleep(0.02 / request.json()["n"])
        done.append(request.json()["n"])
        writer.write(OK)

    done = []
    async with Receiver(answer=slower_and_slower) as receiver:
        endpoint = await world.endpoint(receiver.url)
        for number in range(20):
            event = ("channel.occupied", "channel.vacated")[number % 2]
            await world.put(endpoint, "room", event=event)
        await wait_until(lambda: len(done) == 20)
    assert done == list(range(1, 21))


# -- discarded deliveries


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_discarded_delivery_is_not_attempted(world, wait_until, elsewhere):
    """`elsewhere`: by another node, from which this one hears that there was a change."""
    async with Receiver(answer=hang) as hanging:
        endpoint = await world.endpoint(hanging.url)
        ids = await world.put(endpoint, *(f"c{number}" for number in range(33)))
        await wait_until(lambda: len(hanging.requests) == 32)
        async with world.store.change() as connection:
            await delivery_rows.discard(connection, [ids[-1]], world.clock())
        found, _ = await world.read(ids[-1])
        if elsewhere:
            world.schedule.endpoint_changed(endpoint.id)
        else:
            world.schedule.withdraw(endpoint.id, [found.number])
        hanging.answer = OK
        (more,) = await world.put(endpoint, "room")
        # Ends the attempts under way to make room for others.
        hanging.break_off()
        await world.wait_state(more, "delivered", 1)
        assert ids[-1] not in {request.headers["x-service-delivery"] for request in hanging.requests}
        assert (await world.read(ids[-1]))[0].state == "discarded"


# -- stops and starts


async def test_next_process_continues_with_the_waiting_deliveries(world, receiver):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    (retried,) = await world.put(endpoint, "a")
    await world.wait_state(retried, "waiting", 1)
    (untried,) = await world.put(endpoint, "b", add=False)
    await world.end()
    receiver.answer = OK
    world.clock.advance(5)
    await world.endpoints.load()
    world.start()
    await world.wait_state(untried, "delivered", 1)
    assert (await world.read(retried))[0].attempts == 1
    world.later(endpoint, 5)
    await world.wait_state(retried, "delivered", 2)


async def test_start_reads_only_endpoints_with_waiting_deliveries_and_misses_no_new_one(world, receiver, monkeypatch):
    endpoints = [await world.endpoint(receiver.url) for _ in range(4)]
    await world.end()
    before = await world.put(endpoints[0], "a", "b", add=False)
    await world.endpoints.set_enabled(endpoints[3].id, False)
    asked, filled = due_deliveries.endpoints_with_waiting, []
    meanwhile = []

    async def slow(connection):
        found = await asked(connection)
        for endpoint in (endpoints[0], endpoints[1], endpoints[3]):
            meanwhile.extend(await world.put(endpoint, "a"))
        return found

    async def due(connection, endpoint_id, *more, ask=due_deliveries.due):
        filled.append(endpoint_id)
        return await ask(connection, endpoint_id, *more)

    monkeypatch.setattr(due_deliveries, "endpoints_with_waiting", slow)
    monkeypatch.setattr(due_deliveries, "due", due)
    world.start()
    for delivery_id in (*before, *meanwhile[:2]):
        await world.wait_state(delivery_id, "delivered", 1)
    assert set(filled) == {endpoints[0].id}
    # Deliveries of a channel stay in order if some of them waited before.
    on_a = [number for number in numbers(receiver) if number in (1, 3)]
    assert on_a == [1, 3]
    await world.endpoints.set_enabled(endpoints[3].id, True)
    await world.wait_state(meanwhile[2], "delivered", 1)


async def test_finish_waits_for_attempts_under_way_and_stores_their_results(world, wait_until):
    ending = asyncio.Event()

    async def slow(_request, writer):
        await ending.wait()
        writer.write(OK)

    async with Receiver(answer=slow) as receiver:
        endpoint = await world.endpoint(receiver.url)
        ids = await world.put(endpoint, *(f"c{number}" for number in range(40)))
        await wait_until(lambda: len(receiver.requests) == 32)
        end = asyncio.create_task(world.end())
        await wait_until(lambda: world.schedule._finishing)
        ending.set()
        await end
        states = [(await world.read(delivery_id))[0].state for delivery_id in ids]
    assert states == ["delivered"] * 32 + ["waiting"] * 8


async def test_finish_that_is_cancelled_loses_no_result(world, receiver, wait_until):
    go_on = asyncio.Event()

    async def slow(_request, writer):
        await go_on.wait()
        writer.write(OK)

    receiver.answer = slow
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    await wait_until(lambda: receiver.requests)
    async with world.store.change():
        # This change blocks the write of the result.
        go_on.set()
        await wait_until(lambda: world.schedule.results.unwritten)
        finishing = asyncio.create_task(world.schedule.finish(60.0))
        await wait_until(lambda: world.schedule.results._stopping)
        finishing.cancel()
        await asyncio.wait([finishing])
    await world.end()
    assert (await world.read(one))[0].state == "delivered"


async def test_finish_has_a_time_limit_and_cancelled_attempts_are_repeated(world, wait_until):
    async with Receiver(answer=hang) as receiver:
        endpoint = await world.endpoint(receiver.url)
        (one,) = await world.put(endpoint, "room")
        await wait_until(lambda: receiver.requests)
        await world.end(0.05)
        assert (await world.read(one))[0].attempts == 0
        receiver.answer = OK
        world.start()
        await world.wait_state(one, "delivered", 1)
    assert [request.headers["x-service-attempt"] for request in receiver.requests] == ["1", "1"]
