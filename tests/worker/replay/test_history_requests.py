"""`pusher:history`: pages of a channel's stored messages for its subscribers."""

import asyncio
import json

from cluster.links import confirm_within
from redpoll.cluster.history import History
from redpoll.cluster.redis.keys import Keys
from redpoll.protocol.effects import AskHistory

HISTORY = "pusher:history"


async def page(client, channel: str = "stored-a", **request) -> dict:
    await client.send(HISTORY, {"channel": channel, **request})
    answer = await client.until(HISTORY)
    assert answer["channel"] == channel
    return json.loads(answer["data"])


async def refusal(client, channel: str = "stored-a", **request) -> str:
    await client.send(HISTORY, {"channel": channel, **request})
    error = (await client.until("pusher:error"))["data"]
    assert error["code"] is None
    return error["message"]


def numbers(answer: dict) -> list[int]:
    return [int(message["data"].split()[0]) for message in answer["messages"]]


async def test_the_newest_come_oldest_first_as_they_were_published(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("stored-a")
    await bench.publish("stored-a", "first", '{"é":"\\n"}')
    await bench.publish_numbers("stored-a", range(9))
    await client.events(10)
    answer = await page(client, limit=10)
    assert answer["next"] is None
    assert answer["epoch"]
    first, *_, last = answer["messages"]
    assert first == {"offset": first["offset"], "event": "first", "data": '{"é":"\\n"}', "time_ms": first["time_ms"]}
    assert last["data"] == "8"
    assert first["offset"] // 1000 == first["time_ms"]
    assert numbers(await page(client, limit=2)) == [7, 8]
    assert worker.hub.history_requests.answered == 2


async def test_paging_in_both_directions(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("stored-a")
    await bench.publish_numbers("stored-a", range(150))
    back: list[int] = []
    request: dict = {}
    while True:
        answer = await page(client, limit=40, **request)
        back = numbers(answer) + back
        if answer["next"] is None:
            break
        request = {"before": answer["next"]}
    assert back == list(range(150))
    on: list[int] = []
    request = {"since": {"epoch": answer["epoch"], "offset": 0}}
    while True:
        answer = await page(client, limit=70, **request)
        on += numbers(answer)
        if answer["next"] is None:
            break
        request = {"since": answer["next"]}
    assert on == list(range(150))


async def test_more_messages_than_one_read_from_redis(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("stored-a")
    await bench.publish_numbers("stored-a", range(1000))
    assert numbers(await page(client, limit=1000)) == list(range(1000))


async def test_an_answer_is_bounded_and_says_where_the_next_page_begins(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("stored-a")
    # Quotes take four times their size in JSON within JSON.
    await bench.publish_numbers("stored-a", range(200), "{n} " + '"' * 5000)
    received: list[int] = []
    request: dict = {}
    while True:
        await client.send(HISTORY, {"channel": "stored-a", "limit": 200, **request})
        answer = await client.until(HISTORY)
        assert len(json.dumps(answer)) < 300_000
        found = json.loads(answer["data"])
        received = numbers(found) + received
        if found["next"] is None:
            break
        request = {"before": found["next"]}
    assert received == list(range(200))


async def test_many_requests_are_answered_in_order(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("stored-a")
    await bench.publish_numbers("stored-a", range(30))
    await client.events(30)
    for limit in range(1, 31):
        await client.send(HISTORY, {"channel": "stored-a", "limit": limit})
    answers = [json.loads((await client.next())["data"]) for _ in range(30)]
    assert [len(answer["messages"]) for answer in answers] == list(range(1, 31))
    await bench.settled(worker, lambda: not len(worker.hub.history_requests))


async def test_the_number_of_waiting_requests_is_bounded(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("stored-a")
    connection = next(iter(worker.hub.open_connections))
    request = AskHistory("stored-a", 1, None, None)
    # None of them is answered before the next pass of the loop.
    for _ in range(103):
        worker.hub.history_requests.ask(connection, request)
    for _ in range(3):
        refused = (await client.until("pusher:error"))["data"]
        assert "100 earlier requests" in refused["message"]
    for _ in range(100):
        assert json.loads((await client.until(HISTORY))["data"])["messages"] == []


async def test_invalid_requests_are_refused_with_the_reason(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("stored-a")
    await client.subscribe("news")
    await bench.publish_numbers("stored-a", range(3))
    epoch = (await page(client))["epoch"]
    assert "epoch" in await refusal(client, since={"epoch": "foreign", "offset": 1})
    assert "last offset" in await refusal(client, since={"epoch": epoch, "offset": 2**52})
    assert "last offset" in await refusal(client, before=2**52)
    assert "no history" in await refusal(client, "news")
    assert "not subscribed" in await refusal(client, "stored-b")
    assert "limit" in await refusal(client, limit=0)
    assert "limit" in await refusal(client, limit=1001)
    await History(bench.bus.link, Keys()).clear("1", "stored-a")
    assert "epoch" in await refusal(client, before=f"{epoch}:99")


async def test_requests_of_clients_that_close_or_leave_are_dropped(bench):
    worker = await bench.start()
    await bench.keep()
    closing, leaving = await bench.client(worker), await bench.client(worker)
    await bench.publish_numbers("stored-a", range(500))
    for client in (closing, leaving):
        await client.subscribe("stored-a")
        for _ in range(10):
            await client.send(HISTORY, {"channel": "stored-a", "limit": 500})
    await leaving.send("pusher:unsubscribe", {"channel": "stored-a"})
    closing.socket.transport.abort()
    await bench.settled(worker, lambda: not len(worker.hub.history_requests))
    assert worker.statistics.loop_exceptions_total == 0


async def test_a_request_is_refused_while_redis_is_away(own_redis, bench_on, monkeypatch):
    bench = await bench_on(own_redis)
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("stored-a")
    confirm_within(monkeypatch, 0.3)
    own_redis.pause()
    asking = asyncio.create_task(refusal(client))
    assert "not confirmed" in await asyncio.wait_for(asking, 60)
    own_redis.resume()
