"""Webhooks from a row of the outbox to the receiver, with kills, stops, deletions, and the operator's actions."""

import asyncio
import random
import subprocess
import sys
import textwrap
import time

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from control.webhooks.transitions import APP, NOW_S, OTHER, Box, content_of, kill, seen, tidy, transition
from helpers.receiver import OK, Receiver, hang, status
from redpoll.cluster.redis.keys import Keys
from redpoll.control.observe.metrics import FAMILIES
from redpoll.control.records import loaded_records
from redpoll.control.records.records import RecordError
from redpoll.control.webhooks.webhooks import FAILING_AFTER_S
from redpoll.store.errors import StoreUnavailable
from redpoll.store.store import Store

BROKEN = status(500, "Internal Server Error")


async def failed(make_webhooks, receiver, *rows, box=None):
    """A started Webhooks whose deliveries are all dead letters, and their endpoint."""
    receiver.answer = BROKEN
    box = box or Box()
    webhooks = await make_webhooks(box, webhook_retry_after_s=())
    endpoint = await webhooks.endpoints.create(APP, receiver.url)
    box.put(*rows)
    await seen(webhooks, "failed", len(rows))
    return webhooks, endpoint


# -- from the outbox to a receiver


async def test_healthy_endpoint_gets_everything_also_between_two_counts_of_what_waits(make_webhooks, receiver):
    """What was sent counted against webhook_max_waiting until the tidying counted again."""
    box = Box()
    webhooks = await make_webhooks(box, {"tidy_every_s": 3_600.0}, webhook_max_waiting=1_000)
    await webhooks.endpoints.create(APP, receiver.url, events=["channel.occupied"])
    for part in range(1, 4):
        box.put(*(transition(channel=f"c{part}-{number}") for number in range(300)))
        await seen(webhooks, "delivered", 300 * part)
    assert webhooks.counters()["webhook_deliveries_dropped_total"] == 0


async def test_transitions_are_delivered_to_the_endpoints_that_want_them(make_webhooks, receiver):
    box = Box()
    webhooks = await make_webhooks(box)
    await webhooks.endpoints.create(APP, receiver.url, events=["member.added"], channels=["presence-"])
    await webhooks.endpoints.create(OTHER, receiver.url)
    box.put(transition("member.added", "presence-a", user="ann"), transition("channel.occupied", "presence-a"))
    box.put(transition("channel.vacated", "x", app_id=OTHER))
    await seen(webhooks, "delivered", 1)
    await seen(webhooks, "delivered", 1, OTHER)
    expected = [("channel.vacated", "x", None), ("member.added", "presence-a", "ann")]
    assert sorted(map(content_of, receiver.requests)) == expected
    counters = webhooks.counters()
    assert counters.keys() <= FAMILIES.keys()
    assert (counters["webhook_transitions_total"], counters["webhook_attempts_delivered_total"]) == (3, 2)
    assert webhooks.attempts_by_app == {APP: (1, 0), OTHER: (1, 0)}


async def test_dead_letters_and_tests_work_without_a_running_server(make_webhooks, receiver, clock):
    before, endpoint = await failed(make_webhooks, receiver, transition("client_event"), transition("client_event"))
    await kill(before)
    receiver.answer = OK
    alone = await make_webhooks()
    one, two = await alone.deliveries(APP, states=("failed",))
    await alone.dead_letters.retry([one.id])
    await alone.dead_letters.discard([two.id])
    assert (await alone.test(endpoint.id)).ok
    assert alone.counters() == {"webhook_failed_total": 0}
    # The next server sends the retried delivery.
    after = await make_webhooks(Box())
    (delivered,) = await seen(after, "delivered", 1)
    assert (delivered.id, delivered.dead_letter) == (one.id, "delivered")


# -- kills and stops


