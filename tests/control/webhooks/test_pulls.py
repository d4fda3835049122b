"""Deliveries that a back end pulls: handed out, leased, acknowledged, and dead letters in the end."""

import asyncio
import contextlib
from uuid import uuid4

import pytest

from control.webhooks.transitions import APP, OTHER, Box, transition
from redpoll.config.settings import Settings
from redpoll.control.records.records import RecordError, Records
from redpoll.control.tracing.spans import Spans
from redpoll.control.webhooks.payloads import format_of
from redpoll.control.webhooks.pulls import MAX_LIMIT
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.store.store import Store


async def waiting(webhooks, count, app_id=APP):
    """Waits until this many deliveries are in the store."""
    async with asyncio.timeout(60):
        while len(await webhooks.deliveries(app_id, states=("waiting",), limit=10_000)) != count:
            await asyncio.sleep(0.01)


async def pulled(make_webhooks, *rows, **settings):
    """A started Webhooks with an endpoint that is pulled, and these deliveries."""
    box = Box()
    webhooks = await make_webhooks(box, **settings)
    endpoint = await webhooks.endpoints.create(APP, None)
    box.put(*rows)
    await waiting(webhooks, len(rows))
    return webhooks, endpoint


async def take(webhooks, limit=MAX_LIMIT):
    handed, _ = await webhooks.pulls.hand_out(APP, None, limit)
    return [(one.id, one.attempt) for one in handed]


async def run_out(webhooks, store):
    """Makes a dead letter of the delivery whose last lease has ended, unless the tidying did it meanwhile."""
    async with asyncio.timeout(60):
        while not webhooks.pulls.failed_total:
            await webhooks.pulls.run_out(store)


async def test_unacknowledged_delivery_comes_again_by_the_schedule_and_ends_as_dead_letter(make_webhooks, clock, store):
    webhooks, _ = await pulled(
        make_webhooks, transition(), webhook_retry_after_s=(10.0, 90.0), webhook_acknowledge_within_s=60.0
    )
    ((delivery_id, _),) = await take(webhooks)
    # The lease is longer than the first pause, and shorter than the second.
    for attempt, pause_s in ((2, 60), (3, 90)):
        clock.advance(pause_s - 1)
        assert await webhooks.pulls.hand_out(APP, None, 10) == ([], 1.0)
        clock.advance(1)
        assert await take(webhooks) == [(delivery_id, attempt)]
    clock.advance(60)
    assert await webhooks.pulls.hand_out(APP, None, 10) == ([], None)
    await run_out(webhooks, store)
    found, _, attempts = await webhooks.delivery(delivery_id)
    assert (found.state, [one.outcome for one in attempts]) == ("failed", ["unacked"] * 3)
    await webhooks.dead_letters.retry([delivery_id])
    assert await take(webhooks) == [(delivery_id, 4)]
    assert await webhooks.pulls.acknowledge(APP, [delivery_id]) == 1
    assert webhooks.pulls.attempts == {"unacked": 3, "delivered": 1}
    assert webhooks.attempts_by_app == {APP: (1, 3)}


async def test_acknowledgement_ends_a_delivery_once_also_a_late_one(make_webhooks, clock, store):
    webhooks, _ = await pulled(make_webhooks, transition(), transition(channel="b"), webhook_retry_after_s=())
    ids = [delivery_id for delivery_id, _ in await take(webhooks)]
    assert await webhooks.pulls.acknowledge(OTHER, ids) == 0
    assert await webhooks.pulls.acknowledge(APP, [ids[0], "unknown"]) == 1
    assert await webhooks.pulls.acknowledge(APP, ids[:1]) == 0
    clock.advance(60)
    await run_out(webhooks, store)
    # It was done, but late: it is no dead letter.
    assert await webhooks.pulls.acknowledge(APP, ids[1:]) == 1
    found, _, (attempt,) = await webhooks.delivery(ids[1])
    assert (found.state, attempt.outcome, attempt.reason, attempt.duration_ms) == (
        "delivered",
        "delivered",
        "acknowledged",
        60_000,
    )


async def test_acknowledgement_of_unknown_deliveries_does_not_wait_for_those_who_change_records(make_webhooks, store):
    webhooks, _ = await pulled(make_webhooks, transition())
    unknown = [str(uuid4()) for _ in range(3)]
    async with asyncio.timeout(60), store.change():
        assert await webhooks.pulls.acknowledge(APP, unknown) == 0


