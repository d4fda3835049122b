"""Both publishers at a real redpoll, and at servers that fail in each way that a publish can fail."""

import asyncio
import base64
import json
import os
import pickle
import ssl
import subprocess
import sys

import pytest

from helpers import certs
from helpers.answering import CUT, HALF, SILENCE, Answering, Trickle, reply
from helpers.ports import reserved_ports
from helpers.wire import Socket, eventually
from redpoll_client import (
    BadRequest,
    Forbidden,
    NotFound,
    Overflow,
    Publisher,
    RateLimited,
    Subscriber,
    SubscriptionRefused,
    TooLarge,
    Unauthorized,
    Unavailable,
    Unconfirmed,
    Unreachable,
    sign_channel,
    sign_user,
)
from redpoll_client.encryption import channel_key, decrypt

from .conftest import url_of

HTML = reply(502, "<html><title>Bad gateway</title><body>nginx</body></html>", {"Content-Type": "text/html"})


async def test_subscribers_get_what_is_published(server, opened):
    async with opened(url=url_of(server)) as call:
        first, second = await Socket.connect(server), await Socket.connect(server)
        for one in (first, second):
            await one.subscribe("private-a")
        answer = await call(
            "trigger", "private-a", "hello", {"text": "Grüße"}, second.socket_id, info=["subscription_count"]
        )
        assert answer == {"channels": {"private-a": {"subscription_count": 2}}}
        assert json.loads((await first.next("hello"))["data"]) == {"text": "Grüße"}
        await call("trigger", ["private-a", "b"], "last", "text as it is")
        await second.next("last")
        assert second.all("hello") == []
        # The event log is written a moment after the answer.
        await eventually(lambda: traced(call, answer.trace_id), True)
        await first.close()
        await second.close()


async def traced(call, trace_id):
    try:
        return (await call("trace", trace_id))["trace_id"] == trace_id
    except NotFound:
        return False


async def test_a_long_batch_is_sent_in_parts_and_in_order(server, opened):
    async with opened(url=url_of(server)) as call:
        reader = await Socket.connect(server)
        await reader.subscribe("batch")
        items = [{"channel": "batch", "name": "n", "data": number} for number in range(25)]
        items[13]["info"] = "subscription_count"
        answer = await call("trigger_batch", items)
        assert answer["batch"][13] == {"subscription_count": 1}
        assert len(answer["batch"]) == 25
        assert [(await reader.next("n"))["data"] for _ in range(25)] == [str(number) for number in range(25)]
        assert await call("trigger_batch", []) == {}
        await reader.close()


async def test_it_asks_about_channels_users_and_histories(server, opened):
    async with opened(url=url_of(server)) as call:
        member = await Socket.connect(server)
        await member.subscribe("presence-room", "7", {"name": "A"})
        assert (await call("users_info", "presence-room"))["users"] == [{"id": "7"}]
        listed = await call("channels_info", "presence-", ["user_count"])
        assert listed["channels"]["presence-room"] == {"user_count": 1}
        assert (await call("channel_info", "presence-room", ["user_count"]))["occupied"] is True
        signed_in = await Socket.connect(server)
        signed_in.send({"event": "pusher:signin", "data": sign_user_of(server, signed_in.socket_id)})
        await signed_in.next("pusher:signin_success")
        await call("terminate_user_connections", "u1")
        assert await signed_in.until_closed() == 4009
        before = len((await call("history", "kept-a")).messages)
        for number in range(3):
            await call("trigger", "kept-a", "n", str(number))
        page = await call("history", "kept-a", limit=2, direction="backwards")
        assert [message.data for message in page.messages] == ["2", "1"]
        assert len((await call("history", "kept-a")).messages) == before + 3
        assert "days" in await call("usage", 1)
        await member.close()


def sign_user_of(server, socket_id):
    return Publisher(url=url_of(server)).authenticate_user(socket_id, {"id": "u1"})


