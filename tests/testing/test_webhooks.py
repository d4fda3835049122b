import json
from types import SimpleNamespace

import pusher
import pytest

from helpers.wire import Socket, digest
from redpoll.testing import FakeServer


async def test_changes_are_recorded_as_the_server_sends_them(server):
    client, peer = await Socket.connect(server), await Socket.connect(server)
    await client.subscribe("presence-a", "1", {"n": 1})
    await peer.subscribe("presence-a", "2")
    client.send({"event": "client-x", "channel": "presence-a", "data": {"n": 1}})
    hook = server.wait_for_webhook("client_event", "presence-a")
    (event,) = hook.json["events"]
    assert (event["event"], event["data"], event["user_id"]) == ("client-x", '{"n": 1}', "1")
    assert [one.event for one in server.webhooks] == [
        "channel.occupied",
        "member.added",
        "member.added",
        "client_event",
    ]
    assert [one.user_id for one in server.webhooks] == [None, "1", "2", "1"]


async def test_the_official_library_accepts_the_signature(server):
    await (await Socket.connect(server)).subscribe("news")
    hook = server.wait_for_webhook("channel.occupied")
    backend = pusher.Pusher(app_id="1", key=server.app_key, secret=server.app_secret)
    headers = hook.headers
    checked = backend.validate_webhook(headers["X-Pusher-Key"], headers["X-Pusher-Signature"], hook.body.decode())
    assert checked["events"][0]["name"] == "channel_occupied"
    assert headers["X-Service-Signature"] == digest(server.app_secret, hook.body.decode())


async def test_leaves_wait_3_s_for_a_return(still_time):
    with FakeServer(webhooks="service") as server:
        client = await Socket.connect(server)
        await client.subscribe("presence-a", "1")
        client.unsubscribe("presence-a")
        await client.settle()
        await client.subscribe("presence-a", "1")
        await client.close()
        with pytest.raises(AssertionError, match=r"deliveries: channel.occupied of 'presence-a', member.added"):
            server.wait_for_webhook("channel.vacated", timeout_s=0.01)
        server.clock.advance(3)
        assert server.wait_for_webhook("channel.vacated").json["data"]["subscription_count"] == 0
        assert [one.event for one in server.webhooks] == [
            "channel.occupied",
            "member.added",
            "member.removed",
            "channel.vacated",
        ]
        stamps = [json.loads(one.body)["data"]["seq"] for one in server.webhooks]
        assert stamps == sorted(set(stamps))
        assert SimpleNamespace(**server.webhooks[2].json["data"]).user_id == "1"
