"""Bodies, headers and signatures of deliveries in both formats, checked by the official libraries and a plain HMAC."""

import asyncio
import hashlib
import hmac
import json
from pathlib import Path

import pytest
from pusher import Pusher

from redpoll.cluster.transition import Transition
from redpoll.control.webhooks.payloads import (
    EVENTS,
    FORMATS,
    batch_id,
    format_of,
    has_events,
    headers,
    join,
    render,
    sign,
)
from redpoll.protocol.apps import Key

CLIENTS = Path(__file__).parents[2] / "clients"
KEY = Key(key="278d425bdf160c739803", secret="7ad3773142a6692b25b8")
STAMP = 1_795_000_000_123_456
TIME_MS = 1_795_000_000_123
SENT = b'{"event":"client-typing","data":"{\\"at\\":1}","socket_id":"1.2"}'


def transition(event, detail=b"", user=None, channel="presence-kör"):
    return Transition(7, STAMP, event, "3", channel, user, TIME_MS, detail, None)


SAMPLES = {
    "channel.occupied": transition("channel.occupied", b"1"),
    "channel.vacated": transition("channel.vacated"),
    "member.added": transition("member.added", b'{"name":"Anna \\u00e4","age":1.50}', "u1"),
    "member.removed": transition("member.removed", user="u1"),
    "client_event": transition("client_event", SENT, "u1"),
    "cache.miss": transition("cache.miss"),
    "subscription.count": transition("subscription.count", b"12"),
}


def test_every_event_has_a_sample():
    assert set(SAMPLES) == set(EVENTS)


@pytest.mark.parametrize(
    ("event", "data"),
    [
        ("channel.occupied", {"subscription_count": 1}),
        ("channel.vacated", {"subscription_count": 0}),
        ("member.added", {"user_id": "u1", "user_info": {"name": "Anna ä", "age": 1.5}}),
        ("member.removed", {"user_id": "u1"}),
        ("client_event", {"event": "client-typing", "data": '{"at":1}', "socket_id": "1.2", "user_id": "u1"}),
        ("cache.miss", {}),
        ("subscription.count", {"subscription_count": 12}),
    ],
)
def test_service_format_of_every_event(event, data):
    payload = json.loads(render("service", SAMPLES[event]))
    assert payload == {
        "event": event,
        "data": {"channel": "presence-kör", **data, "seq": STAMP},
        "timestamp": TIME_MS // 1000,
    }


@pytest.mark.parametrize(
    ("event", "name", "fields"),
    [
        ("channel.occupied", "channel_occupied", {}),
        ("channel.vacated", "channel_vacated", {}),
        ("member.added", "member_added", {"user_id": "u1"}),
        ("member.removed", "member_removed", {"user_id": "u1"}),
        (
            "client_event",
            "client_event",
            {"event": "client-typing", "data": '{"at":1}', "socket_id": "1.2", "user_id": "u1"},
        ),
        ("cache.miss", "cache_miss", {}),
        ("subscription.count", "subscription_count", {"subscription_count": 12}),
    ],
)
def test_pusher_format_of_every_event(event, name, fields):
    payload = json.loads(render("pusher", SAMPLES[event]))
    assert payload == {
        "time_ms": TIME_MS,
        "events": [{"name": name, "channel": "presence-kör", **fields, "seq": STAMP}],
    }


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("event", EVENTS)
def test_rendering_twice_gives_the_same_bytes(format, event):
    body = render(format, SAMPLES[event])
    assert body == render(format, SAMPLES[event])


