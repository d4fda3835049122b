"""A fake server keeps a channel's rate as the real one does."""

import json

from helpers.wire import Api, Socket
from redpoll.testing import FakeServer


def delta(text: object) -> str:
    return json.dumps({"id": "m", "delta": str(text)})


def text(frames: list[dict]) -> str:
    return "".join(json.loads(frame["data"])["delta"] for frame in frames)


async def test_a_text_grows_in_few_frames_and_a_replay_is_one():
    with FakeServer() as server:
        server.keep_history("chat-", keep=1000, replay=1, max_rate=2, join="delta", by="id")
        client = await Socket.connect(server)
        await client.subscribe("chat-a")
        async with Api(server) as api:
            for at in range(30):
                await api.publish("chat-a", "text", delta(f"{at} "))
        await client.settle()
        assert len(client.all("text")) < 30
        server.clock.advance(0.5)
        await client.settle()
        whole = "".join(f"{at} " for at in range(30))
        assert text(client.all("text")) == whole
        later = await Socket.connect(server)
        await later.subscribe("chat-a")
        assert text([await later.next("text")]) == whole
        async with Api(server) as api:
            await api.publish("chat-a", "text", delta("30 "))
            await api.publish("chat-a", "text", delta("31 "))
        # Another rule sends what waits.
        server.keep_history("chat-", keep=1000)
        await later.settle()
        assert text(later.all("text")) == whole + "30 31 "


async def test_the_newest_of_each_name_is_sent_and_a_client_that_left_gets_nothing():
    with FakeServer() as server:
        server.keep_history("price-", keep=0, seconds=0, max_rate=1, latest=True)
        client, gone = await Socket.connect(server), await Socket.connect(server)
        for one in (client, gone):
            await one.subscribe("price-a")
        async with Api(server) as api:
            for at in range(20):
                await api.publish("price-a", "n", str(at))
        await gone.close()
        server.clock.advance(1)
        await client.settle()
        received = [frame["data"] for frame in client.all("n")]
        assert received[0] == "0"
        assert received[-1] == "19"
        assert len(received) < 20
