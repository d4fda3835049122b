"""Events that are sent together: which ones, when, and what follows from the answer. On a fake clock."""

import asyncio
import json
import time
from collections import Counter

import pytest
from pusher import Pusher

from control.webhooks.scheduled import RETRIES, World
from control.webhooks.transitions import APP
from helpers.receiver import OK, Receiver, hang, status
from redpoll.control.webhooks.batches import Batches
from redpoll.control.webhooks.ordering import ReadyDeliveries
from redpoll.control.webhooks.payloads import batch_id
from redpoll.store import deliveries as delivery_rows
from redpoll.store.deliveries import Waiting

BROKEN = status(500, "Internal Server Error")
SECOND = 1.0


class Batching(World):
    """With bodies in the pusher format; `text` makes them larger. The library of PyPI refuses old ones."""

    text = ""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.begun_ms = time.time_ns() // 1_000_000

    def body(self, channel):
        event = {"name": "channel_occupied", "channel": channel, "text": self.text, "seq": self.count}
        return json.dumps({"time_ms": self.begun_ms + self.count, "events": [event]}, separators=(",", ":")).encode()

    async def endpoint(self, url, **more):
        return await super().endpoint(url, **{"format": "pusher", "batch": True, **more})

    def later(self, endpoint, seconds):
        # What is in memory and what is due is sent, without a look for changes of the endpoint.
        self.clock.advance(seconds)
        self.schedule.add(())

    async def put_many(self, endpoint, number):
        return await self.put(endpoint, *(f"room-{self.count + n}" for n in range(number)))

    async def start_again(self, retries):
        await self.end()
        self.retries = retries
        self.start()

    async def all_in(self, ids, state, attempts):
        for one in ids:
            await self.wait_state(one, state, attempts)


@pytest.fixture
async def world(monkeypatch, store, records, clock):
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    made = Batching(store, records, clock)
    made.start()
    yield made
    await made.end(0.0)
    await made.sender.close()


def events_of(request):
    """The numbers of the request's events."""
    return [event["seq"] for event in request.json()["events"]]


def sizes(receiver):
    return [len(events_of(request)) for request in receiver.requests]


async def refuse_7(request, writer):
    """A receiver that fails because of one event."""
    writer.write(BROKEN if 7 in events_of(request) else OK)


# -- when