async def test_encrypted_channels_carry_ciphertext(server, opened):
    master = bytes(range(32))
    options = {"encryption_master_key_base64": base64.b64encode(master).decode()}
    async with opened(url=url_of(server), **options) as call:
        reader = await Socket.connect(server)
        await reader.subscribe("private-encrypted-a")
        await call("trigger", "private-encrypted-a", "secret", {"a": 1})
        data = (await reader.next("secret"))["data"]
        assert json.loads(decrypt(data, channel_key("private-encrypted-a", master))) == {"a": 1}
        with pytest.raises(ValueError, match="publish to it alone"):
            await call("trigger", ["private-encrypted-a", "b"], "secret", {})
        await reader.close()


async def test_what_the_server_would_refuse_is_never_sent(opened):
    with Answering(reply(200)) as away:
        async with opened(url=away.url) as call:
            for arguments in (
                ("with space", "e", ""),
                (["a"] * 101, "e", ""),
                ([], "e", ""),
                ("a", "pusher:x", ""),
                ("a", "e" * 201, ""),
                ("a", "e", "x" * 10_241),
                ("a", "e", float("nan")),
                ("a", "e", "", "not-a-socket"),
                ("private-encrypted-a", "e", ""),
            ):
                with pytest.raises(ValueError, match=r"."):
                    await call("trigger", *arguments)
            with pytest.raises(ValueError, match=r"batch\[1\]"):
                await call("trigger_batch", [{"channel": "a", "name": "e", "data": ""}, {"channel": "a", "name": ""}])
            with pytest.raises(ValueError, match="correlation_id"):
                await call("trigger", "a", "e", "", correlation_id="ü")
            with pytest.raises(ValueError, match="no presence channel"):
                await call("users_info", "a")
        assert away.asked == []
        with pytest.raises(RuntimeError, match="closed"):
            await call("trigger", "a", "e", "")


async def test_an_empty_socket_id_excludes_no_connection(opened):
    with Answering(reply(200)) as server:
        async with opened(url=server.url) as call:
            await call("trigger", "a", "e", "", "")
            await call("trigger_batch", [{"channel": "a", "name": "e", "data": "", "socket_id": ""}])
    trigger, batch = (asked.json for asked in server.asked)
    assert "socket_id" not in trigger
    assert "socket_id" not in batch["batch"][0]


async def test_connections_of_every_user_who_can_sign_in_are_terminated(server, opened):
    async with opened(url=url_of(server)) as call:
        for user_id in ("auth0|7", "a user/ü?%", "7"):
            client = await Socket.connect(server)
            user = sign_user(server.app_key, server.app_secret, client.socket_id, {"id": user_id})
            client.send({"event": "pusher:signin", "data": user})
            await client.next("pusher:signin_success")
            await call("terminate_user_connections", user_id)
            assert await client.until_closed() == 4009
        for wrong in ("", "x" * 129, 7):
            with pytest.raises(ValueError, match="1 to 128 characters"):
                await call("terminate_user_connections", wrong)


async def test_server_away_is_unreachable(opened):
    with reserved_ports(1) as (port,):
        async with opened(url=f"http://key:secret@127.0.0.1:{port}/apps/1", attempts=2) as call:
            with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
                await call("trigger", "a", "e", "")


@pytest.mark.parametrize("answer", [CUT, HALF, SILENCE, HTML], ids=["cut", "half", "silence", "html"])
async def test_a_publish_without_an_answer_is_sent_once(opened, answer):
    with Answering(answer) as bad:
        async with opened(url=bad.url, timeout=5 if answer == SILENCE else 60) as call:
            with pytest.raises(Unconfirmed) as caught:
                await call("trigger", "a", "e", "", correlation_id="order-7")
            assert caught.value.correlation_id == "order-7"
            await asyncio.to_thread(bad.came.wait, 60)
            assert [asked.json["correlation_id"] for asked in bad.asked] == ["order-7"]
            if answer == HTML:
                assert "502: HTML page: Bad gateway nginx" in str(caught.value)


