"""Webhook endpoints: allowed values, chosen events and channels, changes and what workers learn of them, pins."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import sqlalchemy as sa

from control.webhooks.transitions import APP, NOW_S, OTHER
from helpers.certs import authority, issued
from helpers.receiver import Receiver
from redpoll.control.records.records import RecordError, Records
from redpoll.control.webhooks.endpoints import OVERLAP_S, Endpoints
from redpoll.control.webhooks.sender import Sender
from redpoll.control.webhooks.wanted import wants
from redpoll.store import deliveries as delivery_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.audit import Actor
from redpoll.store.errors import StoreUnavailable
from redpoll.store.schema import deliveries

URL = "https://example.com/hook"


@pytest.fixture
async def sender(monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    made = Sender(allow_addresses=("127.0.0.0/8",))
    yield made
    await made.close()


@pytest.fixture
async def endpoints(store, records, sender, clock):
    made = Endpoints(store, records, lambda: sender, clock)
    await made.load()
    return made


@pytest.fixture
def read_again(store):
    """`await read_again()`: the endpoints as another process reads them from the store."""

    async def read():
        records = Records(store)
        await records.load()
        again = Endpoints(store, records, lambda: None, lambda: 0.0)
        await again.load()
        return again

    return read


async def create(endpoints, app_id=APP, url=URL, events=("all",), format="service", channels=(), pin=False, **more):
    return await endpoints.create(app_id, url, events, format, channels, pin, **more)


# -- changes


async def test_new_endpoint_is_enabled_has_a_secret_and_is_stored(endpoints, read_again):
    endpoint = await create(endpoints, events=("client_event", "client_event"), channels=("room-",), format="pusher")
    assert (endpoint.enabled, endpoint.events, endpoint.channels, endpoint.created_at) == (
        True,
        ("client_event",),
        ("room-",),
        NOW_S,
    )
    assert len(endpoint.secret) == 40
    assert (await read_again()).of_app(APP) == endpoints.of_app(APP) == (endpoint,)
    assert endpoints.of_app(OTHER) == ()


async def test_workers_get_an_update_only_if_the_hooks_change(endpoints, records, store):
    updates = []

    async def on_change(app_id, app, _before, after):
        updates.append((app_id, app.hooks, after.number))

    records.on_change = on_change
    version = records.version
    endpoint = await create(endpoints, events=("member.added",))
    await create(endpoints, events=("member.removed",))
    await create(endpoints, app_id=OTHER, events=("cache.miss",))
    assert updates == [(APP, "m", version + 1), (OTHER, "x", version + 2)]
    await endpoints.change(endpoint.id, None, ("client_event",), None, None)
    assert updates[2:] == [(APP, "mc", version + 3)]
    await endpoints.set_enabled(endpoint.id, False)
    await endpoints.set_enabled(endpoint.id, False)
    await endpoints.rotate(endpoint.id)
    assert updates[3:] == [(APP, "m", version + 4)]
    await endpoints.set_enabled(endpoint.id, True)
    await endpoints.delete(endpoint.id)
    assert updates[4:] == [(APP, "mc", version + 5), (APP, "m", version + 6)]
    again = Records(store)
    await again.load()
    await Endpoints(store, again, lambda: None, lambda: 0.0).load()
    assert (again.apps[APP].hooks, again.apps[OTHER].hooks, again.version) == ("m", "x", version + 6)


async def test_endpoint_is_known_before_workers_write_rows_for_it(endpoints, records):
    seen = []

    async def on_change(app_id, *_change):
        seen.append([wants(endpoint, "cache.miss", "c") for endpoint in endpoints.of_app(app_id)])

    records.on_change = on_change
    endpoint = await create(endpoints, events=("cache.miss",))
    await endpoints.change(endpoint.id, None, ("cache.miss", "client_event"), None, None)
    assert seen == [[True], [True]]


async def test_failed_or_cancelled_change_leaves_memory_equal_to_the_store(endpoints, records, read_again):
    endpoint = await create(endpoints)

    async def fail(*_change):
        raise RuntimeError

    # Fails after the commit.
    records.on_change = fail
    with pytest.raises(RuntimeError):
        await endpoints.set_enabled(endpoint.id, False)
    records.on_change = None
    assert not endpoints.get(endpoint.id).enabled
    for turns in range(12):
        change = asyncio.create_task(endpoints.change(endpoint.id, f"{URL}/{turns}", ("cache.miss",), None, None))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)
        assert endpoints.of_app(APP) == (await read_again()).of_app(APP)


async def test_attempt_that_ends_during_a_change_is_not_forgotten(endpoints):
    endpoint = await create(endpoints)
    # It is refused or made after this has been noted: conditions are checked within the change.
    failing = Actor("test", condition=lambda: asyncio.get_running_loop().call_soon(note))

    def note():
        endpoints.set_failing_since(endpoint.id, 5.0)

    changed = await endpoints.rotate(endpoint.id, by=failing)
    assert endpoints.get(endpoint.id) == changed
    assert (changed.failing_since, changed.previous_secret) == (5.0, endpoint.secret)


async def test_a_failing_endpoint_keeps_its_place_and_a_deleted_one_stays_out(endpoints):
    first, second = await create(endpoints), await create(endpoints)
    before = endpoints.of_app(APP)
    endpoints.set_failing_since(first.id, 5.0)
    failing = {one.id: one.failing_since for one in endpoints.of_app(APP)}
    assert list(failing.items()) == [(one.id, 5.0 if one.id == first.id else None) for one in before]
    for one in (second, first):
        await endpoints.delete(one.id)
        endpoints.set_failing_since(one.id, 6.0)
    assert endpoints.of_app(APP) == ()


async def test_refused_changes_undo_no_other_change_in_memory(endpoints, read_again):
    """A refused change read the store again without the lock, and put older endpoints over a newer one."""

    def refuse():
        raise RecordError("changed meanwhile")

    endpoint = await create(endpoints)
    for number in range(10):
        refused = [endpoints.rotate(endpoint.id, by=Actor("test", condition=refuse)) for _ in range(3)]
        changes = [create(endpoints, url=f"{URL}/{number}"), endpoints.set_enabled(endpoint.id, number % 2 == 1)]
        await asyncio.gather(*refused, *changes, return_exceptions=True)
        assert {*endpoints.every()} == {*(await read_again()).every()}
    assert len(endpoints.of_app(APP)) == 11


@pytest.fixture
def broken_commit(store, monkeypatch):
    """`broken_commit(committed=…)`: the next change of the store fails at its end, and so does the read after it."""
    change, reading = store.change, store.reading

    def break_it(committed):
        @asynccontextmanager
        async def changing():
            monkeypatch.setattr(store, "change", change)
            async with change() as connection:
                yield connection
                if not committed:
                    raise StoreUnavailable("the connection was lost")
            raise StoreUnavailable("the connection was lost")

        @asynccontextmanager
        async def failing():
            monkeypatch.setattr(store, "reading", reading)
            raise StoreUnavailable("it is away")
            yield

        monkeypatch.setattr(store, "change", changing)
        monkeypatch.setattr(store, "reading", failing)

    return break_it


@pytest.mark.parametrize("committed", [False, True])
async def test_change_whose_commit_fails_is_in_memory_only_if_it_is_in_the_store(
    endpoints, records, read_again, broken_commit, committed
):
    """It stayed in memory when the store was away: deliveries of an endpoint that existed were discarded."""
    deleted, other = await create(endpoints), await create(endpoints)
    hooks = records.apps[APP].hooks
    broken_commit(committed)
    with pytest.raises(StoreUnavailable):
        await endpoints.delete(deleted.id)
    # Until the store answers, nothing has changed.
    assert {*endpoints.of_app(APP)} == {deleted, other}
    await endpoints.rotate(other.id)
    assert {*endpoints.every()} == {*(await read_again()).every()}
    assert {one.id for one in endpoints.of_app(APP)} == ({other.id} if committed else {deleted.id, other.id})
    assert records.apps[APP].hooks == hooks


async def test_previous_secret_is_valid_for_a_day(endpoints, clock):
    endpoint = await create(endpoints)
    changed = await endpoints.rotate(endpoint.id)
    assert changed.secret != endpoint.secret
    assert changed.secrets(clock()) == [changed.secret, endpoint.secret]
    clock.advance(OVERLAP_S)
    assert changed.secrets(clock()) == [changed.secret]


async def test_deleted_endpoint_is_known_only_until_it_is_removed(endpoints):
    endpoint = await create(endpoints)
    deleted = await endpoints.delete(endpoint.id)
    assert (deleted.secret, deleted.enabled) == ("", False)
    assert endpoints.of_app(APP) == ()
    assert endpoints.known(endpoint.id) == deleted
    assert endpoints.ids_of(APP) == [endpoint.id]
    for attempt in (endpoints.rotate, endpoints.pin, endpoints.unpin, endpoints.delete):
        with pytest.raises(RecordError, match=f"there is no webhook with the id {endpoint.id}"):
            await attempt(endpoint.id)
    await endpoints.forget_deleted()
    assert endpoints.known(endpoint.id) is None
    # Apps come and go, so nothing of them may stay.
    assert APP not in endpoints._by_app


async def test_deleting_an_endpoint_discards_its_waiting_deliveries(endpoints, store):
    endpoint = await create(endpoints)
    row = {"event": "cache.miss", "channel": "c", "user": None, "stamp": 1, "time_ms": 1, "trace": None, "body": b""}
    rows = [
        {**row, "id": f"d{n}", "endpoint_id": endpoint.id, "at": NOW_S + n, "created_at": 0.0} for n in range(6_000)
    ]
    async with store.change() as connection:
        await delivery_rows.add(connection, rows)
    await endpoints.delete(endpoint.id)
    async with store.reading() as connection:
        assert len(await delivery_rows.find(connection, [endpoint.id], ("discarded",), 9_999)) == 6_000
    await endpoints.forget_deleted()
    assert endpoints.known(endpoint.id) is not None


async def test_deleted_endpoint_that_a_delivery_keeps_costs_no_change(endpoints, store, monkeypatch):
    """All endpoints were read every 5 s, in a transaction for which all others waited."""
    endpoint = await create(endpoints)
    row = {"event": "cache.miss", "channel": "c", "user": None, "stamp": 1, "time_ms": 1, "trace": None, "body": b""}
    row |= {"id": "d", "endpoint_id": endpoint.id, "at": NOW_S, "created_at": NOW_S}
    async with store.change() as connection:
        await delivery_rows.add(connection, [row])
    await endpoints.delete(endpoint.id)
    with monkeypatch.context() as unchanged:
        unchanged.setattr(store, "change", None)
        unchanged.setattr(endpoint_rows, "all_by_id", None)
        await endpoints.forget_deleted()
    assert endpoints.known(endpoint.id) is not None
    async with store.change() as connection:
        await connection.execute(sa.delete(deliveries))
    await endpoints.forget_deleted()
    assert endpoints.every() == []


async def test_other_nodes_forget_endpoints_that_the_leader_removed(endpoints, read_again):
    for _ in range(2):
        await create(endpoints)
    first, second = endpoints.every()
    other = await read_again()
    await endpoints.delete(first.id)
    other._put({first.id: endpoints.known(first.id)})
    await other.forget_removed()
    assert len(other.every()) == 2
    await endpoints.forget_deleted()
    await other.forget_removed()
    assert other.every() == endpoints.every() == [second]


# -- invalid values


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"url": "http://example.com"}, "plain http is off"),
        ({"url": "https://10.0.0.1/"}, "10.0.0.1 is a private address"),
        ({"url": "nonsense"}, "the URL must begin with https://"),
        ({"events": ()}, "not nothing"),
        ({"events": ("all", "channel.created")}, "not 'channel.created'"),
        ({"format": "xml"}, "service or pusher, not 'xml'"),
        ({"channels": ("room 1",)}, "'room 1' can't be a channel prefix"),
        ({"channels": [f"c{number}" for number in range(51)]}, "at most 50"),
        ({"app_id": "99"}, "there is no app with the id 99"),
    ],
)
async def test_invalid_fields_are_refused_with_a_reason(endpoints, wrong, sentence):
    with pytest.raises(RecordError, match=sentence):
        await create(endpoints, **wrong)
    assert endpoints.every() == []
    if "app_id" not in wrong:
        endpoint = await create(endpoints)
        changes = {"url": None, "events": None, "channels": None, "format": None, **wrong}
        with pytest.raises(RecordError, match=sentence):
            await endpoints.change(endpoint.id, **changes)
        assert endpoints.get(endpoint.id) == endpoint


async def test_endpoint_whose_url_is_no_longer_allowed_can_be_changed(endpoints, sender, monkeypatch):
    """It couldn't be disabled by the API or the dashboard after webhook_allow_http was taken back."""
    lax = Sender(allow_http=True)
    monkeypatch.setattr(endpoints, "_sender", lambda: lax)
    url = "http://example.com/hook"
    endpoint = await create(endpoints, url=url)
    monkeypatch.setattr(endpoints, "_sender", lambda: sender)
    assert not (await endpoints.change(endpoint.id, enabled=False)).enabled
    # The dashboard's form has all fields.
    changed = await endpoints.change(endpoint.id, url, ("cache.miss",), (), "pusher")
    assert (changed.url, changed.events, changed.format) == (url, ("cache.miss",), "pusher")
    # As `redpoll webhook enable` does: each attempt is refused and says why.
    assert (await endpoints.change(endpoint.id, enabled=True)).enabled
    for other in ("http://example.com/other", ""):
        with pytest.raises(RecordError, match="the URL must begin with https://"):
            await endpoints.change(endpoint.id, other)
    assert (await endpoints.change(endpoint.id, URL)).url == URL
    await lax.close()


