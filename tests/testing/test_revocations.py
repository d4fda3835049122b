"""What an app takes back of a fake server's connections. tests/matrix has what clients see of it."""

import json

from helpers.wire import Api, Socket

REFUSED = "pusher:subscription_error"
PATH = "/channels/presence-a/unsubscribe"


async def test_removed_member_does_not_return_by_the_old_signature(server):
    member, left, other = [await Socket.connect(server) for _ in range(3)]
    for client, user in ((member, "7"), (left, "7"), (other, "8")):
        await client.subscribe("presence-a", user)
    left.unsubscribe("presence-a")
    await left.settle()
    async with Api(server) as api:
        assert await api.ask("POST", PATH, {"user_id": "7"}) == (200, {"unsubscribed": 1})
    await member.next(REFUSED, "presence-a")
    await other.next("pusher_internal:member_removed", "presence-a")
    for client in (member, left):
        client.send(client.subscribe_request("presence-a", "7"))
        error = json.loads((await client.next(REFUSED, "presence-a"))["data"])
        assert (error["error"], error["status"]) == ("access was revoked", 401)
    # As others, in other channels, and by a new signature for a new connection.
    await left.subscribe("presence-a", "9")
    await left.subscribe("presence-b", "7")
    await (await Socket.connect(server)).subscribe("presence-a", "7")