async def test_an_answer_that_comes_byte_by_byte_ends_with_the_call(opened):
    async def ends(where: str, start: bytes) -> None:
        with Answering(Trickle(start)) as bad:
            # Each byte comes in time; the whole answer doesn't. Nor is there time for a repeat.
            async with opened(url=bad.url, timeout=60, total_timeout=5, idempotency=True) as call:
                assert isinstance(await caught(call("trigger", "a", "e", "")), Unconfirmed), where
            await asyncio.to_thread(bad.came.wait, 60)
        assert len(bad.asked) == 1, where

    start = b"HTTP/1.1 200 OK\r\n"
    # At once, because each takes the whole time of its call.
    await asyncio.gather(
        ends("in the head", start + b"X-Head: "),
        ends("in the body", start + b"Content-Length: 100000\r\n\r\n"),
        ends("in a body without a length", start + b"\r\n"),
    )


async def test_a_call_ends_while_all_connections_are_busy(opened):
    options = {"timeout": 60, "total_timeout": 5, "connections": 1}
    with Answering(SILENCE) as bad:
        async with opened(url=bad.url, **options) as call, asyncio.TaskGroup() as group:
            first = group.create_task(caught(call("trigger", "a", "e", "")))
            await asyncio.to_thread(bad.came.wait, 60)
            second = group.create_task(caught(call("trigger", "a", "e", "")))
    assert isinstance(first.result(), Unconfirmed)
    # It may have got the connection of the first one in its last moments.
    assert isinstance(second.result(), Unreachable | Unconfirmed)


async def caught(call):
    try:
        return await call
    except Exception as error:
        return error


async def test_a_publish_is_repeated_with_its_id_where_the_server_compares_ids(opened):
    unavailable = reply(503, {"error": "Redis doesn't answer", "code": "unavailable"}, {"Retry-After": "0"})
    with Answering(CUT, unavailable, HALF, reply(200)) as bad:
        async with opened(url=bad.url, idempotency=True) as call:
            answer = await call("trigger", "a", "e", "")
        assert [asked.body for asked in bad.asked] == [bad.asked[0].body] * 4
        assert bad.asked[0].json["correlation_id"] == answer.correlation_id


async def test_a_repeat_that_is_refused_leaves_the_first_unconfirmed(opened):
    with Answering(CUT, reply(429, {"error": "too many"})) as bad:
        async with opened(url=bad.url, idempotency=True) as call:
            with pytest.raises(Unconfirmed, match="429: too many"):
                await call("trigger", "a", "e", "")


async def test_idempotent_repeats_arrive_once_at_redpoll(server, opened):
    async with opened(url=url_of(server), idempotency=True) as call:
        reader = await Socket.connect(server)
        await reader.subscribe("once")
        for data in ("1", "1", "2"):
            await call("trigger", "once", "e", data, correlation_id=f"{os.getpid()}-{id(opened)}-{data}")
        assert [(await reader.next("e"))["data"] for _ in range(2)] == ["1", "2"]
        await reader.close()


async def test_a_repeat_to_an_encrypted_channel_is_the_same_request(opened):
    channel, master = "private-encrypted-a", bytes(range(32))
    options = {"encryption_master_key_base64": base64.b64encode(master).decode()}
    items = [{"channel": channel, "name": "e", "data": "yes"}] * 2
    with Answering(HTML) as bad:
        async with opened(url=bad.url, **options) as call:
            for method, *arguments in (("trigger", channel, "e", "yes"), ("trigger_batch", items)):
                with pytest.raises(Unconfirmed) as caught:
                    await call(method, *arguments)
                for repeat in (caught.value.correlation_id, None):
                    with pytest.raises(Unconfirmed):
                        await call(method, *arguments, correlation_id=repeat)
    first, repeated, another, *batches = [asked.body for asked in bad.asked]
    assert first == repeated
    assert batches[0] == batches[1]
    # Equal texts look different, except in a repeat.
    single = [json.loads(body)["data"] for body in (first, another)]
    in_batches = [item["data"] for body in batches[1:] for item in json.loads(body)["batch"]]
    assert len({*single, *in_batches}) == 6
    assert {decrypt(data, channel_key(channel, master)) for data in single + in_batches} == {"yes"}


