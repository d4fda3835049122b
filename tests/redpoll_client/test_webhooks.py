"""`verify_webhook` on bodies in both formats, and on what redpoll really sends."""

import json
import time

import pytest

from helpers.receiver import Receiver
from helpers.walk import command
from helpers.wire import Socket
from redpoll_client import InvalidWebhook, Publisher, verify_webhook
from redpoll_client.signatures import hex_hmac

from .conftest import url_of

SERVICE = json.dumps(
    {"event": "member.added", "data": {"channel": "presence-a", "user_id": "7", "seq": 3}, "timestamp": 1700000000}
).encode()
PUSHER = json.dumps(
    {
        "time_ms": 1700000000500,
        "events": [
            {"name": "channel_occupied", "channel": "a"},
            {"name": "client_event", "channel": "private-a", "event": "client-x", "data": {"x": 1}, "socket_id": "1.2"},
        ],
    }
).encode()


def signed(body, secret="s"):
    return {"X-Pusher-Key": "k", "x-pusher-signature": hex_hmac(secret, body), "X-Service-Delivery": "d"}


def test_both_formats_give_typed_events():
    headers = {"x-service-signature": hex_hmac("new", SERVICE), "X-Service-Attempt": "2", "X-Service-Delivery": "d1"}
    delivery = verify_webhook(SERVICE, headers, endpoint_secret=["other", "new"])
    assert (delivery.id, delivery.attempt) == ("d1", 2)
    (event,) = delivery.events
    assert (event.name, event.channel, event.user_id, event.seq) == ("member.added", "presence-a", "7", 3)
    assert event.time == 1700000000
    occupied, client = verify_webhook(PUSHER, signed(PUSHER), key="k", secret="s").events
    assert (occupied.name, occupied.time) == ("channel.occupied", 1700000000.5)
    assert (client.name, client.event, client.data, client.socket_id) == ("client_event", "client-x", '{"x": 1}', "1.2")


def test_after_a_rotation_the_secret_before_is_accepted():
    headers = {
        "X-Service-Signature": hex_hmac("new", SERVICE),
        "X-Service-Signature-Previous": hex_hmac("old", SERVICE),
    }
    assert verify_webhook(SERVICE, headers, endpoint_secret="old").events


def test_the_endpoints_secret_is_enough_while_the_apps_key_is_replaced():
    headers = {**signed(PUSHER, "old"), "X-Pusher-Key": "old", "X-Service-Signature": hex_hmac("endpoint", PUSHER)}
    assert verify_webhook(PUSHER, headers, key="new", secret="new", endpoint_secret="endpoint").events


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (PUSHER, {}, 401),
        (PUSHER, signed(PUSHER, "wrong"), 401),
        (PUSHER, {**signed(PUSHER), "X-Pusher-Key": "other"}, 401),
        (PUSHER + b" ", signed(PUSHER), 401),
        (PUSHER, {**signed(PUSHER), "x-pusher-signature": "ü"}, 401),
        (b"not JSON", signed(b"not JSON"), 400),
        (b"[]", signed(b"[]"), 400),
        (b'{"events":[{"name":1}],"time_ms":1}', signed(b'{"events":[{"name":1}],"time_ms":1}'), 400),
        (b"x" * (1024 * 1024 + 1), {}, 413),
    ],
)
def test_others_are_refused(body, headers, status):
    with pytest.raises(InvalidWebhook) as caught:
        verify_webhook(body, headers, key="k", secret="s")
    assert caught.value.status == status


def test_old_events_are_refused_where_wanted():
    with pytest.raises(InvalidWebhook, match="more than 300 s ago"):
        verify_webhook(PUSHER, signed(PUSHER), key="k", secret="s", max_age_s=300)
    body = json.dumps({"time_ms": time.time() * 1000, "events": []}).encode()
    assert verify_webhook(body, signed(body), key="k", secret="s", max_age_s=300).events == ()
    with pytest.raises(ValueError, match="endpoint_secret"):
        verify_webhook(PUSHER, signed(PUSHER))


async def test_what_redpoll_sends_is_accepted(server, wait_until):
    async with Receiver() as receiver:
        words = ("webhook", "create", server.app_id, receiver.url, "--events", "channel.occupied", "--json")
        service = json.loads(command(server, *words))
        pusher = json.loads(command(server, *words, "--format", "pusher"))
        client = await Socket.connect(server)
        await client.subscribe("seen")

        def deliveries():
            return [got for got in receiver.requests if b'"seen"' in got.body]

        await wait_until(lambda: len(deliveries()) == 2)
        for got in deliveries():
            options = {"key": server.app_key, "secret": server.app_secret, "endpoint_secret": service["secret"]}
            (event,) = verify_webhook(got.body, got.headers, **options, max_age_s=300).events
            assert (event.name, event.channel) == ("channel.occupied", "seen")
            if "events" in got.json():
                signature = {name.lower(): value for name, value in got.headers.items()}["x-pusher-signature"]
                known = Publisher(url=url_of(server)).validate_webhook(server.app_key, signature, got.body)
                assert known == got.json()
        await client.close()
        for endpoint in (service, pusher):
            command(server, "webhook", "delete", endpoint["id"])