async def test_everything_arrives_despite_kills_and_repeats_have_the_same_id(make_webhooks, wait_until):
    box, rows = Box(), []
    async with Receiver(answer=hang) as receiver:
        webhooks = await make_webhooks()
        await webhooks.endpoints.create(APP, receiver.url)
        for moment in range(8):
            rows += [transition(channel=f"c{moment}-{number}") for number in range(40)]
            box.put(*rows[-40:])
            receiver.answer = OK if moment % 2 else hang
            webhooks = await make_webhooks(box)
            await asyncio.sleep(moment * 0.01)
            await kill(webhooks)
        receiver.answer = OK
        webhooks = await make_webhooks(box)
        await seen(webhooks, "delivered", len(rows))
        by_channel = {}
        for request in receiver.requests:
            by_channel.setdefault(content_of(request)[1], set()).add(request.headers["x-service-delivery"])
    assert set(by_channel) == {row.channel for row in rows}
    assert {len(ids) for ids in by_channel.values()} == {1}


def contents_of(request):
    """`(event, channel)` of each event, in either format."""
    body = request.json()
    return [(event["name"], event["channel"]) for event in body.get("events", ())] or [content_of(request)[:2]]


PROCESS = textwrap.dedent("""
    import asyncio, sys, uvloop
    from redpoll.cluster.redis.keys import Keys
    from redpoll.cluster.redis.link import Link
    from redpoll.cluster.outbox import Outbox
    from redpoll.control.records.records import Records
    from redpoll.control.webhooks.webhooks import Webhooks
    from redpoll.config.settings import Settings
    from redpoll.store.store import Store, database_url

    async def main(redis_url, folder):
        store = await Store.open(database_url(folder))
        records = Records(store)
        await records.load()
        webhooks = Webhooks(store, records, Settings(webhook_allow_http=True, webhook_allow_addresses=("127.0.0.0/8",)))
        await webhooks.load()
        link = Link(redis_url)
        link.start()
        webhooks.start(Outbox(link, Keys("rp"), 0.0), lambda *traced: None)
        await asyncio.Event().wait()

    uvloop.run(main(*sys.argv[1:]))
""")


@pytest.mark.parametrize("batch", [False, True])
async def test_no_transition_is_lost_by_repeated_kill_9(make_webhooks, receiver, redis, store, tmp_path, batch):
    format = "pusher" if batch else "service"
    await (await make_webhooks()).endpoints.create(APP, receiver.url, format=format, batch=batch)
    await store.close()
    chance = random.Random(3)
    client = Redis(unix_socket_path=redis.path)
    keys, sent = Keys("rp"), 0

    async def put_rows(until):
        nonlocal sent
        while time.monotonic() < until:
            sent += 1
            fields = {"k": "channel.occupied", "a": APP, "c": f"c{sent}", "t": 1, "x": "1"}
            await client.xadd(keys.outbox(sent % 64), fields, id=f"{sent}-0")
            await asyncio.sleep(0.002)

    def start():
        return subprocess.Popen([sys.executable, "-c", PROCESS, redis.url, str(tmp_path)])

    for _ in range(4):
        process = start()
        try:
            heard = len(receiver.requests)
            deadline = time.monotonic() + 60
            while len(receiver.requests) == heard and time.monotonic() < deadline:
                await put_rows(time.monotonic() + 0.02)
            await put_rows(time.monotonic() + chance.random() * 0.3)
        finally:
            process.kill()
            process.wait()
    process = start()
    try:
        seen_channels, deadline = 0, time.monotonic() + 60
        while seen_channels < sent:
            assert time.monotonic() < deadline, (sent, len(receiver.requests))
            await asyncio.sleep(0.02)
            came = {channel for request in receiver.requests for _, channel in contents_of(request)}
            before, seen_channels = seen_channels, len(came)
            if seen_channels > before:
                # The slower the machine, the more rows were put while processes started.
                deadline = time.monotonic() + 60
    finally:
        process.kill()
        process.wait()
    await client.aclose()
    # No client is in these channels. After some seconds the process finds that, and announces that they are vacated.
    ids, announced = {}, 0
    for request in receiver.requests:
        for event, channel in contents_of(request):
            if event.endswith("occupied"):
                announced += 1
                ids.setdefault(channel, set()).add(request.headers["x-service-delivery"])
    # Repeats have the same id. In a batch, they may come with other events.
    assert batch or {len(delivery_ids) for delivery_ids in ids.values()} == {1}
    # Only deliveries that were under way at a kill, or whose result was not written yet, are repeated.
    assert announced - sent <= 4 * (200 if batch else 64)
    assert any(len(contents_of(request)) > 1 for request in receiver.requests) is batch