@pytest.mark.parametrize(
    ("sent", "data"),
    [
        (b'"text"', "text"),
        (b'"{\\"a\\":\\u00e4}"', '{"a":ä}'),
        (b'{"a": 1.0}', '{"a": 1.0}'),
        (b"[1,2]", "[1,2]"),
        (b"12345678901234567890", "12345678901234567890"),
        (b"null", "null"),
        (b'""', ""),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_data_of_a_client_event_is_always_a_string(format, sent, data):
    detail = b'{"event":"client-e","data":' + sent + b',"socket_id":"1.2"}'
    payload = json.loads(render(format, transition("client_event", detail, channel="private-c")))
    fields = payload["data"] if format == "service" else payload["events"][0]
    assert fields["data"] == data
    assert "user_id" not in fields


def test_user_info_is_passed_through_unchanged():
    body = render("service", SAMPLES["member.added"])
    assert b'"user_info":{"name":"Anna \\u00e4","age":1.50}' in body
    assert b"user_info" not in render("service", transition("member.added", user="u1"))


# -- headers and signatures


def sent(format, body, event="channel.occupied", **more):
    fields = {"delivery_id": "d-1", "attempt": 2, "now_s": 1_795_000_010.9, "secret": "s3cret", "key": KEY, **more}
    return headers(format, event, body, **fields)


@pytest.mark.parametrize("format", FORMATS)
def test_headers_of_both_formats(format):
    body = render(format, SAMPLES["channel.occupied"])
    fields = sent(format, body)
    expected = hmac.new(b"s3cret", body, hashlib.sha256).hexdigest()
    assert fields["Content-Type"] == "application/json"
    assert fields["X-Service-Signature"] == expected
    assert fields["X-Service-Event"] == "channel.occupied"
    assert fields["X-Service-Delivery"] == "d-1"
    assert fields["X-Service-Attempt"] == "2"
    # The time of the attempt. The time of the transition is in the body.
    assert fields["X-Service-Timestamp"] == "1795000010"
    assert ("X-Pusher-Signature" in fields) is (format == "pusher")
    assert "X-Service-Signature-Previous" not in fields


def test_previous_secret_signs_in_a_second_header():
    body = render("service", SAMPLES["channel.vacated"])
    fields = sent("service", body, previous_secret="old")
    assert fields["X-Service-Signature"] == sign("s3cret", body)
    assert fields["X-Service-Signature-Previous"] == sign("old", body)


def test_pusher_headers_are_left_out_without_an_enabled_key():
    fields = sent("pusher", b"{}", key=None)
    assert "X-Pusher-Key" not in fields
    assert fields["X-Service-Signature"] == sign("s3cret", b"{}")


# -- the official validators


@pytest.mark.parametrize("event", EVENTS)
def test_official_python_library_validates_the_pusher_format(event, monkeypatch):
    """The library accepts only bodies of the last five minutes, so its clock is replaced."""
    monkeypatch.setattr("time.time", lambda: TIME_MS / 1000)
    body = render("pusher", SAMPLES[event])
    fields = sent("pusher", body, event)
    pusher = Pusher("3", KEY.key, KEY.secret)
    valid = pusher.validate_webhook(fields["X-Pusher-Key"], fields["X-Pusher-Signature"], body.decode())
    assert valid == json.loads(body)
    assert pusher.validate_webhook(fields["X-Pusher-Key"], fields["X-Pusher-Signature"], body.decode() + " ") is None


JOINED = join([render("pusher", row) for row in SAMPLES.values()])


def test_joined_body_has_all_events_in_order_with_their_bytes_and_the_latest_time():
    bodies = [
        b'{"time_ms":7,"events":[{"name":"client_event","data":"{\\"\\u00e4\\": 1.0}","seq":1}]}',
        b'{"time_ms":9,"events":[{"name":"cache_miss", "seq":2},{"seq":3}]}',
        b'{"time_ms":8,"events":[]}',
    ]
    events = b'{"name":"client_event","data":"{\\"\\u00e4\\": 1.0}","seq":1},{"name":"cache_miss", "seq":2},{"seq":3}'
    assert join(bodies) == b'{"time_ms":9,"events":[' + events + b"]}"
    assert [event["name"] for event in json.loads(JOINED)["events"]] == [name.replace(".", "_") for name in EVENTS]


@pytest.mark.parametrize("event", EVENTS)
def test_only_bodies_in_the_pusher_format_can_be_joined(event):
    assert [has_events(render(format, SAMPLES[event])) for format in FORMATS] == [False, True]
    assert [format_of(render(format, SAMPLES[event])) for format in FORMATS] == list(FORMATS)
    body = render("pusher", SAMPLES[event])
    assert join([body]) == body


def test_id_of_a_batch_is_that_of_the_set_of_its_deliveries():
    ids = ["0f0e0d0c-0b0a-0908-0706-050403020100", "00010203-0405-0607-0809-0a0b0c0d0e0f", "d3"]
    assert batch_id(ids) == batch_id(reversed(ids)) == "98753808-c284-5c15-b229-0baf105b4333"
    assert len({batch_id(ids), batch_id(ids[:2]), batch_id(ids[1:]), batch_id([*ids, "d4"]), *ids}) == 7


async def test_official_libraries_validate_a_joined_body(monkeypatch):
    monkeypatch.setattr("time.time", lambda: TIME_MS / 1000)
    fields = sent("pusher", JOINED, "batch")
    pusher = Pusher("3", KEY.key, KEY.secret)
    valid = pusher.validate_webhook(fields["X-Pusher-Key"], fields["X-Pusher-Signature"], JOINED.decode())
    assert valid == json.loads(JOINED)
    lower = {name.lower(): value for name, value in fields.items()}
    right, wrong = await validated([(lower, JOINED.decode()), (lower, JOINED.decode().replace("room", "hall") + " ")])
    assert right == [json.loads(JOINED)["events"], TIME_MS]
    assert wrong is None


VALIDATE = """
    import Pusher from "pusher";
    const pusher = new Pusher({ appId: "3", key: process.argv[1], secret: process.argv[2], cluster: "any" });
    const sent = JSON.parse(await new Response(process.stdin).text());
    console.log(JSON.stringify(sent.map(([headers, rawBody]) => {
      const webhook = pusher.webhook({ headers, rawBody });
      return webhook.isValid() ? [webhook.getEvents(), webhook.getTime().getTime()] : null;
    })));
"""


async def validated(deliveries):
    """What the library of npm answers to each `(headers, body)`."""
    assert (CLIENTS / "node_modules" / "pusher").is_dir(), "run `npm ci` in tests/clients first"
    process = await asyncio.create_subprocess_exec(
        *("node", "--input-type=module", "-e", VALIDATE, KEY.key, KEY.secret),
        cwd=CLIENTS,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate(json.dumps(deliveries).encode())
    return json.loads(out)


async def test_official_node_library_validates_the_pusher_format():
    deliveries = []
    for event, row in SAMPLES.items():
        body = render("pusher", row)
        fields = {name.lower(): value for name, value in sent("pusher", body, event).items()}
        deliveries += [(fields, body.decode()), (fields, body.decode() + " ")]
    answers = await validated(deliveries)
    for (_, body), answer in zip(deliveries[::2], answers[::2], strict=True):
        assert answer == [json.loads(body)["events"], TIME_MS]
    assert answers[1::2] == [None] * len(SAMPLES)
