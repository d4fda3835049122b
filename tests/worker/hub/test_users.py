"""Signed-in users on one worker and on two: their own channel, and closing all their connections."""

import asyncio
import json
from types import SimpleNamespace

import websockets

from redpoll._engine import CLOSED, CLOSING, OPEN
from redpoll._fanout import Flusher, Sink
from redpoll.cluster.questions import CloseSocket, Question, TerminateUser
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Survey
from redpoll.worker.hub.removed import Removed
from redpoll.worker.hub.users import Users

SUCCEEDED = "pusher_internal:subscription_succeeded"
ADDED = "pusher_internal:member_added"


async def ask(bench, question: Question) -> dict:
    """As control does: ask every worker and collect the answers."""
    link = Link(bench.redis.url)
    link.start()
    await link.wait_up()
    try:
        return await Survey(link, Keys(), answer_s=60).ask(question)
    finally:
        await link.close()


class TestSigningIn:
    async def test_user_data_comes_back_as_it_was_sent(self, bench):
        client = await bench.client(await bench.start())
        success = await client.sign_in("7", user_info={"name": "é"})
        assert json.loads(json.loads(success["data"])["user_data"]) == {"id": "7", "user_info": {"name": "é"}}

    async def test_a_closed_connection_is_not_signed_in(self, bench):
        worker = await bench.start()
        tab, second_tab = await bench.client(worker), await bench.client(worker)
        await tab.sign_in("7")
        await second_tab.sign_in("7")
        assert len(worker.hub.users) == 1
        await tab.socket.close()
        await bench.settled(worker, lambda: len(worker.hub.open_connections) == 1)
        assert len(worker.hub.users) == 1
        second_tab.socket.transport.abort()
        await bench.settled(worker, lambda: len(worker.hub.users) == 0)

    async def test_the_same_user_again_is_counted_once(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        for _ in range(3):
            await client.sign_in("7")
        await client.socket.close()
        await bench.settled(worker, lambda: not len(worker.hub.open_connections))
        assert len(worker.hub.users) == 0
        assert worker.statistics.loop_exceptions_total == 0

    async def test_a_signed_in_user_is_a_member_without_channel_data(self, bench):
        one, other = await bench.start(), await bench.start()
        watcher, user = await bench.client(one), await bench.client(other)
        await watcher.subscribe("presence-p", {"user_id": "w"})
        await user.sign_in("7", user_info={"name": "A"})
        await user.ask("presence-p")
        presence = json.loads((await user.until(SUCCEEDED))["data"])["presence"]
        assert presence["hash"] == {"w": {}, "7": {"name": "A"}}
        assert json.loads((await watcher.until(ADDED))["data"]) == {"user_id": "7", "user_info": {"name": "A"}}


class TestServerToUser:
    async def test_every_connection_of_the_user_gets_it_and_no_other(self, bench):
        one, other = await bench.start(), await bench.start()
        tab, far_tab, stranger = await bench.client(one), await bench.client(other), await bench.client(one)
        for client, user in ((tab, "7"), (far_tab, "7"), (stranger, "8")):
            await client.sign_in(user)
            await client.subscribe(f"#server-to-user-{user}")
        await bench.publish("#server-to-user-7", "note", '{"n":1}')
        for client in (tab, far_tab):
            frame = await client.next()
            assert frame == {"event": "note", "channel": "#server-to-user-7", "data": '{"n":1}'}
        await stranger.nothing_more()

    async def test_ids_may_be_any_text(self, bench):
        client = await bench.client(await bench.start())
        user = 'a b:"é\n*'
        await client.sign_in(user)
        await client.subscribe(f"#server-to-user-{user}")
        await bench.publish(f"#server-to-user-{user}", "note", "1")
        assert (await client.next())["channel"] == f"#server-to-user-{user}"

    async def test_another_users_channel_is_refused(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        await client.sign_in("7")
        await client.ask("#server-to-user-8")
        error = await client.until("pusher:subscription_error")
        assert json.loads(error["data"])["status"] == 401
        await client.until("pusher:error")
        await bench.publish("#server-to-user-8", "note", "1")
        await client.nothing_more()

    async def test_the_same_id_in_another_app_is_another_user(self, bench):
        worker = await bench.start()
        ours, theirs = await bench.client(worker), await bench.client(worker, bench.other)
        await ours.sign_in("7")
        await theirs.sign_in("7", bench.other)
        await theirs.send("pusher:signin", {"auth": "278d425bdf160c739803:00", "user_data": '{"id":"8"}'})
        assert (await theirs.until("pusher:error"))["data"]["code"] == 4009
        for client in (ours, theirs):
            await client.subscribe("#server-to-user-7")
        await bench.publish("#server-to-user-7", "note", "1")
        await ours.until("note")
        await theirs.nothing_more()

    async def test_after_unsubscribe_nothing_comes_and_nothing_is_stored(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        await client.sign_in("7")
        await client.subscribe("#server-to-user-7")
        await client.send("pusher:unsubscribe", {"channel": "#server-to-user-7"})
        await bench.settled(worker, lambda: worker.registry.local_channel("1", "#server-to-user-7") is None)
        await bench.publish("#server-to-user-7", "note", "1")
        await client.nothing_more()


class TestTerminate:
    async def test_all_connections_of_the_user_are_closed_before_the_answer(self, bench):
        one, other = await bench.start(), await bench.start()
        tabs = [await bench.client(one), await bench.client(one), await bench.client(other)]
        stranger = await bench.client(one)
        for tab in tabs:
            await tab.sign_in("7")
        await stranger.sign_in("8")
        answers = await ask(bench, TerminateUser("1", "7"))
        assert answers == {one.registry.worker_id: 2, other.registry.worker_id: 1}
        assert await asyncio.gather(*(tab.closed_with() for tab in tabs)) == [4009, 4009, 4009]
        await stranger.nothing_more()
        assert len(other.hub.users) == 0

    async def test_a_presence_member_that_is_not_signed_in_stays(self, bench):
        worker = await bench.start()
        member = await bench.client(worker)
        await member.subscribe("presence-p", {"user_id": "7"})
        assert await ask(bench, TerminateUser("1", "7")) == {worker.registry.worker_id: 0}
        await member.nothing_more()

    async def test_the_same_user_of_another_app_stays(self, bench):
        worker = await bench.start()
        client, meant = await bench.client(worker), await bench.client(worker, bench.other)
        await client.sign_in("7")
        await meant.sign_in("7", bench.other)
        assert await ask(bench, TerminateUser("2", "7")) == {worker.registry.worker_id: 1}
        assert await meant.closed_with() == 4009
        await client.nothing_more()

    async def test_the_user_may_come_back(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        await client.sign_in("7")
        await ask(bench, TerminateUser("1", "7"))
        again = await bench.client(worker)
        await again.sign_in("7")
        await again.nothing_more()


class TestClosingASocket:
    async def test_only_that_connection_is_closed(self, bench):
        one, other = await bench.start(), await bench.start()
        meant, neighbour = await bench.client(other), await bench.client(other)
        answers = await ask(bench, CloseSocket("1", meant.socket_id))
        assert answers == {one.registry.worker_id: 0, other.registry.worker_id: 1}
        assert await meant.closed_with() == 4009
        await neighbour.nothing_more()

    async def test_other_apps_connections_and_invalid_ids_close_nothing(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        for app, socket in (("2", client.socket_id), ("1", "1.2"), ("1", "nonsense"), ("1", "²."), ("1", "")):
            assert await ask(bench, CloseSocket(app, socket)) == {worker.registry.worker_id: 0}
        await client.nothing_more()


class Guest(Sink):
    """A connection of a user who has many; it takes a moment to close."""

    state = OPEN

    def __init__(self, flusher: Flusher, close) -> None:
        super().__init__(flusher)
        app = SimpleNamespace(id="1", watchlist=False)
        self.session = SimpleNamespace(app=app, user_id="guest")
        self.close = close

    def shut(self, code: int, message: str) -> None:
        assert self.state == OPEN
        self.state = CLOSING
        self.close(self)


async def test_others_are_served_while_a_user_with_many_connections_is_terminated(monkeypatch, wait_until):
    """Every other client of the worker waited until the last one was closed."""
    now, closed = 0.0, []
    monkeypatch.setattr("redpoll.loop.slices.monotonic", lambda: now)

    def close(guest: Guest) -> None:
        nonlocal now
        now += 0.001
        closed.append(guest)
        users.closed(guest)

    flusher = Flusher(lambda: None)
    signed_in = SimpleNamespace(sign_in=lambda app, user: None, sign_out=lambda app, user: None)
    users = Users(flusher, SimpleNamespace(online=None, signed_in=signed_in), Removed())
    guests = [Guest(flusher, close) for _ in range(300)]
    for guest in guests:
        users.signed_in(guest, "guest", ())
    assert users.terminate("1", "guest") == 300
    assert 0 < len(closed) < 300
    # This one ends by itself meanwhile.
    ended = next(guest for guest in reversed(guests) if guest not in closed)
    ended.state = CLOSED
    users.closed(ended)
    await wait_until(lambda: len(closed) == 299)
    assert len(users) == 0


async def test_terminating_a_closing_connection_does_nothing(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    await client.sign_in("7")
    closing = asyncio.create_task(client.socket.close())
    await ask(bench, TerminateUser("1", "7"))
    await closing
    await bench.settled(worker, lambda: not len(worker.hub.open_connections))
    assert isinstance(client.socket.protocol.close_exc, websockets.ConnectionClosed)
    assert worker.statistics.loop_exceptions_total == 0
