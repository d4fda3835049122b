"""`pusher:history`: pages of a channel's past for whoever is in it."""

import asyncio
import json

from redpoll.cluster.history import History
from redpoll.protocol.effects import AskHistory

HISTORY = "pusher:history"


async def page(client, channel: str = "kept-a", **asked) -> dict:
    await client.send(HISTORY, {"channel": channel, **asked})
    answer = await client.until(HISTORY)
    assert answer["channel"] == channel
    return json.loads(answer["data"])


async def refusal(client, channel: str = "kept-a", **asked) -> str:
    await client.send(HISTORY, {"channel": channel, **asked})
    error = (await client.until("pusher:error"))["data"]
    assert error["code"] is None
    return error["message"]


def numbers(told: dict) -> list[int]:
    return [int(message["data"].split()[0]) for message in told["messages"]]


async def test_the_newest_come_oldest_first_as_they_were_published(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("kept-a")
    await bench.publish("kept-a", "first", '{"é":"\\n"}')
    await bench.publish_numbers("kept-a", range(9))
    await client.events(10)
    told = await page(client, limit=10)
    assert told["next"] is None
    assert told["epoch"]
    first, *_, last = told["messages"]
    assert first == {"offset": first["offset"], "event": "first", "data": '{"é":"\\n"}', "time_ms": first["time_ms"]}
    assert last["data"] == "8"
    assert first["offset"] // 1000 == first["time_ms"]
    assert numbers(await page(client, limit=2)) == [7, 8]
    assert worker.hub.history_requests.answered == 2


async def test_from_page_to_page_in_both_directions(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("kept-a")
    await bench.publish_numbers("kept-a", range(150))
    back: list[int] = []
    asked: dict = {}
    while True:
        told = await page(client, limit=40, **asked)
        back = numbers(told) + back
        if told["next"] is None:
            break
        asked = {"before": told["next"]}
    assert back == list(range(150))
    on: list[int] = []
    asked = {"since": {"epoch": told["epoch"], "offset": 0}}
    while True:
        told = await page(client, limit=70, **asked)
        on += numbers(told)
        if told["next"] is None:
            break
        asked = {"since": told["next"]}
    assert on == list(range(150))


async def test_more_rows_than_redis_gives_at_once(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("kept-a")
    await bench.publish_numbers("kept-a", range(1000))
    assert numbers(await page(client, limit=1000)) == list(range(1000))


async def test_an_answer_is_bounded_and_says_how_to_go_on(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("kept-a")
    # Quotes take four times their room in text within text.
    await bench.publish_numbers("kept-a", range(200), "{n} " + '"' * 5000)
    told: list[int] = []
    asked: dict = {}
    while True:
        await client.send(HISTORY, {"channel": "kept-a", "limit": 200, **asked})
        answer = await client.until(HISTORY)
        assert len(json.dumps(answer)) < 300_000
        found = json.loads(answer["data"])
        told = numbers(found) + told
        if found["next"] is None:
            break
        asked = {"before": found["next"]}
    assert told == list(range(200))


async def test_many_questions_are_answered_in_their_order(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("kept-a")
    await bench.publish_numbers("kept-a", range(30))
    await client.events(30)
    for limit in range(1, 31):
        await client.send(HISTORY, {"channel": "kept-a", "limit": limit})
    answers = [json.loads((await client.next())["data"]) for _ in range(30)]
    assert [len(answer["messages"]) for answer in answers] == list(range(1, 31))
    await bench.settled(worker, lambda: not len(worker.hub.history_requests))


async def test_who_does_not_read_the_answers_may_ask_only_so_often(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("kept-a")
    connection = next(iter(worker.hub.everyone))
    asked = AskHistory("kept-a", 1, None, None)
    # None of them is answered before the loop turns.
    for _ in range(103):
        worker.hub.history_requests.ask(connection, asked)
    for _ in range(3):
        refused = (await client.until("pusher:error"))["data"]
        assert "100 earlier requests" in refused["message"]
    for _ in range(100):
        assert json.loads((await client.until(HISTORY))["data"])["messages"] == []


async def test_what_makes_no_sense_is_refused_with_the_reason(bench):
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("kept-a")
    await client.subscribe("news")
    await bench.publish_numbers("kept-a", range(3))
    epoch = (await page(client))["epoch"]
    assert "epoch" in await refusal(client, since={"epoch": "foreign", "offset": 1})
    assert "last offset" in await refusal(client, since={"epoch": epoch, "offset": 2**52})
    assert "last offset" in await refusal(client, before=2**52)
    assert "no history" in await refusal(client, "news")
    assert "not subscribed" in await refusal(client, "kept-b")
    assert "limit" in await refusal(client, limit=0)
    assert "limit" in await refusal(client, limit=1001)
    link, keys = bench.bus._link, bench.bus._keys
    await History(link, keys).clear("1", "kept-a")
    assert "epoch" in await refusal(client, before=f"{epoch}:99")


async def test_who_closes_or_leaves_meanwhile_costs_nothing(bench):
    worker = await bench.start()
    await bench.keep()
    closing, leaving = await bench.client(worker), await bench.client(worker)
    await bench.publish_numbers("kept-a", range(500))
    for client in (closing, leaving):
        await client.subscribe("kept-a")
        for _ in range(10):
            await client.send(HISTORY, {"channel": "kept-a", "limit": 500})
    await leaving.send("pusher:unsubscribe", {"channel": "kept-a"})
    closing.socket.transport.abort()
    await bench.settled(worker, lambda: not len(worker.hub.history_requests))
    assert worker.loop_exceptions_total == 0


async def test_redis_away_is_an_answer(own_redis, bench_on):
    bench = await bench_on(own_redis)
    worker = await bench.start()
    await bench.keep()
    client = await bench.client(worker)
    await client.subscribe("kept-a")
    own_redis.pause()
    asking = asyncio.create_task(refusal(client))
    assert "not confirmed" in await asyncio.wait_for(asking, 5)
    own_redis.resume()
