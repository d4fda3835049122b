"""The commands for webhooks and dead letters: arguments, results and errors."""

import json

import pytest

from control.webhooks.transitions import APP, NOW_S, Box, transition
from helpers.certs import authority, issued
from helpers.receiver import Receiver, status
from redpoll.config.settings import Settings
from redpoll.control.commands import commands
from redpoll.control.commands.context import Context
from redpoll.ipc.command_socket import CommandError


class Operator:
    """`await operator("webhook list", app=…)`: the result, encoded as for the socket."""

    def __init__(self, context):
        self.context = context

    async def __call__(self, verb, **args):
        return json.loads(json.dumps(await commands.run(self.context, verb, args)))

    async def create(self, url, **more):
        asked = {"events": ["all"], "format": "service", "channels": [], "pin": False, **more}
        return await self("webhook create", app=APP, url=url, **asked)


@pytest.fixture
async def make_operator(make_webhooks, store, records):
    async def make(box=None, **settings):
        webhooks = await make_webhooks(box, **settings)
        return Operator(Context(store, records, Settings(), webhooks))

    return make


async def test_endpoint_is_created_listed_changed_tested_and_deleted(make_operator, receiver):
    operator = await make_operator()
    made = await operator.create(receiver.url, events=["client_event"], format="pusher", channels=["room-"])
    secret, counts = made.pop("secret"), made.pop("subscription_count")
    assert not counts
    assert made == {
        "id": made["id"],
        "url": receiver.url,
        "events": ["client_event"],
        "client_events": [],
        "format": "pusher",
        "batch": False,
        "enabled": True,
        "channels": ["room-"],
        "pin": None,
        "failing_since": None,
    }
    assert await operator("webhook list", app=APP) == [{**made, "waiting": 0, "dropped": 0}]
    batched = await operator.create(receiver.url, format="pusher", batch=True)
    assert (batched["format"], batched["batch"]) == ("pusher", True)
    await operator("webhook delete", id=batched["id"])
    assert await operator("webhook disable", id=made["id"]) == {**made, "enabled": False}
    assert await operator("webhook enable", id=made["id"]) == made
    rotated = await operator("webhook rotate", id=made["id"])
    assert (rotated["id"], rotated["overlap_until"]) == (made["id"], int(NOW_S) + 86_400)
    assert rotated["secret"] != secret
    tested = await operator("webhook test", id=made["id"])
    assert tested.pop("duration_ms") >= 0
    assert tested == {"id": made["id"], "ok": True, "status": 200, "reason": "200 OK"}
    assert (await operator("webhook delete", id=made["id"]))["id"] == made["id"]
    assert await operator("webhook list", app=APP) == []


async def test_certificate_is_pinned_and_unpinned(make_operator, tmp_path):
    ca = authority(tmp_path)
    operator = await make_operator(webhook_ca_file=str(ca[0]), webhook_allow_addresses=("127.0.0.0/8", "::1/128"))
    async with Receiver(tls=issued(tmp_path, ca)) as receiver:
        made = await operator.create(receiver.url, pin=True)
        assert len(made["pin"]) == 64
        assert (await operator("webhook unpin", id=made["id"]))["pin"] is None
        assert (await operator("webhook pin", id=made["id"]))["pin"] == made["pin"]


async def test_dead_letters_are_listed_shown_retried_and_discarded(make_operator, receiver, clock, wait_until):
    receiver.answer = status(503, "Service Unavailable", b"come \xff later")
    box = Box()
    operator = await make_operator(box, webhook_retry_after_s=(0.01,))
    endpoint = await operator.create(receiver.url)
    box.put(transition(channel="a"), transition("channel.vacated", "b"))
    clock.advance(1)
    await wait_until(lambda: operator.context.webhooks.counters()["webhook_attempts_status_total"] == 2)
    # The clock of the test stands still, so it is advanced to the time of the retry.
    clock.advance(1)
    await wait_until(lambda: operator.context.webhooks.counters()["webhook_failed_total"] == 2)
    found = []
    while len(found) < 2:
        found = (await operator("dead-letter list", app=APP))["letters"]
    by_channel = {letter.pop("channel"): letter for letter in found}
    one, two = by_channel["a"], by_channel["b"]
    assert {**one, "id": ""} == {
        "id": "",
        "event": "channel.occupied",
        "endpoint_id": endpoint["id"],
        "failed_at": int(NOW_S) + 2,
        "attempts": 2,
    }
    shown = await operator("dead-letter show", id=one["id"])
    attempts = shown.pop("attempts")
    assert json.loads(shown.pop("payload"))["event"] == "channel.occupied"
    assert shown == {
        "id": one["id"],
        "event": "channel.occupied",
        "endpoint_id": endpoint["id"],
        "url": receiver.url,
        "channel": "a",
        "state": "pending",
        "failed_at": int(NOW_S) + 2,
    }
    assert [(made["at"], made["status"], made["reason"], made["response"]) for made in attempts] == [
        (NOW_S + 1, 503, "answered 503 Service Unavailable", "come \N{REPLACEMENT CHARACTER} later"),
        (NOW_S + 2, 503, "answered 503 Service Unavailable", "come \N{REPLACEMENT CHARACTER} later"),
    ]
    assert await operator("dead-letter discard", ids=[two["id"]]) == [{"id": two["id"], "state": "discarded"}]
    assert await operator("dead-letter retry", ids=[one["id"]]) == [{"id": one["id"], "state": "retrying"}]
    with pytest.raises(CommandError, match="is not a failed delivery: it is discarded"):
        await operator("dead-letter retry", ids=[two["id"]])
    assert await operator("dead-letter list", app=APP) == {"letters": [], "total": 0, "dropped": 0}


async def test_commands_refuse_wrong_arguments_with_a_reason(make_operator, store, records):
    operator = await make_operator()
    with pytest.raises(CommandError, match="the URL must begin with https://"):
        await operator.create("ftp://example.com")
    with pytest.raises(CommandError, match="there is no webhook with the id x"):
        await operator("webhook delete", id="x")
    with pytest.raises(CommandError, match="there is no delivery with the id x"):
        await operator("dead-letter show", id="x")
    with pytest.raises(CommandError, match="the server is still starting"):
        await Operator(Context(store, records, Settings()))("webhook list", app=APP)