async def test_one_request_of_an_app_at_a_time_waits_among_all_that_change_records(make_webhooks, store, monkeypatch):
    webhooks, _ = await pulled(make_webhooks, *(transition(channel=f"c{number}") for number in range(20)))
    ids = [delivery_id for delivery_id, _ in await take(webhooks, 10)]
    change, running, most = store.change, 0, 0

    @contextlib.asynccontextmanager
    async def counted():
        nonlocal running, most
        # The webhooks' own tasks change something too.
        ours = asyncio.current_task() in tasks
        running += ours
        most = max(most, running)
        try:
            async with change() as connection:
                yield connection
        finally:
            running -= ours

    monkeypatch.setattr(store, "change", counted)
    tasks = [asyncio.create_task(webhooks.pulls.acknowledge(APP, [delivery_id])) for delivery_id in ids]
    tasks += [asyncio.create_task(take(webhooks, 1)) for _ in range(10)]
    answers = await asyncio.gather(*tasks)
    assert answers[:10] == [1] * 10
    assert len({delivery_id for answer in answers[10:] for delivery_id, _ in answer} - set(ids)) == 10
    assert most == 1


async def test_no_delivery_has_two_leases_and_none_is_sent(make_webhooks):
    rows = [transition(channel=f"c{n}") for n in range(50)]
    webhooks, endpoint = await pulled(make_webhooks, *rows)
    answers = await asyncio.gather(*(take(webhooks, 10) for _ in range(8)))
    assert len({delivery_id for answer in answers for delivery_id, _ in answer}) == sum(map(len, answers)) == 50
    assert webhooks.counters()["webhook_attempts_running"] == 0
    assert {attempt for answer in answers for _, attempt in answer} == {1}
    with pytest.raises(RecordError, match="no URL"):
        await webhooks.test(endpoint.id)
    with pytest.raises(RecordError, match="no URL"):
        await webhooks.endpoints.pin(endpoint.id)
    with pytest.raises(RecordError, match="create another"):
        await webhooks.endpoints.change(endpoint.id, "https://example.com/")


async def test_two_nodes_on_one_database_hand_out_each_delivery_once_within_its_lease(postgres_url, clock):
    """Each node has its own connections, records and endpoints."""
    stores = [await Store.open(postgres_url) for _ in range(2)]
    nodes = []
    try:
        for store in stores:
            records = Records(store)
            await records.load()
            if not nodes:
                await records.upsert_app(APP, "a" * 20, "b" * 40)
            nodes.append(Webhooks(store, records, Settings(), clock=clock, steady=clock.steady))
            await nodes[-1].load()
            if len(nodes) == 1:
                await nodes[0].endpoints.create(APP, None)
        box = Box(*(transition(channel=f"c{n}") for n in range(40)))
        nodes[0].start(box, lambda *_: None)
        await waiting(nodes[0], 40)
        for attempt in (1, 2):
            answers = await asyncio.gather(*(take(node, 5) for node in nodes * 5))
            taken = [one for answer in answers for one in answer]
            assert (len(set(taken)), len(taken), {number for _, number in taken}) == (40, 40, {attempt})
            assert [await take(node) for node in nodes] == [[], []]
            clock.advance(61)
        # Each node acknowledges what the other may have handed out, also beside what PostgreSQL can't store.
        ids = ["\0", "\0" * 36, *(delivery_id for delivery_id, _ in taken)]
        ended = await asyncio.gather(*(node.pulls.acknowledge(APP, ids) for node in nodes))
        assert sum(ended) == 40
        assert [await take(node) for node in nodes] == [[], []]
    finally:
        for node in nodes:
            await node.finish()
        for store in stores:
            await store.close()


async def test_acknowledged_deliveries_make_room_at_once_also_those_that_another_node_ended(make_webhooks):
    """Deliveries were dropped although none waited: the bound was counted again only every five seconds."""
    box = Box()
    webhooks = await make_webhooks(box, webhook_max_waiting=1_000)
    await webhooks.endpoints.create(APP, None)
    other = await make_webhooks()

    async def fill(prefix, count):
        box.put(*(transition(channel=f"private-{prefix}{n}") for n in range(count)))
        await waiting(webhooks, 1_000)

    await fill("a", 1_000)
    for number, node in enumerate((webhooks, other)):
        for _ in range(10):
            ids = [delivery_id for delivery_id, _ in await take(node)]
            assert await node.pulls.acknowledge(APP, ids) == 100
        await fill(f"b{number}", 1_000)
    assert webhooks.counters()["webhook_deliveries_dropped_total"] == 0


