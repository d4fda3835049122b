"""`Subscriber` at a real redpoll, and at servers that refuse, lie and leave."""

import asyncio
import base64
import json
import secrets
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import WSCloseCode, web

from helpers.ports import reserved_ports
from helpers.proxy import Proxy
from redpoll_client import (
    AsyncPublisher,
    ConnectionRefused,
    DecryptionFailed,
    Overflow,
    ProtocolError,
    Publisher,
    SignInRefused,
    Subscriber,
    SubscriptionRefused,
    Unreachable,
    mint_grant,
)
from redpoll_client.connection import reconnect_delay_s
from redpoll_client.subscribing import State

from .conftest import url_of

GREETING = {"event": "pusher:connection_established", "data": '{"socket_id":"1.2","activity_timeout":120}'}


async def take(channel, count):
    return [await anext(channel) for _ in range(count)]


async def until(channel, name):
    while (await anext(channel)).name != name:
        pass


def success(name, **fields):
    return {"event": "pusher_internal:subscription_succeeded", "channel": name, "data": json.dumps(fields)}


@asynccontextmanager
async def scripted(*connections, answers=None, heard=None):
    """A WebSocket server; each of its connections gets the next list of steps: a frame (dict) or raw text (str). After
    its steps, a connection answers each subscribe by the next frames of `answers`, or by a success, and stays open.
    `heard` gets the names of the channels that are subscribed to."""
    opened = []
    answers = iter(answers or ())

    async def serve(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        steps = connections[min(len(opened), len(connections) - 1)]
        opened.append(socket)
        for step in steps:
            if isinstance(step, str):
                await socket.send_str(step)
            else:
                await socket.send_json(step)
        async for message in socket:
            frame = json.loads(message.data)
            if frame["event"] == "pusher:subscribe":
                name = frame["data"]["channel"]
                if heard is not None:
                    heard.append(name)
                for answer in next(answers, [success(name)]):
                    await socket.send_json(answer)
        return socket

    async def page(request):
        return web.Response(text="a page")

    app = web.Application()
    app.router.add_get("/app/key", serve)
    app.router.add_get("/other/app/key", page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://key:secret@127.0.0.1:{port}/apps/1", opened
    finally:
        await runner.cleanup()


async def test_it_hands_out_events_in_order(server):
    url = url_of(server)
    async with Subscriber(url=url) as subscriber, AsyncPublisher(url=url) as publisher:
        async with subscriber.subscribe("private-x") as channel:
            for number in range(200):
                await publisher.trigger("private-x", "n", {"number": number})
            events = await take(channel, 200)
            assert [event.json()["number"] for event in events] == list(range(200))
            await publisher.trigger("private-x", "mine", "", subscriber.socket_id)
            await publisher.trigger("private-x", "text", "no JSON")
            last = await anext(channel)
            assert (last.name, last.data) == ("text", "no JSON")
            with pytest.raises(ValueError, match="Expecting value"):
                last.json()
            with pytest.raises(ValueError, match="subscribed to already"):
                async with subscriber.subscribe("private-x"):
                    pass
        with pytest.raises(Exception, match="is left"):
            await anext(channel)


async def test_members_and_client_events(server):
    url = url_of(server)
    first = Subscriber(url=url, member={"user_id": "1", "user_info": {"name": "A"}})
    second = Subscriber(url=url, member={"user_id": 2})
    async with first, second, first.subscribe("presence-r", lifecycle=True) as seen:
        assert (dict(seen.members), seen.members.me) == ({"1": {"name": "A"}}, "1")
        assert (await anext(seen)).name == "pusher:subscription_succeeded"
        async with second.subscribe("presence-r") as other:
            assert set(other.members) == {"1", "2"}
            assert (await anext(seen)).name == "pusher:member_added"
            assert set(seen.members) == {"1", "2"}
            await other.trigger("client-typing", {"on": True})
            event = await anext(seen)
            assert (event.name, event.json(), event.user_id) == ("client-typing", {"on": True}, "2")
            with pytest.raises(ValueError, match="begin with client-"):
                await other.trigger("typing", {})
        assert (await anext(seen)).name == "pusher:member_removed"
        assert set(seen.members) == {"1"}


async def test_it_continues_by_offset_after_cuts(server):
    """Cut while events are published: each arrives once, in order, on a channel with history. Another one says that
    something is missing."""
    url = url_of(server)
    with Proxy(("127.0.0.1", server.port)) as proxy:
        through = url.replace(f":{server.port}/", f":{proxy.port}/")
        async with (
            Subscriber(url=through) as subscriber,
            AsyncPublisher(url=url) as publisher,
            subscriber.subscribe("kept-s") as kept,
            subscriber.subscribe("plain", lifecycle=True) as plain,
        ):
            assert kept.position is not None
            got = []
            for round_ in range(3):
                for number in range(5):
                    await publisher.trigger("kept-s", "n", str(round_ * 5 + number))
                    if number == 2:
                        proxy.cut()
                got += [event.data for event in await take(kept, 5)]
            assert got == [str(number) for number in range(15)]
            assert kept.recovered
            while (await anext(plain)).name != "pusher:subscription_succeeded" or plain.recovered:
                pass
            position = kept.position
            await publisher.trigger("kept-s", "n", "later")
        async with Subscriber(url=url) as again, again.subscribe("kept-s", since=position) as continued:
            assert (await anext(continued)).data == "later"
            assert continued.recovered
        async with Subscriber(url=url) as again, again.subscribe("kept-s", rewind={"count": 2}) as rewound:
            assert [event.data for event in await take(rewound, 2)] == ["14", "later"]


async def test_a_slow_reader_gets_overflow(server):
    url = url_of(server)
    async with (
        Subscriber(url=url) as subscriber,
        AsyncPublisher(url=url) as publisher,
        subscriber.subscribe("fast", queue=3) as slow,
        subscriber.subscribe("end") as end,
    ):
        for number in range(5):
            await publisher.trigger("fast", "n", str(number))
        await publisher.trigger("end", "n", "")
        await anext(end)
        assert [event.data for event in await take(slow, 3)] == ["0", "1", "2"]
        with pytest.raises(Overflow, match="3 others waited"):
            await anext(slow)


async def test_sign_in_watchlist_and_events_to_a_user(server):
    url = url_of(server)
    async with Subscriber(url=url) as first, Subscriber(url=url) as second, AsyncPublisher(url=url) as publisher:
        anna = await first.sign_in({"id": "anna", "watchlist": ["bert"]})
        change = await anext(anna)
        assert (change.name, change.user_ids, anna.online) == ("offline", ("bert",), set())
        await second.sign_in({"id": "bert"})
        assert (await anext(anna)).name == "online"
        assert anna.online == {"bert"}
        async with first.subscribe(anna.channel) as own:
            await publisher.send_to_user("anna", "hello", "1")
            assert (await anext(own)).data == "1"


async def test_encrypted_channels(server):
    url = url_of(server)
    keys = [base64.b64encode(bytes([number]) * 32).decode() for number in range(2)]
    async with (
        Subscriber(url=url, encryption_master_key_base64=keys[0]) as subscriber,
        AsyncPublisher(url=url, encryption_master_key_base64=keys[0]) as right,
        AsyncPublisher(url=url, encryption_master_key_base64=keys[1]) as wrong,
        subscriber.subscribe("private-encrypted-x") as channel,
    ):
        await right.trigger("private-encrypted-x", "e", {"a": 1})
        await wrong.trigger("private-encrypted-x", "e", {"a": 2})
        await right.trigger("private-encrypted-x", "e", {"a": 3})
        assert (await anext(channel)).json() == {"a": 1}
        with pytest.raises(DecryptionFailed):
            await anext(channel)
        assert (await anext(channel)).json() == {"a": 3}


async def test_signatures_from_functions_and_endpoints(server):
    backend = Publisher(url=url_of(server))

    async def auth(request):
        form = await request.post()
        if form["channel_name"] == "private-no":
            return web.json_response({"error": "not yours"}, status=403)
        return web.json_response(backend.authenticate(form["channel_name"], form["socket_id"]))

    async def user(request):
        form = await request.post()
        return web.json_response(backend.authenticate_user(form["socket_id"], {"id": request.headers["X-User"]}))

    app = web.Application()
    app.router.add_post("/auth", auth)
    app.router.add_post("/user", user)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    where = {"host": "127.0.0.1", "port": server.port, "ssl": False}
    async with Subscriber(
        server.app_key, **where, auth=f"{base}/auth", user_auth=f"{base}/user", auth_headers={"X-User": "carl"}
    ) as subscriber:
        assert (await subscriber.sign_in()).id == "carl"
        async with subscriber.subscribe("private-yes"):
            pass
        with pytest.raises(SubscriptionRefused, match="answered 403") as caught:
            async with subscriber.subscribe("private-no"):
                pass
        assert caught.value.status == 403
        with pytest.raises(ValueError, match="signed in already"):
            await subscriber.sign_in()
    await runner.cleanup()
    sign = backend.authenticate
    async with Subscriber(server.app_key, **where, auth=lambda socket_id, name: sign(name, socket_id)) as subscriber:
        async with subscriber.subscribe("private-yes"):
            pass
        with pytest.raises(SignInRefused, match="user_auth"):
            await subscriber.sign_in()
    async with Subscriber(server.app_key, **where, auth=lambda socket_id, name: {"auth": "k:x"}) as subscriber:
        with pytest.raises(SubscriptionRefused) as caught:
            async with subscriber.subscribe("private-yes"):
                pass
        assert (caught.value.kind, caught.value.status) == ("AuthError", 401)


async def test_an_unknown_key_is_final(server):
    with pytest.raises(ConnectionRefused) as caught:
        async with Subscriber("unknown", host="127.0.0.1", port=server.port, ssl=False):
            pass
    assert caught.value.code == 4001


async def test_close_codes_decide_whether_it_comes_back(wait_until):
    async with (
        scripted([GREETING]) as (url, opened),
        Subscriber(url=url) as subscriber,
        subscriber.subscribe("a") as channel,
    ):
        for code in (WSCloseCode.GOING_AWAY, 4201):
            before = len(opened)
            channel.recovered = True
            await opened[-1].close(code=code)
            await wait_until(lambda before=before: len(opened) > before and not channel.recovered)
        await opened[-1].send_json({"event": "e", "channel": "a", "data": {"an": "object"}})
        assert (await anext(channel)).json() == {"an": "object"}
        await opened[-1].close(code=4009)
        with pytest.raises(ConnectionRefused):
            await anext(channel)
        with pytest.raises(ConnectionRefused):
            async with subscriber.subscribe("b"):
                pass
    for attempt in range(3):
        assert 1 <= reconnect_delay_s(4100, attempt) <= 1 + 2**attempt
        assert 0 <= reconnect_delay_s(4200, attempt) <= 2**attempt
    assert reconnect_delay_s(None, 1000) <= 30


async def test_what_is_no_pusher_server_is_named():
    async with scripted(["<html>"]) as (url, _):
        with pytest.raises(ProtocolError, match="frame that isn't Pusher's: <html>"):
            async with Subscriber(url=url):
                pass
    async with scripted([{"event": "welcome"}]) as (url, _):
        with pytest.raises(ProtocolError, match="greeting"):
            async with Subscriber(url=url):
                pass
        for wrong, status in ((url.replace("key:", "other:"), 404), (url.replace("/apps", "/other/apps"), 200)):
            with pytest.raises(ProtocolError, match=f"answered with {status}"):
                async with Subscriber(url=wrong):
                    pass
    with reserved_ports(1) as (port,), pytest.raises(Unreachable):
        async with Subscriber(url=f"http://key:secret@127.0.0.1:{port}/apps/1", timeout=0.2):
            pass


@pytest.mark.parametrize(
    "lie",
    [
        "[1, 2",
        {"event": 7},
        {"event": "pusher_internal:member_added", "channel": "a", "data": "{}"},
        {"event": "pusher_internal:member_added", "channel": "a", "data": "nonsense"},
        {"event": "pusher_internal:subscription_succeeded", "channel": "a", "data": {"presence": {"ids": 5}}},
    ],
)
async def test_a_lie_ends_the_reading_with_an_exception(lie):
    async with (
        scripted([GREETING]) as (url, opened),
        Subscriber(url=url) as subscriber,
        subscriber.subscribe("a") as channel,
    ):
        await opened[0].send_json({"event": "e", "channel": "a", "data": "before"})
        await (opened[0].send_str(lie) if isinstance(lie, str) else opened[0].send_json(lie))
        assert (await anext(channel)).data == "before"
        with pytest.raises(ProtocolError):
            await anext(channel)


async def test_names_that_only_look_like_the_servers_are_events(server):
    async with (
        Subscriber(url=url_of(server)) as subscriber,
        AsyncPublisher(url=url_of(server)) as publisher,
        subscriber.subscribe("looks") as channel,
    ):
        for name in ("pushers.moved", "pusher", "auth_required_by"):
            await publisher.trigger("looks", name, "no JSON")
        assert [event.name for event in await take(channel, 3)] == ["pushers.moved", "pusher", "auth_required_by"]


async def test_data_that_is_no_json_is_handed_out_as_it_is():
    async with (
        scripted([GREETING]) as (url, opened),
        Subscriber(url=url) as subscriber,
        subscriber.subscribe("a") as channel,
    ):
        for data in ("{not JSON", '{"n":1}'):
            await opened[0].send_json({"event": "e", "channel": "a", "data": data})
        first = await anext(channel)
        assert first.data == "{not JSON"
        with pytest.raises(ValueError, match="Expecting property name"):
            first.json()
        assert (await anext(channel)).json() == {"n": 1}


async def test_an_auth_endpoints_answer_may_come_in_pieces(server):
    backend = Publisher(url=url_of(server))

    async def auth(request):
        form = await request.post()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for character in json.dumps(backend.authenticate(form["channel_name"], form["socket_id"])):
            await response.write(character.encode())
        return response

    app = web.Application()
    app.router.add_post("/auth", auth)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/auth"
        async with (
            Subscriber(server.app_key, host="127.0.0.1", port=server.port, ssl=False, auth=url) as subscriber,
            subscriber.subscribe("private-pieces"),
        ):
            pass
    finally:
        await runner.cleanup()


async def test_an_auth_function_that_fails_is_called_again(monkeypatch):
    monkeypatch.setattr("redpoll_client.subscribing.reconnect_delay_s", lambda code, attempt: 0)
    faults = [OSError("away"), TimeoutError()]

    def auth(socket_id, channel):
        if faults:
            raise faults.pop(0)
        return {"auth": "key:x"} if channel == "private-a" else None

    async with scripted([GREETING]) as (url, _), Subscriber(url=url, auth=auth) as subscriber:
        async with subscriber.subscribe("private-a"):
            assert not faults
        with pytest.raises(SubscriptionRefused, match="returned no mapping"):
            async with subscriber.subscribe("private-b"):
                pass


async def test_a_close_code_instead_of_the_greeting_decides_the_wait(monkeypatch):
    codes = []
    monkeypatch.setattr("redpoll_client.subscriber.reconnect_delay_s", lambda code, attempt: codes.append(code) or 0)
    over = {"event": "pusher:error", "data": {"code": 4100, "message": "over capacity"}}
    async with scripted([over], [GREETING]) as (url, _), Subscriber(url=url):
        assert codes == [4100]


async def test_what_is_missing_stays_missing_after_a_later_recovery():
    channel = Subscriber("key", host="127.0.0.1").subscribe("a")
    states = []
    for offset, recovered in ((1, None), (2, True), (3, False), (4, True)):
        channel.succeeded({"epoch": "e", "offset": offset, "recovered": recovered})
        states.append(channel.recovered)
    assert states == [True, True, False, False]


async def test_a_subscription_begins_with_its_success_not_with_what_an_earlier_one_left():
    """The channel is left and joined again on one connection: what is on its way then comes once more."""

    def event(offset):
        return {"event": "n", "channel": "a", "data": str(offset), "offset": offset}

    first = [success("a", epoch="e", offset=4), event(5)]
    lost = {"event": "pusher:position", "channel": "a", "data": '{"epoch":"f","offset":0,"recovered":false}'}
    again = [event(8), lost, success("a", epoch="e", offset=5, recovered=True), *map(event, (6, 7, 8, 9))]
    rewound = [event(9), success("a", epoch="e", offset=7), event(8), event(9)]
    async with scripted([GREETING], answers=[first, again, rewound]) as (url, _), Subscriber(url=url) as subscriber:
        async with subscriber.subscribe("a") as channel:
            assert (await anext(channel)).offset == 5
        async with subscriber.subscribe("a", since=channel.position) as channel:
            assert [one.offset for one in await take(channel, 4)] == [6, 7, 8, 9]
            assert channel.recovered
        async with subscriber.subscribe("a", rewind={"count": 2}) as channel:
            assert [one.offset for one in await take(channel, 2)] == [8, 9]


async def test_a_subscribe_that_was_given_up_is_not_sent_once_it_is_signed():
    asked, signed, heard = asyncio.Event(), asyncio.Event(), []

    async def auth(socket_id, channel):
        asked.set()
        await signed.wait()
        return {"auth": "key:x"}

    async with scripted([GREETING], heard=heard) as (url, _), Subscriber(url=url, auth=auth) as subscriber:
        joining = asyncio.create_task(subscriber.subscribe("private-a").__aenter__())
        await asked.wait()
        joining.cancel()
        await asyncio.wait([joining])
        signed.set()
        async with subscriber.subscribe("private-b"), subscriber.subscribe("c"):
            assert heard == ["private-b", "c"]


async def test_a_users_channel_stays_subscribed_after_a_cut_when_the_sign_in_takes_longer(server):
    """The back end is asked for the sign-in again, and meanwhile other channels are subscribed to."""
    backend = Publisher(url=url_of(server))
    others = asyncio.Event()
    others.set()

    async def user_auth(socket_id):
        await others.wait()
        return backend.authenticate_user(socket_id, {"id": "dora"})

    with Proxy(("127.0.0.1", server.port)) as proxy:
        where = {"host": "127.0.0.1", "port": proxy.port, "ssl": False}
        async with Subscriber(server.app_key, **where, user_auth=user_auth) as subscriber:
            user = await subscriber.sign_in()
            others.clear()
            joined = "pusher:subscription_succeeded"
            async with (
                subscriber.subscribe(user.channel, lifecycle=True) as own,
                subscriber.subscribe("plain", lifecycle=True) as plain,
                AsyncPublisher(url=url_of(server)) as publisher,
            ):
                for channel in (own, plain):
                    await until(channel, joined)
                proxy.cut()
                await until(plain, joined)
                others.set()
                await until(own, joined)
                await publisher.send_to_user("dora", "hello", "1")
                await until(own, "hello")


async def test_a_sign_in_that_is_refused_after_a_reconnect_is_said(server):
    # Revocations stay.
    jtis = [secrets.token_hex(8), secrets.token_hex(8)]
    where = {"host": "127.0.0.1", "port": server.port, "ssl": False}

    def user_auth(socket_id):
        grant = mint_grant(server.app_key, server.app_secret, ["a"], user_id="emil", jti=jtis[0])
        return {"auth": grant, "user_data": '{"id":"emil"}'}

    async with (
        Subscriber(server.app_key, **where, user_auth=user_auth) as subscriber,
        AsyncPublisher(url=url_of(server)) as publisher,
    ):
        user = await subscriber.sign_in()
        await publisher.revoke_grants(jti=jtis[0])
        async with asyncio.timeout(60):
            with pytest.raises(SignInRefused, match="revoked"):
                await anext(user)
        jtis.pop(0)
        assert (await subscriber.sign_in()).id == "emil"


async def test_a_proxys_answer_while_the_server_is_away_is_not_final(monkeypatch):
    """As of an ingress that has no route during a deployment."""
    monkeypatch.setattr("redpoll_client.subscriber.reconnect_delay_s", lambda code, attempt: 0)
    left, back = iter([404, 403]), asyncio.Event()

    async def serve(request):
        if opened and (status := next(left, None)) is not None:
            return web.Response(status=status)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        opened.append(socket)
        await socket.send_json(GREETING)
        if len(opened) == 2:
            back.set()
        async for _ in socket:
            pass
        return socket

    opened = []
    app = web.Application()
    app.router.add_get("/app/key", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Subscriber("key", host="127.0.0.1", port=runner.addresses[0][1], ssl=False) as subscriber:
            await opened[0].close()
            await asyncio.wait_for(back.wait(), 60)
            assert subscriber.state is not State.ENDED
    finally:
        await runner.cleanup()


async def test_an_error_handler_that_fails_ends_nothing(caplog):
    def on_error(code, text):
        raise KeyError(code)

    said = {"event": "pusher:error", "data": {"code": 4301, "message": "too fast"}}
    async with (
        scripted([GREETING]) as (url, opened),
        Subscriber(url=url, on_error=on_error) as subscriber,
        subscriber.subscribe("a") as channel,
    ):
        await opened[0].send_json(said)
        await opened[0].send_json({"event": "e", "channel": "a", "data": "1"})
        assert (await anext(channel)).data == "1"
    assert "on_error failed" in caplog.text


async def test_an_encrypted_channel_without_pynacl_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nacl.secret", None)
    with pytest.raises(ImportError, match="redpoll-client\\[encrypted\\]"):
        Subscriber("key", host="127.0.0.1").subscribe("private-encrypted-a")


async def test_a_user_or_member_that_is_no_json_is_said_at_once():
    wrong = {"id": "1", "user_id": "1", "user_info": {"at": {1, 2}}}
    async with scripted([GREETING]) as (url, _), Subscriber(url=url, member=wrong, timeout=60) as subscriber:
        with pytest.raises(TypeError, match="set"):
            await subscriber.sign_in(wrong)
        with pytest.raises(SubscriptionRefused, match="set"):
            await subscriber.subscribe("presence-a").__aenter__()