async def test_a_long_batch_is_repeated_with_the_id_of_its_error(server, opened):
    """As if the answer to the second part had been lost: the first part isn't published again."""
    items = [{"channel": "parts", "name": "e", "data": number} for number in range(23)]
    with Answering(reply(200), CUT) as bad:
        async with opened(url=bad.url) as call:
            with pytest.raises(Unconfirmed) as caught:
                await call("trigger_batch", items)
    reader = await Socket.connect(server)
    await reader.subscribe("parts")
    async with opened(url=url_of(server)) as call:
        # The two parts that were sent reach redpoll.
        for asked in bad.asked:
            part = asked.json
            await call("trigger_batch", part["batch"], True, correlation_id=part["correlation_id"])
        answer = await call("trigger_batch", items, correlation_id=caught.value.correlation_id)
        assert answer.correlation_id == caught.value.correlation_id
        await call("trigger", "parts", "last", "")
    await reader.next("last")
    assert [event["data"] for event in reader.all("e")] == [str(number) for number in range(23)]
    await reader.close()


async def test_requests_that_only_read_are_repeated(opened):
    with Answering(CUT, HTML, HALF, reply(200, {"channels": {}})) as bad:
        async with opened(url=bad.url) as call:
            assert await call("channels_info") == {"channels": {}}
            assert len(bad.asked) == 4
            bad.answers = [HTML]
            with pytest.raises(Unavailable, match="Bad gateway"):
                await call("channels_info")


@pytest.mark.parametrize(
    ("name", "words", "named"),
    [
        ("delete_history", ["chat-7"], {}),
        ("terminate_user_connections", ["7"], {}),
        ("unsubscribe", ["private-a"], {"socket_id": "1.2"}),
        ("revoke_grants", [], {"jti": "g"}),
    ],
)
async def test_what_may_meet_something_newer_is_sent_once(opened, name, words, named):
    """A repeat of a deletion would delete what was published after the first one."""
    with Answering(CUT, reply(200)) as bad:
        async with opened(url=bad.url, idempotency=True) as call:
            with pytest.raises(Unavailable) as caught:
                await call(name, *words, **named)
        assert type(caught.value) is Unavailable
        assert len(bad.asked) == 1


@pytest.mark.parametrize(
    "error",
    [
        RateLimited(429, "slow down", retry_after=3.0),
        Unauthorized(401, 'HmacSHA256Hex("POST")'),
        Unconfirmed("maybe", "order-7"),
        SubscriptionRefused("a", "no", "AuthError", 403),
        Overflow("a", 10),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error):
    error.published = 10
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), back.args, vars(back)) == (type(error), error.args, vars(error))


async def test_another_kind_of_server_is_named(opened):
    page = reply(200, "<html>Welcome!</html>", {"Content-Type": "text/html"})
    with Answering(page) as other:
        async with opened(url=other.url, idempotency=True) as call:
            with pytest.raises(Unconfirmed, match="is this the address of a Pusher-compatible server"):
                await call("trigger", "a", "e", "")
            assert len(other.asked) == 1
            other.answers = [reply(404, "<html>Not here</html>", {"Content-Type": "text/html"})]
            with pytest.raises(NotFound, match="404: HTML page: Not here"):
                await call("trigger", "a", "e", "")
            other.answers = [reply(301, "", {"Location": "https://else.example/"})]
            with pytest.raises(Exception, match=r"redirects to https://else\.example"):
                await call("trigger", "a", "e", "")