async def test_delivery_that_is_pulled_carries_its_trace(make_webhooks):
    webhooks, _ = await pulled(make_webhooks, transition("client_event", trace="ab" * 16))
    sent = []
    webhooks.pulls.spans = Spans(sent.append, 1)
    ((delivery,), _) = await webhooks.pulls.hand_out(APP, None, 1)
    (span,) = sent
    assert delivery.headers["traceparent"] == f"00-{'ab' * 16}-{span.span_id}-01"
    assert (span.name, span.attributes["redpoll.delivery"]) == ("webhook", delivery.id)


async def test_headers_are_those_of_the_body_after_the_format_was_changed(make_webhooks):
    """Waiting deliveries were handed out in Pusher's format without Pusher's signature."""
    box = Box()
    webhooks = await make_webhooks(box)
    formats = {APP: ("service", "pusher"), OTHER: ("pusher", "service")}
    endpoints = {app: await webhooks.endpoints.create(app, None, format=formats[app][0]) for app in formats}
    box.put(*(transition(app_id=app) for app in formats))
    bodies, signs = {}, {}
    for app, endpoint in endpoints.items():
        await waiting(webhooks, 1, app)
        await webhooks.endpoints.change(endpoint.id, format=formats[app][1])
        ((delivery,), _) = await webhooks.pulls.hand_out(app, None, 1)
        bodies[app], signs[app] = delivery.body, "X-Pusher-Signature" in delivery.headers
    assert [format_of(body) for body in bodies.values()] == ["service", "pusher"]
    assert signs == {APP: False, OTHER: True}


async def test_disabled_endpoint_hands_out_nothing_and_another_app_has_none(make_webhooks):
    webhooks, endpoint = await pulled(make_webhooks, transition())
    await webhooks.endpoints.set_enabled(endpoint.id, False)
    assert await webhooks.pulls.hand_out(APP, endpoint.id, 1) == ([], None)
    with pytest.raises(RecordError, match="--pull"):
        await webhooks.pulls.hand_out(OTHER, None, 1)
    with pytest.raises(RecordError, match="no webhook with the id x"):
        await webhooks.pulls.hand_out(APP, "x", 1)
    announced = []
    webhooks.pulls.announce = lambda *said: announced.append(said)
    await webhooks.endpoints.set_enabled(endpoint.id, True)
    assert announced == [(APP, b"w")]
    # One that takes nothing leases nothing.
    assert await webhooks.pulls.hand_out(APP, None, 0) == ([], None)
    ((delivery_id, attempt),) = await take(webhooks)
    assert attempt == 1
    assert await webhooks.pulls.acknowledge(APP, [delivery_id, "unknown"]) == 1
    assert (announced[1:], await webhooks.pulls.acknowledge(APP, [delivery_id])) == (
        [(APP, b"a %b" % delivery_id.encode())],
        0,
    )
    assert len(announced) == 2


async def test_lease_keeps_its_length_when_the_clock_is_set_or_another_node_leads(make_webhooks, clock):
    webhooks, _ = await pulled(make_webhooks, transition(), webhook_retry_after_s=(1.0,))
    ((delivery_id, _),) = await take(webhooks)
    clock.set(3_600)
    async with asyncio.timeout(60):
        while (await webhooks.deliveries(APP))[0].at != clock() + 60:
            await asyncio.sleep(0.01)
    assert await webhooks.pulls.hand_out(APP, None, 1) == ([], 60.0)
    clock.advance(60)
    assert await take(webhooks) == [(delivery_id, 2)]


async def test_only_client_events_with_the_wanted_names_become_deliveries(make_webhooks):
    box = Box()
    webhooks = await make_webhooks(box)
    await webhooks.endpoints.create(APP, None, ["client_event", "member.added"], client_events=["client-order"])
    await webhooks.endpoints.create(APP, None, ["client_event"])
    details = [b'{"event":"client-%b","data":"1","socket_id":"1.2"}' % name for name in (b"order", b"typing")]
    box.put(
        *(transition("client_event", detail=detail) for detail in details), transition("member.added", "presence-a")
    )
    await waiting(webhooks, 4)
    handed, _ = await webhooks.pulls.hand_out(APP, None, 10)
    assert sorted(one.event for one in handed) == ["client_event"] * 3 + ["member.added"]
    assert sum(b"client-typing" in one.body for one in handed) == 1