async def test_finish_is_bounded_even_if_a_receiver_hangs(make_webhooks, wait_until):
    async with Receiver(answer=hang) as receiver:
        box = Box()
        webhooks = await make_webhooks(box)
        await webhooks.endpoints.create(APP, receiver.url)
        box.put(transition("client_event"))
        await wait_until(lambda: receiver.requests)
        await asyncio.wait_for(webhooks.finish(0.1), 60)
        (waiting,) = await webhooks.deliveries(APP)
        assert (waiting.state, waiting.attempts) == ("waiting", 0)


# -- the operator's actions


async def test_deleting_an_endpoint_discards_deliveries_but_keeps_dead_letters(make_webhooks, receiver):
    box = Box()
    webhooks, endpoint = await failed(make_webhooks, receiver, transition(), box=box)
    disabled = await webhooks.endpoints.create(APP, receiver.url)
    await webhooks.endpoints.set_enabled(disabled.id, False)
    await webhooks.endpoints.set_enabled(endpoint.id, False)
    # The time of this transition is before both were disabled.
    box.put(transition(time_ms=0))
    await seen(webhooks, "waiting", 2)
    for deleted in (endpoint, disabled):
        await webhooks.endpoints.delete(deleted.id)
    assert webhooks.endpoints.of_existing_app(APP) == []
    discarded = await seen(webhooks, "discarded", 2)
    assert {delivery.endpoint_id for delivery in discarded} == {endpoint.id, disabled.id}
    assert {delivery.dead_letter for delivery in discarded} == {"discarded"}
    (letter,) = await seen(webhooks, "failed", 1)
    shown, of, attempts = await webhooks.delivery(letter.id)
    assert (shown, of.deleted_at, len(attempts)) == (letter, NOW_S, 1)
    with pytest.raises(RecordError, match="was deleted"):
        await webhooks.dead_letters.retry([shown.id])


async def test_test_of_an_endpoint_is_one_signed_attempt_and_is_not_stored(make_webhooks, receiver):
    webhooks = await make_webhooks()
    events = {"all": "channel.occupied", "member.removed": "member.removed", "client_event": "client_event"}
    for chosen, event in events.items():
        endpoint = await webhooks.endpoints.create(APP, receiver.url, events=[chosen])
        assert (await webhooks.test(endpoint.id)).ok
        assert content_of(receiver.requests[-1])[0] == event
        assert receiver.requests[-1].headers["x-service-attempt"] == "1"
    pusher = await webhooks.endpoints.create(APP, receiver.url, events=["subscription.count"], format="pusher")
    await webhooks.endpoints.set_enabled(pusher.id, False)
    assert (await webhooks.test(pusher.id)).ok
    assert receiver.requests[-1].json()["events"][0]["name"] == "subscription_count"
    assert receiver.requests[-1].headers["x-pusher-key"] == "a" * 20
    receiver.answer = BROKEN
    tried = await webhooks.test(pusher.id)
    assert (tried.ok, tried.status) == (False, 500)
    assert await webhooks.deliveries(APP) == []
    assert webhooks.endpoints.get(pusher.id).failing_since is None


async def test_result_of_a_test_is_shown_though_the_audit_log_cannot_be_written(make_webhooks, receiver, monkeypatch):
    """The receiver had it, and the answer was 503, so the operator sent it again."""
    webhooks = await make_webhooks()
    endpoint = await webhooks.endpoints.create(APP, receiver.url)

    async def unavailable(*_arguments):
        raise StoreUnavailable("the record store failed: disk full")

    monkeypatch.setattr(Store, "note", unavailable)
    with capture_logs() as logged:
        assert (await webhooks.test(endpoint.id)).ok
    (line,) = [line for line in logged if line["event"] == "not in the audit log"]
    assert (line["action"], line["target"]) == ("webhook test", receiver.url)