async def test_app_has_at_most_50_endpoints(endpoints):
    for _ in range(50):
        await create(endpoints)
    with pytest.raises(RecordError, match="has 50 webhooks"):
        await create(endpoints)
    assert len(endpoints.of_app(APP)) == 50


# -- pins


@pytest.fixture
async def tls(tmp_path, sender, endpoints, monkeypatch):
    """A receiver's certificates, which the endpoints' sender trusts."""
    ca = authority(tmp_path)
    trusting = Sender(allow_addresses=("127.0.0.0/8", "::1/128"), ca_file=str(ca[0]))
    monkeypatch.setattr(endpoints, "_sender", lambda: trusting)
    yield [issued(tmp_path, ca, name) for name in ("first", "second")]
    await trusting.close()


async def test_pinning_takes_the_certificate_that_the_receiver_shows_now(endpoints, tls):
    async with Receiver(tls=tls[0]) as receiver:
        endpoint = await create(endpoints, url=receiver.url, pin=True)
        assert len(endpoint.pin) == 64
        receiver.show(tls[1])
        new_pin = await endpoints.pin(endpoint.id)
        assert len({endpoint.pin, new_pin.pin, ""}) == 3
        assert (await endpoints.unpin(endpoint.id)).pin == ""
        assert receiver.requests == []