async def test_refusals_are_classes_with_the_servers_text(opened):
    with Answering(reply(200)) as server:
        async with opened(url=server.url, idempotency=True) as call:
            for status, kind in ((400, BadRequest), (403, Forbidden), (409, BadRequest), (413, TooLarge)):
                server.answers = [
                    reply(status, {"error": "why", "code": "c", "status": status}, {"X-Service-Trace-Id": "t"})
                ]
                with pytest.raises(kind, match=f"{status}: why") as caught:
                    await call("trigger", "a", "e", "")
                assert (caught.value.code, caught.value.trace_id) == ("c", "t")
            server.answers = [reply(429, "slow down", {"Retry-After": "17"})]
            with pytest.raises(RateLimited, match="slow down") as limited:
                await call("trigger", "a", "e", "")
            assert limited.value.retry_after == 17
        assert len(server.asked) == 5


async def test_wrong_secret_shows_what_was_signed(server, opened):
    async with opened(url=url_of(server).replace(server.app_secret, "wrong")) as call:
        with pytest.raises(Unauthorized) as caught:
            await call("trigger", "a", "e", "")
    assert caught.value.signed.startswith(f"POST\n/apps/{server.app_id}/events\nauth_key={server.app_key}&")
    assert "wrong" not in str(caught.value)


async def test_a_failed_part_of_a_batch_says_how_much_is_published(opened):
    with Answering(reply(200), reply(200), reply(413, {"error": "too large"})) as server:
        async with opened(url=server.url) as call:
            items = [{"channel": "a", "name": "e", "data": ""}] * 23
            with pytest.raises(TooLarge) as caught:
                await call("trigger_batch", items, correlation_id="b")
    assert caught.value.published == 20
    assert [asked.json["correlation_id"] for asked in server.asked] == ["b-1", "b-2", "b-3"]


async def test_certificates_are_verified(opened, tmp_path):
    pair = certs.self_signed(tmp_path)
    with Answering(reply(200), certificate=pair) as server:
        async with opened(url=server.url) as call:
            with pytest.raises(Unreachable, match=r"(?i)certificate verify failed"):
                await call("trigger", "a", "e", "")
        # A certificate doesn't become valid by itself.
        assert (server.connections, server.asked) == (1, [])
        async with opened(url=server.url, ssl_context=ssl.create_default_context(cafile=str(pair[0]))) as call:
            await call("trigger", "a", "e", "")
        async with opened(url=server.url.replace("https:", "http:"), timeout=60) as call:
            with pytest.raises(Unconfirmed):
                await call("trigger", "a", "e", "")
    with Answering(reply(200)) as plain:
        async with opened(url=plain.url.replace("http:", "https:")) as call:
            with pytest.raises(Unreachable):
                await call("trigger", "a", "e", "")


class Restarting(Answering):
    """Closes the first connection in its TLS handshake."""

    def finish_request(self, request, client_address):
        with self.lock:
            self.connections += 1
            is_first = self.connections == 1
        if is_first:
            request.recv(65_536)
        else:
            super().finish_request(request, client_address)


async def test_a_handshake_that_the_server_cuts_is_tried_again(opened, tmp_path):
    pair = certs.self_signed(tmp_path)
    with Restarting(reply(200), certificate=pair) as server:
        context = ssl.create_default_context(cafile=str(pair[0]))
        async with opened(url=server.url, ssl_context=context, timeout=60) as call:
            await call("trigger", "a", "e", "")
        assert len(server.asked) == 1


async def test_connections_are_used_again(opened, monkeypatch):
    for module in ("publisher", "async_publisher"):
        monkeypatch.setattr(f"redpoll_client.{module}.IDLE_S", 600.0)
    with Answering(reply(200)) as server:
        async with opened(url=server.url) as call:
            for _ in range(3):
                await call("trigger", "a", "e", "")
        assert server.connections == 1


