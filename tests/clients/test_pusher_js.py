"""pusher-js with stock options against four workers: everything a page does with a channel."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import pusher
import pytest

from clients.node import Node, NodeError, auth_endpoint
from helpers.server import Server
from helpers.wire import Api, eventually


async def connect_on_each_of_two_workers(server: Server, node: Node, auth_url: str) -> tuple[str, str]:
    """Two pusher-js clients, signed in as users of the same names, that two different workers hold."""
    holders: dict[int, str] = {}
    for number in range(64):
        name = f"user-{number}"
        before = server.client_ports()
        await node.connect(name, f"{auth_url}?user={name}")
        (worker,) = [pid for pid, ports in server.client_ports().items() if ports - before[pid]]
        holders.setdefault(worker, name)
        if len(holders) == 2:
            first, second = holders.values()
            return first, second
    raise AssertionError("the kernel gave 64 connections to one worker")


async def test_published_event_reaches_every_client_but_the_excluded_one(server: Server, node: Node) -> None:
    names = [f"client-{number}" for number in range(24)]
    socket_ids = {name: await node.connect(name) for name in names}
    assert sum(1 for ports in server.client_ports().values() if ports) > 1, "all on one worker shows nothing"
    for name in names:
        await node.subscribe(name, "news")
    async with Api(server) as api:
        await api.publish("news", "to-all-but-one", '{"n":1}', socket_id=socket_ids["client-3"])
        await api.publish("news", "to-all", '{"n":2}')
    for name in names:
        assert (await node.seen(client=name, event="to-all"))["data"] == {"n": 2}
    receivers = {one["client"] for one in node.matching(event="to-all-but-one")}
    assert receivers == set(names) - {"client-3"}


async def test_data_arrives_as_it_was_given(server: Server, node: Node) -> None:
    await node.connect("reader")
    await node.subscribe("reader", "as-given")
    given = [
        "plain text",
        "",
        '"quoted \\ text"',
        "ünïcode – 🐦 \u2028",
        '{"a":[1,2,{"b":null}]}',
        "\x00\x1f\x7f",
    ]
    async with Api(server) as api:
        for number, data in enumerate(given):
            await api.publish("as-given", f"event {number}", data)
    for number, data in enumerate(given):
        try:
            expected = json.loads(data)
        except ValueError:
            expected = data
        assert (await node.seen(client="reader", event=f"event {number}"))["data"] == expected


async def test_private_channel_through_the_applications_auth_endpoint(
    server: Server, node: Node, auth_url: str
) -> None:
    await node.connect("holder", auth_url)
    await node.subscribe("holder", "private-orders")
    async with Api(server) as api:
        await api.publish("private-orders", "shipped", '{"id":7}')
    assert (await node.seen(client="holder", event="shipped"))["data"] == {"id": 7}


async def test_wrong_signature_is_reported_on_the_channel_and_keeps_the_connection(server: Server, node: Node) -> None:
    async def sign(form: Mapping[str, str], member: Mapping[str, object] | None) -> Mapping[str, Any]:
        return {"auth": f"{server.app_key}:{'0' * 64}"}

    async with auth_endpoint(sign) as url:
        await node.connect("stranger", url)
        await node.call("subscribe", client="stranger", channel="private-closed")
        error = await node.seen(client="stranger", channel="private-closed", event="pusher:subscription_error")
    assert error["data"]["type"] == "AuthError"
    assert error["data"]["status"] == 401
    assert await node.call("state", client="stranger") == "connected"
    async with Api(server) as api:
        assert await api.subscription_count("private-closed") == 0


@pytest.mark.parametrize("encoding", ["json", "form"])
async def test_redpolls_own_auth_helper_serves_as_the_backends_signer(
    server: Server, node: Node, encoding: str
) -> None:
    """The application's endpoint asks `/apps/{id}/auth` with the header pair and passes the answer on."""
    headers = {"X-Service-Key": server.app_key, "X-Service-Secret": server.app_secret}

    async def sign(form: Mapping[str, str], member: Mapping[str, object] | None) -> Mapping[str, Any]:
        body: dict[str, object] = {"socket_id": form["socket_id"], "channel_name": form["channel_name"]}
        if member is not None:
            body["channel_data"] = json.dumps(member)
        url = f"{server.public_url}/api/v1/apps/{server.app_id}/auth"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()
            signed = await answer.json()
            assert isinstance(signed, dict)
            return signed

    async with auth_endpoint(sign) as url:
        await node.connect("anna", f"{url}?user=anna")
        await node.subscribe("anna", "private-by-helper")
        success = await node.subscribe("anna", "presence-by-helper")
    assert success["data"]["members"] == {"anna": {"name": "name of anna"}}
    assert success["data"]["myID"] == "anna"


async def test_members_come_and_go_across_workers(server: Server, node: Node, auth_url: str) -> None:
    first, second = await connect_on_each_of_two_workers(server, node, auth_url)
    channel = "presence-room"
    await node.subscribe(first, channel)
    success = await node.subscribe(second, channel)
    assert sorted(success["data"]["members"]) == sorted([first, second])
    added = await node.seen(client=first, channel=channel, event="pusher:member_added")
    assert added["data"] == {"id": second, "info": {"name": f"name of {second}"}}
    assert (await node.call("members", client=first, channel=channel))["count"] == 2

    await node.call("unsubscribe", client=second, channel=channel)
    removed = await node.seen(client=first, channel=channel, event="pusher:member_removed")
    assert removed["data"]["id"] == second
    await node.subscribe(second, channel)
    await node.seen(2, client=first, channel=channel, event="pusher:member_added")
    await node.call("disconnect", client=second)
    await node.seen(2, client=first, channel=channel, event="pusher:member_removed")
    assert not node.matching(client=second, event="pusher:member_added")
    async with Api(server) as api:
        assert await api.users(channel) == [first]