async def test_batch_is_stored_changed_and_goes_with_the_pusher_format_only(endpoints, read_again):
    endpoint = await create(endpoints, format="pusher", batch=True)
    assert not (await create(endpoints)).batch
    assert (await read_again()).get(endpoint.id).batch
    with pytest.raises(RecordError, match="only a webhook in the format pusher can batch events"):
        await endpoints.change(endpoint.id, format="service")
    changed = await endpoints.change(endpoint.id, format="service", batch=False)
    assert (changed.format, changed.batch) == ("service", False)
    with pytest.raises(RecordError, match="can batch events"):
        await endpoints.change(endpoint.id, batch=True)
    assert endpoints.fault_of(URL, ("all",), "service", (), batch=True)
    assert endpoints.fault_of(URL, ("all",), "pusher", (), batch=True) is None


async def test_of_two_changes_at_once_that_exclude_each_other_one_is_refused(endpoints):
    endpoint = await create(endpoints, format="pusher")
    changes = (endpoints.change(endpoint.id, batch=True), endpoints.change(endpoint.id, format="service"))
    _, refused = await asyncio.gather(*changes, return_exceptions=True)
    assert isinstance(refused, RecordError)
    assert (endpoints.get(endpoint.id).batch, endpoints.get(endpoint.id).format) == (True, "pusher")