async def test_counters_of_attempts_stay_when_a_lead_ends(make_webhooks, receiver):
    """They fell to those of pulled deliveries, and `increase()` counted these again."""
    webhooks, _ = await failed(make_webhooks, receiver, transition(), transition(channel="another"))
    await webhooks.stop(60)
    wanted = {"webhook_attempts_status_total": 2, "webhook_failed_total": 2}
    assert webhooks.counters() == wanted
    webhooks.start(Box(), lambda *_: None)
    assert webhooks.counters().items() >= wanted.items()


async def test_failing_is_shown_after_a_while(make_webhooks, receiver, clock):
    webhooks, endpoint = await failed(make_webhooks, receiver, transition())
    assert webhooks.failing_since(webhooks.endpoints.get(endpoint.id)) is None
    clock.advance(FAILING_AFTER_S)
    assert webhooks.failing_since(webhooks.endpoints.get(endpoint.id)) == NOW_S
    assert webhooks.counters()["webhook_endpoints_failing"] == 1


async def test_secrets_of_an_app_include_previous_ones(make_webhooks, receiver):
    webhooks = await make_webhooks()
    one = await webhooks.endpoints.create(APP, receiver.url)
    await webhooks.endpoints.create(OTHER, receiver.url)
    changed = await webhooks.endpoints.rotate(one.id)
    assert await webhooks.secrets_of(APP) == {one.id: [changed.secret, one.secret]}
    assert await webhooks.secrets_of("99") == {}


async def test_unknown_apps_webhooks_and_deliveries_are_refused(make_webhooks):
    webhooks = await make_webhooks()
    with pytest.raises(RecordError, match="there is no app with the id 99"):
        webhooks.endpoints.of_existing_app("99")
    with pytest.raises(RecordError, match="there is no app with the id 99"):
        await webhooks.deliveries("99")
    with pytest.raises(RecordError, match="there is no webhook with the id e"):
        webhooks.endpoints.get("e")
    with pytest.raises(RecordError, match="there is no delivery with the id d"):
        await webhooks.delivery("d")


async def test_invalid_settings_are_refused_with_a_reason(make_webhooks, tmp_path):
    missing = str(tmp_path / "none.pem")
    with pytest.raises(RecordError, match=f"webhook_ca_file {missing} can't be used: No such file"):
        await make_webhooks(Box(), webhook_ca_file=missing)
    with pytest.raises(RecordError, match="webhook_allow_addresses: "):
        await make_webhooks(Box(), webhook_allow_addresses=("10.0.0.0/33",))


async def test_change_that_is_rolled_back_costs_no_delivery(make_webhooks, receiver, store, monkeypatch, wait_until):
    """What was taken while a disabling was open got no deliveries, also if it wasn't committed."""
    box = Box()
    webhooks = await make_webhooks(box)
    endpoint = await webhooks.endpoints.create(APP, receiver.url)
    fails, raised = asyncio.Event(), loaded_records.raise_version

    async def fail(*args, **more):
        monkeypatch.setattr(loaded_records, "raise_version", raised)
        await fails.wait()
        raise RuntimeError

    monkeypatch.setattr(loaded_records, "raise_version", fail)
    change = asyncio.create_task(webhooks.endpoints.set_enabled(endpoint.id, False))
    await wait_until(lambda: loaded_records.raise_version is raised)
    drains = box.drains
    box.put(transition())
    await wait_until(lambda: box.drains > drains + 1 or box.waiting)
    fails.set()
    with pytest.raises(RuntimeError):
        await change
    await seen(webhooks, "delivered", 1)


async def test_next_process_completes_an_interrupted_deletion(make_webhooks, receiver, monkeypatch):
    async def killed(_endpoint_id):
        raise asyncio.CancelledError

    box = Box()
    webhooks = await make_webhooks(box)
    endpoint = await webhooks.endpoints.create(APP, receiver.url)
    await webhooks.endpoints.set_enabled(endpoint.id, False)
    box.put(transition(time_ms=0))
    await seen(webhooks, "waiting", 1)
    monkeypatch.setattr(webhooks.endpoints, "discard_waiting", killed)
    with pytest.raises(asyncio.CancelledError):
        await webhooks.endpoints.delete(endpoint.id)
    await kill(webhooks)
    again = await make_webhooks(Box())
    await tidy(again)
    assert {delivery.state for delivery in await again.deliveries(APP)} == {"discarded"}
    assert receiver.requests == []