async def test_client_event_reaches_the_others_with_the_senders_id(server: Server, node: Node, auth_url: str) -> None:
    first, second = await connect_on_each_of_two_workers(server, node, auth_url)
    for name in (first, second):
        await node.subscribe(name, "presence-typing", "client-typing")
        await node.subscribe(name, "private-typing", "client-typing")
    for channel, user_id in (("presence-typing", first), ("private-typing", None)):
        await node.call("trigger", client=first, channel=channel, event="client-typing", data={"on": [1, None]})
        heard = await node.seen(client=second, channel=channel, event="client-typing")
        assert heard["data"] == {"on": [1, None]}
        assert heard.get("user_id") == user_id
    # After the second one's answer, everything that the first might have been sent has arrived.
    await node.call("trigger", client=second, channel="private-typing", event="client-typing", data="back")
    await node.seen(client=first, channel="private-typing", event="client-typing", data="back")
    assert len(node.matching(client=first, event="client-typing")) == 1


async def test_client_event_on_a_public_channel_is_refused_in_band(server: Server, node: Node) -> None:
    await node.connect("loud")
    await node.subscribe("loud", "open-air")
    await node.call("trigger", client="loud", channel="open-air", event="client-shout", data={})
    await node.seen(client="loud", error_code=4301)
    assert await node.call("state", client="loud") == "connected"


async def test_unknown_key_makes_pusher_js_give_up_for_good(node: Node) -> None:
    await node.call("connect", client="lost", key="0" * 20, options=node.options())
    await node.seen(client="lost", state="disconnected")
    assert {one["error_code"] for one in node.matching(client="lost") if "error" in one} == {4001}


async def test_requests_in_turn_and_batches_arrive_in_order_at_every_page(server: Server, node: Node) -> None:
    """Published with the Python library, one call after another, heard by pusher-js on several workers."""
    backend = pusher.Pusher(
        server.app_id, server.app_key, server.app_secret, host="127.0.0.1", port=server.port, ssl=False, timeout=60
    )
    names = [f"page-{number}" for number in range(8)]
    for name in names:
        await node.connect(name)
        await node.subscribe(name, "in-order")

    def publish() -> None:
        for start in range(0, 100, 20):
            batch = [{"channel": "in-order", "name": "n", "data": number} for number in range(start, start + 10)]
            backend.trigger_batch(batch)
            for number in range(start + 10, start + 20):
                backend.trigger("in-order", "n", number)

    await asyncio.to_thread(publish)
    for name in names:
        await node.seen(100, client=name, event="n")
        assert [one["data"] for one in node.matching(client=name, event="n")] == list(range(100))


async def test_unsubscribed_client_gets_nothing_more(server: Server, node: Node) -> None:
    await node.connect("leaver")
    await node.subscribe("leaver", "left")
    await node.subscribe("leaver", "kept")
    await node.call("unsubscribe", client="leaver", channel="left")
    async with Api(server) as api:
        await eventually(lambda: api.subscription_count("left"), 0)
        await api.publish(["left", "kept"], "word", "{}")
    await node.seen(client="leaver", channel="kept", event="word")
    assert not node.matching(client="leaver", channel="left", event="word")


@pytest.mark.parametrize("prefix", ["", "/api/v1"])
async def test_channel_queries_know_what_pusher_js_holds(
    server: Server, node: Node, auth_url: str, prefix: str
) -> None:
    first, second = await connect_on_each_of_two_workers(server, node, auth_url)
    suffix = "spec" if prefix else "root"
    room, plain = f"presence-asked-{suffix}", f"asked-{suffix}"
    for name in (first, second):
        await node.subscribe(name, room)
        await node.subscribe(name, plain)
    async with Api(server, prefix=prefix) as api:
        listed = await api.get("/channels", filter_by_prefix="presence-asked", info="user_count")
        assert listed["channels"][room] == {"user_count": 2}
        listed = await api.get("/channels", info="subscription_count")
        assert listed["channels"][plain] == {"subscription_count": 2}
        assert await api.get(f"/channels/{room}") == {
            "occupied": True,
            "subscription_count": 2,
            "user_count": 2,
        }
        assert await api.get(f"/channels/{plain}") == {"occupied": True, "subscription_count": 2}
        assert await api.users(room) == sorted([first, second])
        assert (await api.ask("GET", f"/channels/{plain}/users"))[0] == 400
        assert await api.get("/channels/nobody") == {"occupied": False, "subscription_count": 0}


async def test_node_driver_reports_what_a_library_throws(node: Node) -> None:
    with pytest.raises(NodeError, match="nothing is called nobody"):
        await node.call("state", client="nobody")


@pytest.mark.parametrize("transport", ["ws", "xhr_streaming", "xhr_polling"])
async def test_message_that_is_too_large_has_the_client_connect_again(
    server: Server, node: Node, auth_url: str, transport: str
) -> None:
    """pusher-js doesn't look at the answer to an xhr_send. Its session is closed as a WebSocket is."""
    options = {**node.options(auth_url), "enabledTransports": [transport], "httpHost": "127.0.0.1"}
    options["httpPort"] = server.port
    client = f"large-{transport}"
    await node.call("connect", client=client, key=server.app_key, options=options)
    await node.seen(client=client, state="connected")
    assert await node.call("transport", client=client) == transport
    before = await node.call("socket_id", client=client)
    await node.subscribe(client, f"private-{client}")
    data = "x" * 200_000
    await node.call("trigger", client=client, channel=f"private-{client}", event="client-large", data=data)
    # It subscribes again on the new connection.
    await node.seen(2, client=client, channel=f"private-{client}", event="pusher:subscription_succeeded")
    assert await node.call("socket_id", client=client) != before
