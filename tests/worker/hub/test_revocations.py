"""Grants on workers, and what the app takes back, over Redis and `sys`."""

import json
import time

from helpers.granting import mint
from redpoll.cluster.questions import RevokeGrants, Unsubscribe
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Survey
from redpoll.protocol.auth import sign_channel
from redpoll.worker.hub.client_libraries import ClientLibraries

APP_ID, KEY, SECRET = "1", "278d425bdf160c739803", "7ad3773142a6692b25b8"
REFUSED = "pusher:subscription_error"


async def ask(bench, question) -> dict:
    """As control does: ask every worker and collect the answers."""
    link = Link(bench.redis.url)
    link.start()
    await link.wait_up()
    try:
        return await Survey(link, Keys(), answer_s=60).ask(question)
    finally:
        await link.close()


async def start(bench):
    worker = await bench.start()
    await bench.change(grants=True)
    await bench.settled(worker, lambda: worker.directory.by_id[APP_ID].grants)
    return worker


def grant(*channels: str, **claims: object) -> str:
    return mint(KEY, SECRET, *channels, **claims)


async def subscribe(client, channel: str, auth: str) -> None:
    await client.send("pusher:subscribe", {"channel": channel, "auth": auth})
    assert (await client.until("pusher_internal:subscription_succeeded"))["channel"] == channel


async def refused(client, channel: str) -> str:
    frame = await client.until(REFUSED)
    assert frame["channel"] == channel
    return json.loads(frame["data"])["error"]


async def test_a_revoked_grant_ends_what_it_opened_and_opens_nothing_more(bench):
    worker = await start(bench)
    client, other = await bench.client(worker), await bench.client(worker)
    auth = grant("private-*", "presence-*", sub="7", jti="one")
    await subscribe(client, "private-a", auth)
    await subscribe(client, "presence-a", auth)
    await client.subscribe("private-signed")
    await subscribe(other, "presence-a", grant("presence-a", sub="8"))
    answers = await ask(bench, RevokeGrants(APP_ID, "jti one", int(time.time())))
    assert list(answers.values()) == [2]
    assert await refused(client, "private-a") == "access was revoked"
    assert await refused(client, "presence-a") == "access was revoked"
    await other.until("pusher_internal:member_removed")
    await client.send("pusher:subscribe", {"channel": "private-b", "auth": auth})
    assert await refused(client, "private-b") == "access was revoked"
    # Its other channels stay.
    await bench.publish("private-signed", "n", "1")
    await client.events(1)
    assert list((await ask(bench, RevokeGrants(APP_ID, "jti one", int(time.time())))).values()) == [0]


async def test_a_revoked_sign_in_ends_the_connection(bench):
    worker = await start(bench)
    client = await bench.client(worker)
    await client.send("pusher:signin", {"auth": grant(sub="7"), "user_data": '{"id":"7"}'})
    await client.until("pusher:signin_success")
    await client.subscribe("news")
    assert list((await ask(bench, RevokeGrants(APP_ID, "sub 7", int(time.time())))).values()) == [1]
    assert await client.closed_with() == 4100


async def test_a_revocation_that_a_worker_missed_comes_with_its_next_beat(bench, client_of_redis):
    worker = await start(bench)
    client = await bench.client(worker)
    await subscribe(client, "private-a", grant("private-a", sub="7"))
    await client_of_redis.xadd(Keys().revoked_grants, {f"{APP_ID} sub 7": int(time.time())})
    assert await refused(client, "private-a") == "access was revoked"
    # One that starts later knows it before it admits clients.
    late = await bench.start()
    assert list(late.hub.revoked_grants) == list(worker.hub.revoked_grants) != []


async def test_a_user_or_a_socket_leaves_one_channel(bench):
    worker = await start(bench)
    tab, signed, watcher = [await bench.client(worker) for _ in range(3)]
    auth = grant("private-*", "presence-*", sub="7")
    await subscribe(tab, "presence-a", auth)
    await signed.subscribe("presence-a", {"user_id": "7"})
    await watcher.subscribe("presence-a", {"user_id": "8"})
    (answer,) = (await ask(bench, Unsubscribe(APP_ID, "presence-a", "7", "", int(time.time())))).values()
    assert answer[0] == 2
    for client in (tab, signed):
        assert await refused(client, "presence-a") == "access was revoked"
    await watcher.until("pusher_internal:member_removed")
    # A new connection needs a new grant as well.
    again = await bench.client(worker)
    await again.send("pusher:subscribe", {"channel": "presence-a", "auth": auth})
    assert await refused(again, "presence-a") == "access was revoked"
    await subscribe(again, "private-b", auth)
    (answer,) = (await ask(bench, Unsubscribe(APP_ID, "private-b", "", again.socket_id, int(time.time())))).values()
    assert (answer[0], len(answer[1])) == (1, 1)
    assert await refused(again, "private-b") == "access was revoked"
    for unknown in ("1.1", "x", "9" * 50):
        (answer,) = (await ask(bench, Unsubscribe(APP_ID, "private-b", "", unknown, 5))).values()
        assert answer == [0, []]
    assert worker.statistics.loop_exceptions_total == 0


async def test_a_removed_user_who_had_left_before_does_not_return_by_the_old_signature(bench):
    worker = await start(bench)
    clock = [time.time()]
    worker.gate._client_libraries = ClientLibraries(lambda: clock[0])
    client = await bench.client(worker)
    await client.subscribe("presence-a", {"user_id": "7"})
    await client.send("pusher:unsubscribe", {"channel": "presence-a"})
    # However young the connection is, and although this worker's clock was set back since it came.
    clock[0] -= 3600
    question = Unsubscribe(APP_ID, "presence-a", "7", "", int(time.time()), False)
    assert list((await ask(bench, question)).values()) == [[0, []]]
    # The app has no grants: nothing for the table that is bounded by what grants there are.
    assert len(worker.hub.revoked_grants) == 0
    data = json.dumps({"user_id": "7"})
    auth = f"{KEY}:{sign_channel(SECRET, client.socket_id, 'presence-a', data)}"
    await client.send("pusher:subscribe", {"channel": "presence-a", "auth": auth, "channel_data": data})
    assert await refused(client, "presence-a") == "access was revoked"
    # Others, other channels, and a new connection.
    await client.subscribe("presence-a", {"user_id": "8"})
    await client.subscribe("presence-b", {"user_id": "7"})
    await (await bench.client(worker)).subscribe("presence-a", {"user_id": "7"})
    await subscribe(client, "presence-c", grant("presence-*", sub="7"))
    assert worker.statistics.loop_exceptions_total == 0
