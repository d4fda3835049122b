"""What a fake server holds of one app. What it does with it: test_hub.py."""

import json

from helpers.wire import Api, Socket, digest


async def test_a_users_own_channel_is_not_among_the_occupied_ones(server):
    client = await Socket.connect(server)
    data = json.dumps({"id": "7"})
    auth = f"{server.app_key}:{digest(server.app_secret, f'{client.socket_id}::user::{data}')}"
    client.send({"event": "pusher:signin", "data": {"auth": auth, "user_data": data}})
    await client.next("pusher:signin_success")
    for channel in ("private-b", "#server-to-user-7", "news"):
        await client.subscribe(channel)
    async with Api(server) as api:
        assert list((await api.get("/channels"))["channels"]) == ["news", "private-b"]


async def test_what_came_after_a_removal_is_not_removed(server):
    old = await Socket.connect(server)
    async with Api(server) as api:
        assert (await api.ask("POST", "/channels/presence-a/unsubscribe", {"user_id": "7"}))[0] == 200
    new = await Socket.connect(server)
    await new.subscribe("presence-a", "7")
    old.send(old.subscribe_request("presence-a", "7"))
    await old.next("pusher:subscription_error", "presence-a")
    await new.settle()