async def test_changing_the_url_of_a_pinned_endpoint_pins_the_new_certificate(endpoints, tls):
    async with Receiver(tls=tls[0]) as receiver, Receiver(tls=tls[1]) as moved:
        endpoint = await create(endpoints, url=receiver.url, pin=True)
        assert (await endpoints.change(endpoint.id, receiver.url, ("cache.miss",), None, None)).pin == endpoint.pin
        changed = await endpoints.change(endpoint.id, moved.url, None, None, None)
        assert changed.pin not in (endpoint.pin, "")


async def test_new_url_and_pin_at_the_same_time_exclude_each_other(endpoints, tls, monkeypatch):
    """The new URL had the certificate of the old one: every delivery failed."""
    trusting = endpoints._sender()
    fingerprint = trusting.fingerprint
    async with Receiver(tls=tls[0]) as receiver, Receiver(tls=tls[1]) as moved:
        endpoint = await create(endpoints, url=receiver.url)

        async def moved_meanwhile(url):
            monkeypatch.setattr(trusting, "fingerprint", fingerprint)
            await endpoints.change(endpoint.id, moved.url)
            return await fingerprint(url)

        monkeypatch.setattr(trusting, "fingerprint", moved_meanwhile)
        with pytest.raises(RecordError, match="the webhook's URL was changed at the same time"):
            await endpoints.pin(endpoint.id)
        await endpoints.pin(endpoint.id)

        async def unpinned_meanwhile(url):
            monkeypatch.setattr(trusting, "fingerprint", fingerprint)
            await endpoints.unpin(endpoint.id)
            return await fingerprint(url)

        monkeypatch.setattr(trusting, "fingerprint", unpinned_meanwhile)
        with pytest.raises(RecordError, match="was pinned or unpinned at the same time"):
            await endpoints.change(endpoint.id, receiver.url)
        assert endpoints.get(endpoint.id).url == moved.url


async def test_endpoint_is_unchanged_if_its_certificate_cannot_be_read(endpoints, tls):
    closed_port = "https://localhost:1/"
    with pytest.raises(RecordError, match="the certificate can't be pinned: no connection to localhost:1"):
        await create(endpoints, url=closed_port, pin=True)
    assert endpoints.every() == []
    endpoint = await create(endpoints, url=closed_port)
    with pytest.raises(RecordError, match="can't be pinned"):
        await endpoints.pin(endpoint.id)
    async with Receiver(tls=tls[0]) as receiver:
        pinned = await create(endpoints, url=receiver.url, pin=True)
        with pytest.raises(RecordError, match="can't be pinned"):
            await endpoints.change(pinned.id, closed_port, None, None, None)
    assert {*endpoints.of_app(APP)} == {endpoint, pinned}