def test_a_fork_opens_connections_of_its_own(server):
    """Parent and child publish over what was one publisher; neither reads the other's answers."""
    program = """
import os, sys
from redpoll_client import Publisher
publisher = Publisher(url=sys.argv[1])
publisher.trigger("fork", "e", "")
child = os.fork()
for number in range(20):
    assert publisher.channel_info("fork" if child else "presence-fork").keys() >= {"occupied"}
    assert ("user_count" in publisher.channel_info("fork" if child else "presence-fork")) == (not child)
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", program, url_of(server)], check=True, env=environment, timeout=120)


def test_arguments_and_urls(monkeypatch):
    monkeypatch.delenv("REDPOLL_URL", raising=False)
    monkeypatch.setenv("PUSHER_URL", "https://k:s@example.com/apps/7")
    end = Publisher().endpoint
    assert (end.app_id, end.key, end.secret, end.ssl, end.host, end.port) == ("7", "k", "s", True, "example.com", 443)
    monkeypatch.setenv("REDPOLL_URL", "http://k:s@[::1]:6001/realtime/apps/app-1")
    assert (Publisher().endpoint.origin, Publisher().endpoint.prefix) == ("http://[::1]:6001", "/realtime")
    assert Publisher.from_env().endpoint.app_id == "7"
    for host in ("::1", "[::1]"):
        assert Publisher("1", "k", "s", ssl=False, host=host, port=6001).endpoint.origin == "http://[::1]:6001"
    assert Publisher("1", "k", "s", cluster="eu").endpoint.origin == "https://api-eu.pusher.com:443"
    for wrong in ("http://k:s@h:6001", "ftp://k:s@h/apps/1", "http://h/apps/1", "http://k:s@h:99999/apps/1"):
        with pytest.raises(ValueError, match="url is not like") as caught:
            Publisher(url=wrong)
        assert "k:s" not in str(caught.value)
    with pytest.raises(ValueError, match="secret must be"):
        Publisher("1", "k", "", host="h")
    for wrong in ("http://h", "[[::1]]", "[::1]:6001"):
        with pytest.raises(ValueError, match="host"):
            Publisher("1", "k", "s", host=wrong)
    assert "'s'" not in repr(end)


def test_arguments_that_would_be_ignored_are_refused(monkeypatch):
    url = "http://k:s@example.com/apps/7"
    for given in ({"prefix": "/realtime"}, {"host": "h"}, {"port": 1}, {"ssl": False}, {"cluster": "eu"}, {"key": "k"}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} can't be given together with url"):
            Publisher(url=url, **given)
    monkeypatch.setenv("REDPOLL_URL", url)
    with pytest.raises(ValueError, match="host, port can't be given together with REDPOLL_URL"):
        Publisher(host="h", port=1)
    for given in ({"url": url, "host": "h"}, {"key": "k", "host": "h", "url": url}, {"key": "k"}):
        with pytest.raises(ValueError, match="url"):
            Subscriber(**given)


def test_it_signs_as_pushers_library_does():
    pusher = pytest.importorskip("pusher")
    options = {
        "app_id": "1",
        "key": "k",
        "secret": "s",
        "encryption_master_key_base64": base64.b64encode(bytes(32)).decode(),
    }
    ours, theirs = Publisher(**options), pusher.Pusher(**options)
    assert ours.authenticate("private-a", "1.2") == theirs.authenticate("private-a", "1.2")
    assert ours.authenticate("private-a", "1.2", {}) == theirs.authenticate("private-a", "1.2", {})
    encrypted = theirs.authenticate("private-encrypted-a", "1.2")
    encrypted["shared_secret"] = encrypted["shared_secret"].decode()
    assert ours.authenticate("private-encrypted-a", "1.2") == encrypted
    member = {"user_id": "7", "user_info": {"name": "Grün"}}
    answer = ours.authenticate("presence-a", "1.2", member)
    assert json.loads(answer["channel_data"]) == member
    assert answer == sign_channel("k", "s", "1.2", "presence-a", answer["channel_data"])
    body = json.dumps({"time_ms": 1, "events": []})
    assert ours.validate_webhook("k", "0" * 64, body) is None
