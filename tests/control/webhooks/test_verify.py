"""The HTTP endpoint that verifies the signature of a delivery."""

import asyncio
import hashlib
import hmac
import json
import threading

import pytest

from redpoll.control.http.request import Request
from redpoll.control.webhooks import verify
from redpoll.control.webhooks.verify import Verify
from redpoll.loop.turns import TooManyWaiting
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError

ENDPOINTS = {"3": {"first": ["new", "old"], "second": ["other"]}, "4": {"third": ["theirs"]}}
PAYLOAD = '{"event":"channel.vacated","data":{"channel":"kör","subscription_count":0},"timestamp":1}'


async def secrets_of(app_id):
    return ENDPOINTS[app_id]


async def ask(body, app_id="3", handler=None):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    call = Request("POST", f"/apps/{app_id}/webhooks/verify", {}, content)
    call.app = App(id=app_id, name="three", keys=())
    answer = await (handler or Verify(secrets_of)).verify(call)
    assert answer.status == 200
    return json.loads(answer.body)


def signature(secret, payload=PAYLOAD):
    return hmac.new(secret.encode(), payload.encode(), hashlib.sha256).hexdigest()


@pytest.mark.parametrize(("secret", "endpoint"), [("new", "first"), ("old", "first"), ("other", "second")])
async def test_signature_with_any_valid_secret_is_valid_and_names_the_endpoint(secret, endpoint):
    answer = await ask({"payload": PAYLOAD, "signature": signature(secret)})
    assert answer == {"valid": True, "endpoint_id": endpoint}


@pytest.mark.parametrize(
    "wrong",
    [
        {"signature": signature("theirs")},
        {"signature": signature("new").upper()},
        {"signature": ""},
        {"signature": "ünlike"},
        {"payload": PAYLOAD + " "},
        {"payload": ""},
        {"endpoint_id": "second"},
        {"endpoint_id": "third"},
        {"endpoint_id": ""},
    ],
)
async def test_wrong_signature_payload_or_endpoint_is_invalid_without_details(wrong):
    body = {"payload": PAYLOAD, "signature": signature("new"), "endpoint_id": "first"}
    assert await ask(body) == {"valid": True, "endpoint_id": "first"}
    assert await ask(body | wrong) == {"valid": False}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"payload":"\xed\xa0\x80","signature":""}',
        {},
        {"payload": PAYLOAD},
        {"signature": "00"},
        {"payload": None, "signature": "00"},
        {"payload": {"event": "x"}, "signature": "00"},
        {"payload": PAYLOAD, "signature": 1},
        b"[" * 100_000,
        b'{"payload":"\\ud83d","signature":"00"}',
    ],
)
async def test_body_without_payload_and_signature_is_refused(body):
    with pytest.raises(ApiError, match="the body is not what this endpoint takes") as refused:
        await ask(body)
    assert refused.value.code == "bad_request"


@pytest.mark.parametrize("mount", ["/apps", "/api/v1/apps"])
async def test_verification_over_http_uses_current_and_previous_secrets(plane, mount):
    webhooks = plane.plane.webhooks
    endpoint = await webhooks.endpoints.create("3", "https://example.com/hook")
    await webhooks.endpoints.create("4", "https://example.com/hook")
    await webhooks.endpoints.rotate(endpoint.id)
    rotated = webhooks.endpoints.get(endpoint.id)
    assert rotated.secret != endpoint.secret

    async def valid(secret, path=f"{mount}/3/webhooks/verify", **more):
        reply = await plane.call("POST", path, {"payload": PAYLOAD, "signature": signature(secret), **more})
        assert reply.status == 200
        assert secret.encode() not in reply.body
        return reply.json()

    good = {"valid": True, "endpoint_id": endpoint.id}
    assert await valid(rotated.secret) == await valid(endpoint.secret) == good
    assert await valid(rotated.secret, endpoint_id=endpoint.id) == good
    assert await valid(rotated.secret, endpoint_id="unknown") == {"valid": False}
    (other,) = webhooks.endpoints.of_existing_app("4")
    assert await valid(other.secret) == {"valid": False}
    missing = await plane.call("POST", f"{mount}/3/webhooks/verify", {"payload": PAYLOAD})
    assert (missing.status, missing.json()["code"]) == (400, "bad_request")
    unsigned = await plane.ask("POST", f"{mount}/3/webhooks/verify", b"{}")
    assert unsigned.status == 401
    await webhooks.endpoints.delete(endpoint.id)
    assert await valid(rotated.secret) == {"valid": False}


async def test_loop_goes_on_while_a_large_body_is_hashed_one_of_an_app_at_a_time(monkeypatch, wait_until):
    sign, begun, go_on = verify.sign, [], threading.Semaphore(0)

    def slow(secret, body):
        assert threading.current_thread() is not threading.main_thread()
        begun.append(secret)
        go_on.acquire()
        return sign(secret, body)

    monkeypatch.setattr(verify, "sign", slow)
    payload, handler = "x" * 1_000_000, Verify(secrets_of)
    body = {"payload": payload, "signature": signature("old", payload)}
    tasks = [asyncio.create_task(ask(body, handler=handler)) for _ in range(18)]
    try:
        await wait_until(tasks[17].done)
        with pytest.raises(TooManyWaiting):
            await tasks.pop()
        tasks.append(asyncio.create_task(ask(body, "4", handler)))
        await wait_until(lambda: len(begun) == 2)
        assert sorted(begun) == ["new", "theirs"]
    finally:
        go_on.release(1_000)
    answers = await asyncio.gather(*tasks)
    assert answers == [{"valid": True, "endpoint_id": "first"}] * 17 + [{"valid": False}]