async def test_lone_event_is_sent_at_once_and_those_of_the_following_second_together(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    await world.wait_state(*await world.put(endpoint, "room"), "delivered", 1)
    ids = await world.put(endpoint, "room", event="channel.vacated")
    world.later(endpoint, 0.999)
    ids += await world.put(endpoint, "lobby", "room", "lobby")
    await world.schedule.step()
    assert (world.schedule.running, sizes(receiver)) == (0, [1])
    world.later(endpoint, 0.001)
    await world.all_in(ids, "delivered", 1)
    assert [events_of(request) for request in receiver.requests] == [[1], [2, 3, 4, 5]]
    # The one that comes more than a second later isn't held back either.
    world.later(endpoint, SECOND)
    await world.wait_state(*await world.put(endpoint, "room"), "delivered", 1)
    assert sizes(receiver) == [1, 4, 1]


async def test_schedule_wakes_when_the_second_is_over(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    await world.wait_state(*await world.put(endpoint, "room"), "delivered", 1)
    ids = await world.put(endpoint, "room", "lobby")
    world.clock.advance(0.75)
    assert await world.schedule.step() == 0.25
    world.clock.advance(0.25)
    await world.all_in(ids, "delivered", 1)
    # Nothing waits for the end of this one.
    assert (await world.schedule.step(), sizes(receiver)) == (SECOND, [1, 2])


async def test_events_of_many_channels_and_moments_arrive_once_in_few_requests_in_order(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    ids = []
    for moment in range(4):
        for number in range(10):
            ids += await world.put(endpoint, *(f"room-{number % channels}" for channels in (2, 3, 7)))
        world.later(endpoint, SECOND)
        await world.all_in(ids, "delivered", 1)
        assert len(receiver.requests) <= 2 * (moment + 1)
    assert [seq for request in receiver.requests for seq in events_of(request)] == list(range(1, len(ids) + 1))


async def test_more_than_a_hundred_events_are_divided_and_sent_one_request_after_the_other(world, wait_until):
    running, most = 0, 0

    async def slow(_request, writer):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        writer.write(OK)

    async with Receiver(answer=slow) as receiver:
        endpoint = await world.endpoint(receiver.url)
        ids = await world.put_many(endpoint, 250)
        await world.all_in(ids, "delivered", 1)
    # Without any time in between.
    assert (sizes(receiver), most) == ([100, 100, 50], 1)
    assert [seq for request in receiver.requests for seq in events_of(request)] == list(range(1, 251))


async def test_large_events_are_divided_by_their_size(world, receiver):
    world.text = "x" * 100_000
    endpoint = await world.endpoint(receiver.url)
    ids = await world.put_many(endpoint, 4)
    world.text = "x" * 300_000
    ids += await world.put_many(endpoint, 1)
    await world.all_in(ids, "delivered", 1)
    assert sizes(receiver) == [2, 2, 1]


async def test_deliveries_beyond_the_memory_limit_all_arrive_once_and_in_order(world, receiver, wait_until):
    endpoint = await world.endpoint(receiver.url)
    for _ in range(4):
        await world.put_many(endpoint, 600)
    schedule = world.schedule
    while schedule.attempts["delivered"] < 2_400:
        seen = schedule.attempts["delivered"]
        world.later(endpoint, SECOND)
        await wait_until(lambda seen=seen: schedule.attempts["delivered"] > seen)
    assert [seq for request in receiver.requests for seq in events_of(request)] == list(range(1, 2_401))
    # At the end of what is in memory, a request isn't full.
    assert len(receiver.requests) <= 36


def test_request_that_takes_all_that_memory_has_room_for_waits_for_no_others():
    batches, ready = Batches(), ReadyDeliveries()

    def add(*numbers):
        for number in numbers:
            fields = {"number": number, "channel": "room", "body": b'{"time_ms":1,"events":[]}'}
            ready.add(Waiting(**{**dict.fromkeys(Waiting._fields, 0), **fields}))

    add(1)
    assert [one.number for one in batches.take(ready, 3, 100.0)] == [1]
    ready.done(*[])
    add(2, 3)
    assert batches.take(ready, 3, 100.1) == []
    assert batches.due_at == 101.0
    assert [one.number for one in batches.take(ready, 3, 100.1, leaves=True)] == [2, 3]


async def test_set_clock_neither_ends_nor_prolongs_the_second(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    await world.wait_state(*await world.put(endpoint, "room"), "delivered", 1)
    ids = await world.put(endpoint, "room", "lobby")
    for by_s in (3_600.0, -7_200.0):
        world.clock.set(by_s)
        await world.schedule.step()
        assert (world.schedule.running, sizes(receiver)) == (0, [1])
    world.later(endpoint, SECOND)
    await world.all_in(ids, "delivered", 1)
    assert sizes(receiver) == [1, 2]


# -- what the receiver sees


async def test_signature_and_headers_are_those_of_the_whole_request(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    await world.wait_state(*await world.put(endpoint, "room"), "delivered", 1)
    ids = await world.put(endpoint, "a", "b", "a")
    world.later(endpoint, SECOND)
    await world.all_in(ids, "delivered", 1)
    one, several = receiver.requests
    assert (one.headers["x-service-event"], one.headers["x-service-delivery"]) == ("channel.occupied", "d1")
    shown = {name: several.headers[f"x-service-{name}"] for name in ("event", "delivery", "attempt")}
    assert shown == {"event": "batch", "delivery": batch_id(ids), "attempt": "1"}
    key = world.signing_key(APP)
    library = Pusher(app_id=APP, key=key.key, secret=key.secret)
    for request in (one, several):
        signed = request.headers["x-pusher-key"], request.headers["x-pusher-signature"]
        checked = library.validate_webhook(*signed, request.body.decode())
        assert [event["channel"] for event in checked["events"]] in (["room"], ["a", "b", "a"])
    assert several.json()["time_ms"] == world.begun_ms + 4


async def test_attempts_say_how_many_events_the_request_had(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    (one,) = await world.put(endpoint, "room")
    _, (lone,) = await world.wait_state(one, "delivered", 1)
    ids = await world.put_many(endpoint, 3)
    world.later(endpoint, SECOND)
    _, (common,) = await world.wait_state(ids[0], "delivered", 1)
    assert (lone.reason, common.reason) == ("200 OK", "200 OK; one of 3 events in the request")


# -- failures


async def test_answer_500_makes_all_of_them_wait_and_the_last_attempt_is_made_alone(world, receiver):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    ids = await world.put_many(endpoint, 25)
    await world.all_in(ids, "waiting", 1)
    assert sizes(receiver) == [25]
    for number, pause in enumerate(RETRIES[:2], 2):
        world.later(endpoint, pause)
        await world.all_in(ids, "waiting", number)
        assert sizes(receiver)[-3:] == [10, 10, 5]
        assert {request.headers["x-service-attempt"] for request in receiver.requests[-3:]} == {str(number)}
    world.later(endpoint, RETRIES[2])
    await world.all_in(ids, "failed", 4)
    assert sizes(receiver) == [25, *[10, 10, 5] * 2, *[1] * 25]
    assert {request.headers["x-service-delivery"] for request in receiver.requests[-25:]} == set(ids)
    assert (world.schedule.failed_total, world.schedule.attempts) == (25, {"status": 100})


async def test_event_that_the_receiver_refuses_takes_no_other_into_the_dead_letters(world, wait_until):
    async with Receiver(answer=refuse_7) as receiver:
        endpoint = await world.endpoint(receiver.url)
        ids = await world.put_many(endpoint, 60)
        await world.all_in(ids, "waiting", 1)
        world.later(endpoint, RETRIES[0])
        # All but the ten that it was sent with again.
        await world.all_in(ids[10:], "delivered", 2)
        await world.all_in(ids[:10], "waiting", 2)
        world.later(endpoint, RETRIES[1])
        await world.all_in(ids[:10], "waiting", 3)
        world.later(endpoint, RETRIES[2])
        await world.all_in([one for one in ids[:10] if one != "d7"], "delivered", 4)
        await world.wait_state("d7", "failed", 4)


async def test_new_events_are_not_sent_with_failed_ones_and_do_not_wait_for_all_of_them(world, receiver, wait_until):
    receiver.answer = BROKEN
    endpoint = await world.endpoint(receiver.url)
    failed = await world.put_many(endpoint, 30)
    await world.all_in(failed, "waiting", 1)
    ready = world.schedule._queues[endpoint.id].ready

    async def when_all_are_ready(request, writer):
        await wait_until(lambda: len(ready) == 80 or len(receiver.requests) > 2)
        writer.write(OK)

    receiver.answer = when_all_are_ready
    # First the new ones: the schedule would send the failed ones as soon as they are due.
    new = await world.put_many(endpoint, 150)
    world.later(endpoint, RETRIES[0])
    await world.all_in(failed, "delivered", 2)
    await world.all_in(new, "delivered", 1)
    batches = [events_of(request) for request in receiver.requests[1:]]
    assert all(max(batch) <= 30 or min(batch) > 30 for batch in batches)
    # In turn.
    assert [len(batch) for batch in batches] == [100, 10, 50, 10, 10]


async def test_retried_dead_letter_is_not_sent_with_new_events(world, receiver):
    receiver.answer = BROKEN
    await world.start_again(RETRIES[:1])
    endpoint = await world.endpoint(receiver.url)
    ids = await world.put_many(endpoint, 3)
    await world.all_in(ids, "waiting", 1)
    world.later(endpoint, RETRIES[0])
    await world.all_in(ids, "failed", 2)
    receiver.answer = OK
    async with world.store.change() as connection:
        await delivery_rows.retry(connection, ids, world.clock())
    world.schedule.endpoint_changed(endpoint.id)
    new = await world.put_many(endpoint, 3)
    world.later(endpoint, SECOND)
    await world.all_in(ids, "delivered", 3)
    await world.all_in(new, "delivered", 1)
    assert {tuple(events_of(request)) for request in receiver.requests[-2:]} == {(1, 2, 3), (4, 5, 6)}


async def test_without_retries_every_event_is_sent_alone(world, receiver):
    await world.start_again(())
    endpoint = await world.endpoint(receiver.url)
    ids = await world.put_many(endpoint, 5)
    await world.all_in(ids, "delivered", 1)
    assert sizes(receiver) == [1] * 5


# -- changes while deliveries wait


async def test_discarded_events_are_not_sent(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    await world.wait_state(*await world.put(endpoint, "room"), "delivered", 1)
    ids = await world.put(endpoint, "a", "a", "b", "b")
    async with world.store.change() as connection:
        await delivery_rows.discard(connection, [ids[0], ids[3]], world.clock())
    world.schedule.withdraw(endpoint.id, [(await world.read(one))[0].number for one in (ids[0], ids[3])])
    world.later(endpoint, SECOND)
    await world.all_in(ids[1:3], "delivered", 1)
    assert [events_of(request) for request in receiver.requests] == [[1], [3, 4]]


async def test_disabled_endpoint_gets_nothing_when_the_second_is_over(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    await world.wait_state(*await world.put(endpoint, "room"), "delivered", 1)
    ids = await world.put(endpoint, "a", "b")
    await world.endpoints.set_enabled(endpoint.id, False)
    world.later(endpoint, SECOND)
    await world.schedule.step()
    assert (world.schedule.running, sizes(receiver)) == (0, [1])
    await world.endpoints.set_enabled(endpoint.id, True)
    await world.all_in(ids, "delivered", 1)
    assert sizes(receiver) == [1, 2]


async def test_switched_on_while_requests_run_it_waits_for_them_and_then_sends_the_rest_together(world, wait_until):
    async with Receiver(answer=hang) as receiver:
        endpoint = await world.endpoint(receiver.url, batch=False)
        ids = await world.put_many(endpoint, 50)
        await wait_until(lambda: len(receiver.requests) == 32)
        await world.endpoints.change(endpoint.id, batch=True)
        await world.schedule.step()
        assert len(receiver.requests) == 32
        receiver.answer = OK
        receiver.break_off()
        # Those that were broken off are retried.
        await world.all_in(ids[32:], "delivered", 1)
        assert sizes(receiver) == [*[1] * 32, 18]


async def test_switched_off_it_sends_what_waited_for_the_second(world, receiver):
    endpoint = await world.endpoint(receiver.url)
    await world.wait_state(*await world.put(endpoint, "room"), "delivered", 1)
    ids = await world.put(endpoint, "room", "lobby", "room")
    await world.schedule.step()
    assert sizes(receiver) == [1]
    await world.endpoints.change(endpoint.id, batch=False)
    await world.all_in(ids, "delivered", 1)
    assert sizes(receiver) == [1] * 4
    of_room = [
        events_of(request)[0] for request in receiver.requests if request.json()["events"][0]["channel"] == "room"
    ]
    assert of_room == [1, 2, 4]


async def test_switched_off_while_a_request_runs_the_next_event_of_its_channels_waits_for_it(world, wait_until):
    async with Receiver(answer=hang) as receiver:
        endpoint = await world.endpoint(receiver.url)
        await world.put(endpoint, "room", "room", "lobby")
        await wait_until(lambda: len(receiver.requests) == 1)
        await world.endpoints.change(endpoint.id, batch=False)
        (more,) = await world.put(endpoint, "room", event="channel.vacated")
        await world.schedule.step()
        assert len(receiver.requests) == 1
        receiver.answer = OK
        receiver.break_off()
        await world.wait_state(more, "delivered", 1)
        assert sizes(receiver) == [3, 1]


async def test_body_of_the_other_format_is_sent_alone(world, receiver):
    endpoint = await world.endpoint(receiver.url, format="service", batch=False)
    await world.endpoints.set_enabled(endpoint.id, False)
    world.body = lambda _channel: b'{"event":"channel.occupied","data":{},"timestamp":0}'
    ids = await world.put(endpoint, "a", "b")
    del world.body
    ids += await world.put(endpoint, "c", "d")
    await world.endpoints.change(endpoint.id, format="pusher", batch=True, enabled=True)
    await world.all_in(ids, "delivered", 1)
    assert ["events" in request.json() for request in receiver.requests] == [False, False, True]


# -- stops


async def test_finish_stores_the_results_of_a_running_request(world, wait_until):
    async with Receiver(answer=hang) as receiver:
        endpoint = await world.endpoint(receiver.url)
        ids = await world.put_many(endpoint, 20)
        await wait_until(lambda: len(receiver.requests) == 1)
        running = asyncio.create_task(world.end())
        await asyncio.sleep(0)
        receiver.break_off()
        await running
        assert {(await world.read(one))[0].attempts for one in ids} == {1}


async def test_after_a_kill_fewer_than_200_events_are_repeated_and_none_is_lost(world, wait_until):
    came = Counter()

    async def count(request, writer):
        came.update(events_of(request))
        writer.write(OK)

    async with Receiver(answer=count) as receiver:
        endpoint = await world.endpoint(receiver.url)
        # No result is written any more.
        world.schedule.results.write = never
        ids = await world.put_many(endpoint, 500)
        await wait_until(lambda: len(receiver.requests) == 1)
        await world.schedule.step()
        assert sum(came.values()) == 100
        for task in (world.running, world.schedule._writing, *world.schedule._tasks):
            task.cancel()
        await asyncio.gather(world.running, world.schedule._writing, return_exceptions=True)
        world.start()
        await world.all_in(ids, "delivered", 1)
    assert sum(came.values()) - len(came) < 200
    assert sorted(came) == list(range(1, 501))


async def never():
    await asyncio.get_running_loop().create_future()
