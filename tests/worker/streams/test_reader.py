"""Clients that read a channel over HTTP from a whole server."""

import asyncio
import contextlib
import http.client
import json
import time
from types import SimpleNamespace

import pytest

from helpers.granting import mint
from helpers.leading import command
from helpers.reading import EVENTS, Reading, Stream, keep, read_token
from helpers.server import Server
from helpers.wire import Api, connect_patiently
from redpoll.http.reader import ParsedRequest
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.errors import ApiError
from redpoll.protocol.streams import Live
from redpoll.worker.hub.admission import Admission
from redpoll.worker.streams.asked import READ_FIELDS, asked_of
from redpoll.worker.streams.reader import Reader, ReaderState

REVOKED = "access was revoked"
CHANNELS = iter(f"kept-{n}" for n in range(10_000))


@pytest.fixture(scope="module")
def server():
    """Two workers; the app keeps 1,000 messages of `kept-…`, and 2 of `short-…`."""
    with Server(workers=2) as running:
        keep(running, "kept-")
        keep(running, "short-", keep=2)
        for prefix in ("private-encrypted-kept-", "private-kept-", "presence-kept-"):
            keep(running, prefix)
        command(running, "app", "set", running.app_id, "grants=true")
        running.token = read_token(running)
        until_readable(running, running.app_id, by_grant(running, "kept-0"))
        yield running


def until_readable(server: Server, app_id: str, headers: dict[str, str]) -> None:
    """Waits until the workers know the app as control does: 20 requests, each on a connection of its own, so by any
    worker, are answered."""
    answered = 0
    while answered < 20:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", f"/apps/{app_id}/channels/kept-0/stream", headers=headers)
        answered = answered + 1 if connection.getresponse().status == 200 else 0
        connection.close()


@pytest.fixture
async def api(server):
    async with Api(server) as opened:
        yield opened


@pytest.fixture
async def reading(server):
    async with Reading(server, server.token) as opened:
        yield opened


@pytest.fixture
def channel() -> str:
    return next(CHANNELS)


async def publish(api, channel: str, *data: str, **more) -> None:
    for each in data:
        await api.publish(channel, "n", each, **more)


async def test_catch_up_has_what_is_stored_and_where_it_goes_on(reading, api, channel):
    await publish(api, channel, "1", "2")
    first = await reading.ask(channel)
    assert [(message["event"], message["data"]) for message in first.body] == [("n", "1"), ("n", "2")]
    assert first.headers["Stream-Up-To-Date"] == "true"
    assert "Stream-Closed" not in first.headers
    # As the history of the API has them.
    assert first.body == (await api.get(f"/channels/{channel}/history"))["messages"]
    assert (await reading.ask(channel, offset="-1")).body == first.body
    await publish(api, channel, "3")
    rest = await reading.ask(channel, offset=first.next)
    assert rest.data == ["3"]
    assert rest.next > first.next
    assert (await reading.ask(channel, offset=rest.next)).body == []


async def test_long_history_comes_in_several_answers(reading, api, channel):
    sizes = [str(n) * 9_000 for n in range(9)]
    for _ in range(8):
        await publish(api, channel, *sizes)
    found, offset, answers = [], "-1", 0
    while True:
        answer = await reading.ask(channel, offset=offset)
        found += answer.data
        answers += 1
        offset = answer.next
        if "Stream-Up-To-Date" in answer.headers:
            break
    assert found == sizes * 8
    assert answers > 1


async def test_empty_history_has_a_position_from_which_nothing_is_missed(reading, api, channel):
    empty = await reading.ask(channel)
    assert (empty.status, empty.body) == (200, [])
    assert (await reading.ask(channel, "HEAD")).next == empty.next
    await publish(api, channel, "1")
    assert (await reading.ask(channel, offset=empty.next)).data == ["1"]


async def test_history_without_a_message_does_not_expire_while_clients_come_again(server, reading, channel):
    empty = await reading.ask(channel)
    with server.redis() as redis:
        (key,) = [key for key in redis.keys("*:hm:*") if key.endswith(channel.encode())]
        for live in ({}, {"live": "long-poll"}):
            redis.expire(key, 100)
            poll = asyncio.create_task(reading.ask(channel, offset=empty.next, **live))
            async with asyncio.timeout(60):
                while redis.ttl(key) <= 100:
                    await asyncio.sleep(0.01)
            poll.cancel()


async def test_head_and_now_name_the_end(reading, api, channel):
    await publish(api, channel, "1")
    end = (await reading.ask(channel)).next
    head = await reading.ask(channel, "HEAD")
    assert (head.status, head.body, head.next) == (200, None, end)
    now = await reading.ask(channel, offset="now")
    assert (now.body, now.next, "ETag" in now.headers) == ([], end, False)


async def test_known_answer_is_304_until_something_changes(reading, api, channel):
    await publish(api, channel, "1")
    tag = {"If-None-Match": (await reading.ask(channel)).headers["ETag"]}
    known = await reading.ask(channel, headers=tag)
    assert (known.status, known.body) == (304, None)
    await publish(api, channel, "2", end=True)
    changed = await reading.ask(channel, headers=tag)
    assert (changed.status, changed.headers["Stream-Closed"]) == (200, "true")


async def test_position_that_is_no_longer_stored_is_410(reading, api):
    await publish(api, "short-1", "1")
    first = await reading.ask("short-1")
    await publish(api, "short-1", "2", "3")
    assert (await reading.ask("short-1", offset=first.next)).data == ["2", "3"]
    await publish(api, "short-1", "4")
    gone = await reading.ask("short-1", offset=first.next)
    assert (gone.status, gone.body["code"]) == (410, "offset_gone")
    assert gone.body["trace_id"] == gone.headers["X-Service-Trace-Id"]
    # From the beginning it is what is stored.
    assert (await reading.ask("short-1")).data == ["3", "4"]


async def test_position_of_a_cleared_history_is_410(reading, api, channel):
    await publish(api, channel, "1")
    before = await reading.ask(channel)
    assert (await api.ask("DELETE", f"/channels/{channel}/history"))[0] == 200
    for live in ({}, {"live": "long-poll"}, {"live": "sse"}):
        assert (await reading.ask(channel, offset=before.next, **live)).status == 410
    assert (await reading.ask(channel, headers={**EVENTS, "Last-Event-ID": before.next})).status == 410
    assert (await reading.ask(channel)).body == []


async def test_streams_end_when_the_history_is_cleared(reading, api, channel):
    await publish(api, channel, "1")
    async with reading.stream(channel, offset="-1") as stream:
        assert [message["data"] for message in await stream.messages(1)] == ["1"]
        assert (await api.ask("DELETE", f"/channels/{channel}/history"))[0] == 200
        assert await stream.rest() == []


async def poll(reading, channel, offset):
    """The answer to long polls; one that nothing comes for ends after 15 s, and another follows. So it does after a
    503, such as one by a worker that doesn't know the app any more when control lets the request through."""
    while (answer := await reading.ask(channel, offset=offset, live="long-poll")).status in (204, 503):
        offset = answer.next if answer.status == 204 else offset
    return answer


async def test_long_poll_waits_for_the_next_message(reading, api, channel):
    await publish(api, channel, "1")
    assert (await reading.ask(channel, offset="-1", live="long-poll")).data == ["1"]
    end = (await reading.ask(channel)).next
    polls = [asyncio.create_task(poll(reading, channel, end)) for _ in range(3)]
    await publish(api, channel, "2")
    answers = await asyncio.gather(*polls)
    assert [answer.data for answer in answers] == [["2"]] * 3
    assert all(answer.headers["Stream-Cursor"].isdecimal() for answer in answers)
    # The next one begins there.
    assert (await reading.ask(channel, offset=answers[0].next)).body == []


async def test_stream_goes_from_stored_to_live_messages(reading, api, channel):
    await publish(api, channel, "1", "2")
    async with reading.stream(channel, offset="-1") as stream:
        assert [message["data"] for message in await stream.messages(2)] == ["1", "2"]
        await publish(api, channel, "3")
        assert [message["data"] for message in await stream.messages(1)] == ["3"]
        assert stream.response.headers["Content-Type"] == "text/event-stream"


async def test_stream_from_now_on_begins_with_its_position(reading, api, channel):
    await publish(api, channel, "1")
    async with reading.stream(channel, offset="now") as stream:
        first = await stream.next()
        assert first.name == "control"
        assert first.json["upToDate"] is True
        assert first.json["streamNextOffset"] == (await reading.ask(channel, "HEAD")).next
        await publish(api, channel, "2")
        assert [message["data"] for message in await stream.messages(1)] == ["2"]


async def test_stream_of_data_alone(reading, api, channel):
    await publish(api, channel, '{"a": 1}', "text")
    assert (await reading.ask(channel, only="data")).body == [{"a": 1}, "text"]
    async with reading.stream(channel, offset="-1", only="data") as stream:
        assert await stream.messages(2) == [{"a": 1}, "text"]


async def test_event_source_gets_names_data_and_ids(reading, api, channel):
    await api.publish(channel, "first", "one\ntwo")
    async with reading.stream(channel, headers=EVENTS) as stream:
        event = await stream.next()
        assert (event.name, event.data) == ("first", "one\ntwo")
        await api.publish(channel, "second", "2")
        await api.publish(channel, "third", "3")
        second = await stream.next()
        assert (second.name, (await stream.next()).name) == ("second", "third")
    async with reading.stream(channel, headers={**EVENTS, "Last-Event-ID": second.id}, offset="now") as stream:
        assert (await stream.next()).name == "third"


async def test_event_source_from_now_on_continues_where_it_was_before_its_first_event(reading, api, channel):
    await publish(api, channel, "before")
    async with reading.request(channel, headers=EVENTS, offset="now") as response:
        lines = [await asyncio.wait_for(response.content.readline(), 60) for _ in range(4)]
    # An event without data is none to the page.
    assert [line.partition(b":")[0] for line in lines] == [b"retry", b"\n", b"id", b"\n"]
    last_id = lines[2].decode().removeprefix("id: ").strip()
    await publish(api, channel, "missed")
    async with reading.stream(channel, headers={**EVENTS, "Last-Event-ID": last_id}, offset="now") as stream:
        assert (await stream.next()).data == "missed"


async def test_end_is_told_to_all_readers_and_refuses_further_events(reading, api, channel):
    await publish(api, channel, "1")
    position = (await reading.ask(channel)).next
    async with (
        reading.stream(channel, offset="-1") as live,
        reading.stream(channel, headers=EVENTS) as source,
    ):
        await live.messages(1)
        await source.next()
        await publish(api, channel, "2", end=True)
        *_, last = await live.rest()
        assert last.json["streamClosed"] is True
        assert "streamCursor" not in last.json
        event, end = await source.rest()
        assert (event.data, end.name) == ("2", "pusher:end")
    status, body = await api.ask("POST", "/events", {"name": "n", "channels": [channel], "data": "3"})
    assert (status, body["code"]) == (409, "channel_ended")
    closed = await reading.ask(channel, offset=position)
    assert (closed.data, closed.headers["Stream-Closed"]) == (["2"], "true")
    poll = await reading.ask(channel, offset=closed.next, live="long-poll")
    assert (poll.status, poll.headers["Stream-Closed"]) == (204, "true")
    # An EventSource that reconnects stays away then.
    again = await reading.ask(channel, headers={**EVENTS, "Last-Event-ID": closed.next})
    assert (again.status, again.headers["Stream-Closed"]) == (204, "true")
    assert (await api.ask("DELETE", f"/channels/{channel}/history"))[0] == 200
    await publish(api, channel, "4")
    assert "Stream-Closed" not in (await reading.ask(channel)).headers


async def test_end_refuses_only_its_own_channel(reading, api, channel):
    other = f"{channel}-other"
    await publish(api, channel, "1", end=True)
    status, body = await api.ask("POST", "/events", {"name": "n", "channels": [channel, other], "data": "2"})
    assert (status, body["code"]) == (409, "channel_ended")
    assert body["error"].endswith("(1 of the 2 events of this request were published)")
    assert (await reading.ask(other)).data == ["2"]


async def test_batch_may_end_a_channel(reading, api, channel):
    items = [{"name": "n", "channel": channel, "data": str(n), "end": n == 1} for n in range(2)]
    assert await api.ask("POST", "/batch_events", {"batch": items}) == (200, {})
    answer = await reading.ask(channel)
    assert (answer.data, answer.headers["Stream-Closed"]) == (["0", "1"], "true")


async def test_only_channels_with_history_are_read_and_ended(reading, api):
    refused = await reading.ask("other")
    assert (refused.status, refused.body["code"]) == (400, "no_history")
    status, body = await api.ask("POST", "/events", {"name": "n", "channels": ["other"], "data": "", "end": True})
    assert (status, body["code"]) == (400, "no_history")


async def test_token_must_be_for_reading(server, reading, channel):
    async with Reading(server, "") as stranger:
        assert (await stranger.ask(channel)).status == 401
        assert (await stranger.ask(channel, token="rp_wrong")).status == 401
    async with Reading(server, read_token(server, "publish")) as publisher:
        refused = await publisher.ask(channel)
        assert (refused.status, refused.body["code"]) == (403, "insufficient_scope")
        assert refused.headers["X-Content-Type-Options"] == "nosniff"


async def test_signed_request_reads(server, api, channel):
    assert await api.get(f"/channels/{channel}/stream", offset="-1") == []


async def test_token_in_the_query_is_never_logged(server, api, channel):
    """EventSource can't send header fields."""
    await publish(api, channel, "1")
    async with Reading(server, "") as stranger:
        assert (await stranger.ask(channel, token=server.token)).data == ["1"]
        async with stranger.stream(channel, headers=EVENTS, token=server.token) as stream:
            assert (await stream.next()).data == "1"
        # Also of a request that is refused.
        assert (await stranger.ask(channel, offset="wrong", token=server.token)).status == 400
        assert (await stranger.ask("other", token=server.token)).status == 400
    assert server.token not in server.output()
    for path in (server.folder / "data").rglob("*"):
        # Databases make files that last for a moment.
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                assert server.token.encode() not in path.read_bytes(), path


async def test_encrypted_channel_sends_its_ciphertext(reading, api):
    sealed = json.dumps({"nonce": "n", "ciphertext": "c"})
    await publish(api, "private-encrypted-kept-1", sealed)
    assert (await reading.ask("private-encrypted-kept-1")).data == [sealed]


async def test_readers_are_no_subscribers(server, reading, api, channel):
    async with reading.stream(channel, offset="now") as stream:
        await stream.next()
        info = await api.get(f"/channels/{channel}")
        assert (info["occupied"], info["subscription_count"]) == (False, 0)


async def test_reader_and_subscriber_share_a_channel(server, reading, api, channel):
    """Whoever leaves first leaves the topic to the other."""
    async with reading.stream(channel, offset="now") as stream:
        await stream.next()
        sockets = [await connect_patiently(server) for _ in range(8)]
        for socket in sockets:
            await socket.subscribe(channel)
        await publish(api, channel, "1")
        for socket in sockets:
            assert (await socket.next("n"))["data"] == "1"
            await socket.close()
        await publish(api, channel, "2")
        assert [message["data"] for message in await stream.messages(2)] == ["1", "2"]


async def test_http_1_0_gets_a_stream_without_chunks(server, api, channel):
    await publish(api, channel, "1")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    path = f"/apps/{server.app_id}/channels/{channel}/stream"
    writer.write(f"GET {path}?offset=-1&live=sse HTTP/1.0\r\nAuthorization: Bearer {server.token}\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert b"Transfer-Encoding" not in head
    assert (await reader.readline()) == b"event: data\n"
    await publish(api, channel, "2", end=True)
    assert b"streamClosed" in await asyncio.wait_for(reader.read(), 60)
    writer.close()


async def test_connection_is_kept_after_answers(server, api, channel):
    """Several requests on one connection, an ordinary one between them."""
    await publish(api, channel, "1")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    stream, history = (f"/apps/{server.app_id}/channels/{channel}/{name}" for name in ("stream", "history"))
    for path in (stream, history, f"{stream}?offset=x", stream, f"{stream}?offset=now"):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n\r\n".encode())
    for status in (200, 200, 400, 200, 200):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 %d " % status), head
        (size,) = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")]
        await reader.readexactly(size)
    writer.close()


async def test_pages_of_allowed_origins_may_read(server, reading, channel):
    answer = await reading.ask(channel, headers={"Origin": "https://a.example"})
    assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
    exposed = ", ".join(answer.headers.getall("Access-Control-Expose-Headers"))
    assert {"Stream-Next-Offset", "X-Service-Trace-Id"} <= set(exposed.split(", "))
    url = f"{reading.url}/channels/{channel}/stream"
    asked = {"Origin": "https://a.example", "Access-Control-Request-Headers": "authorization"}
    async with reading.session.options(url, headers=asked) as preflight:
        assert preflight.status == 204
        assert preflight.headers["Access-Control-Allow-Methods"] == "GET, HEAD"
        assert preflight.headers["Access-Control-Allow-Headers"] == "authorization"


async def test_versioned_path_reads_too(server, api, channel):
    await publish(api, channel, "1")
    async with Reading(server, server.token, f"/api/v1/apps/{server.app_id}") as versioned:
        assert (await versioned.ask(channel)).data == ["1"]


async def test_control_port_does_not_stream(server, channel):
    async with Reading(server, server.token, port=server.control_port) as control:
        refused = await control.ask(channel)
        assert (refused.status, refused.body["code"]) == (404, "not_found")


# -- by a grant ------------------------------------------------------------------------------------------------------


def by_grant(server, *channels: str, **claims) -> dict[str, str]:
    """A header field."""
    return {"Authorization": f"Bearer {mint(server.app_key, server.app_secret, *channels, **claims)}"}


@pytest.mark.parametrize("kind", ["private-kept-", "presence-kept-", "private-encrypted-kept-", "kept-"])
async def test_grant_reads_what_it_opens(server, api, channel, kind):
    channel = kind + channel
    await publish(api, channel, "1")
    grant = by_grant(server, channel, sub="7")
    async with Reading(server, "") as unsigned:
        assert (await unsigned.ask(channel, headers=grant)).data == ["1"]
        # In the query, as EventSource sends it.
        token = grant["Authorization"].removeprefix("Bearer ")
        async with unsigned.stream(channel, headers=EVENTS, token=token) as stream:
            assert (await stream.next()).data == "1"
            await publish(api, channel, "2")
            assert (await stream.next()).data == "2"
        refused = await unsigned.ask(channel + "x", headers=grant)
        assert (refused.status, refused.body["code"]) == (401, "unauthorized")
    logs = "".join((server.folder / name).read_text(errors="replace") for name in ("out", "err"))
    assert (token in logs, "worker ready" in logs) == (False, True)


async def test_readers_end_when_their_grant_is_revoked(server, api, channel):
    await publish(api, channel, "1")
    grant = by_grant(server, channel, jti=channel)
    async with (
        Reading(server, "") as unsigned,
        unsigned.stream(channel, headers={**grant, **EVENTS}) as source,
        unsigned.stream(channel, headers=grant, offset="-1", live="sse") as stream,
        unsigned.stream(channel, headers={**by_grant(server, channel, jti="another"), **EVENTS}) as other,
    ):
        assert (await source.next()).data == (await other.next()).data == "1"
        assert len(await stream.messages(1)) == 1
        position = (await unsigned.ask(channel, "HEAD", headers=grant)).next
        poll = asyncio.create_task(unsigned.ask(channel, headers=grant, offset=position, live="long-poll"))
        status, body = await api.ask("POST", "/grants/revoke", {"jti": channel})
        # The poll may come a moment later.
        assert (status, body["unsubscribed"] in (2, 3)) == (200, True)
        (last,) = await source.rest()
        assert (last.name, last.json["code"], last.json["error"]) == ("pusher:error", "unauthorized", REVOKED)
        assert await stream.rest() == []
        for answer in (await poll, await unsigned.ask(channel, headers=grant)):
            assert (answer.status, answer.body["error"]) == (401, REVOKED)
        await publish(api, channel, "2")
        assert (await other.next()).data == "2"


async def test_readers_of_a_user_end_who_is_removed_from_the_channel(server, api, channel):
    room = f"presence-kept-{channel}"
    await publish(api, room, "1")
    grant = by_grant(server, "presence-kept-*", sub=channel)
    async with (
        Reading(server, "") as unsigned,
        unsigned.stream(room, headers={**grant, **EVENTS}) as source,
        unsigned.stream(room, headers={**by_grant(server, room, sub="another"), **EVENTS}) as other,
    ):
        await source.next()
        await other.next()
        path = f"/channels/{room}/unsubscribe"
        assert await api.ask("POST", path, {"user_id": channel}) == (200, {"unsubscribed": 1})
        (last,) = await source.rest()
        assert (last.name, last.json["error"]) == ("pusher:error", REVOKED)
        assert (await unsigned.ask(room, headers=grant)).status == 401
        # Its other channels stay.
        assert (await unsigned.ask(f"{room}-b", headers=grant)).status == 200
        await publish(api, room, "2")
        assert (await other.next()).data == "2"


async def test_stream_ends_with_its_grant(server, api, channel):
    await publish(api, channel, "1")
    async with Reading(server, "") as unsigned:
        while True:
            # It has expired, but for the seconds by which clocks may differ.
            grant = by_grant(server, channel, iat=None, exp=time.time() - 8)
            async with unsigned.request(channel, headers={**grant, **EVENTS}) as response:
                if response.status == 200:
                    *_, last = await Stream(response).rest()
                    break
            # It took longer than the seconds that were left.
            assert "it expired" in (await unsigned.ask(channel, headers=grant)).body["error"]
        assert (last.name, last.json["error"]) == ("pusher:error", "the grant has expired")
        assert (await unsigned.ask(channel, headers=grant)).status == 401


# -- when the app changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code"), [(("set", "enabled=false"), "app_disabled"), (("delete", "--yes"), "unauthorized")]
)
async def test_readers_of_an_app_end_that_is_disabled_or_deleted(server, channel, words, code):
    app = command(server, "app", "create", channel)
    command(server, "history", "rule", "add", app["id"], "--prefix", "kept-", "--keep", "10", "--seconds", "60")
    token = command(server, "token", "create", app["id"], "--name", "t", "--scope", "all")["token"]
    await asyncio.to_thread(until_readable, server, app["id"], {"Authorization": f"Bearer {token}"})
    async with Reading(server, token, f"/apps/{app['id']}") as reading:
        position = (await reading.ask(channel, "HEAD")).next
        async with reading.stream(channel, headers=EVENTS) as source, reading.stream(channel, offset="-1") as stream:
            await stream.next()
            polling = asyncio.create_task(poll(reading, channel, position))
            await asyncio.to_thread(command, server, "app", words[0], app["id"], *words[1:])
            (last,) = await source.rest()
            assert (last.name, last.json["code"]) == ("pusher:error", code)
            assert await stream.rest() == []
            for answer in (await polling, await reading.ask(channel)):
                assert answer.status == last.json["status"]


# -- temporary errors ------------------------------------------------------------------------------------------------


def not_admitting() -> None:
    raise ApiError("unavailable", "this server isn't ready, or is draining; send the request again")


AWAY = b"HTTP/1.1 503 Service Unavailable\r\n\r\n"
ALLOWED = b"HTTP/1.1 200 OK\r\nX-Stream-App: 1\r\nX-Stream-Channel: news\r\n\r\n{}"
TEMPORARY = {
    "control's 503": lambda reader: reader.answered(0, AWAY),
    "control is away": lambda reader: reader.unanswered(False),
    "control went away": lambda reader: reader.unanswered(True),
    "not admitting": lambda reader: reader.answered(0, ALLOWED),
}


@pytest.mark.parametrize("event_source", [True, False])
@pytest.mark.parametrize("happens", TEMPORARY.values(), ids=TEMPORARY)
def test_temporary_error_does_not_end_an_event_source(happens, event_source):
    """Browsers give an EventSource up after any status but 200."""
    rule = HistoryRule(id="1", name="news", keep=10, seconds=60)
    owner = SimpleNamespace(
        addresses=SimpleNamespace(leave=lambda slot: None),
        apps={"1": App(id="1", name="a", keys=(), history=(rule,))},
        check_admits=not_admitting,
        grants=SimpleNamespace(of=lambda app_id: None),
        left=lambda reader: None,
        requests=dict.fromkeys(Live, 0),
    )
    calls = []
    answering = {
        name: lambda *arguments, name=name: calls.append((name, arguments[-1]))
        for name in ("pass_on", "pass_unanswered", "reply", "finish")
    }
    accept = [(READ_FIELDS.index("Accept"), b"text/event-stream")]
    request = ParsedRequest(0, b"GET", b"/apps/1/channels/news/stream", accept, [], b"")
    if not event_source:
        request = request._replace(target=request.target + b"?offset=-1&live=sse")
    asked = asked_of(request)
    assert asked is not None
    peer = SimpleNamespace(stream=object(), peer="192.0.2.1", recognised=lambda: None, **answering)
    happens(reader := Reader(owner, peer, asked))
    assert reader.state is ReaderState.OVER
    ((name, answer),) = calls
    if event_source:
        assert name == "finish"
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.partition(b"\r\n\r\n")[2].startswith(b"retry: ")
    else:
        assert name != "finish"
        assert isinstance(answer, bool) or answer.startswith(b"HTTP/1.1 503 ")


async def test_reader_that_ends_while_it_waits_for_a_place_waits_for_none():
    """Its place went to the next request of its connection, and was counted for ever."""
    joins, cancelled, answers = [], [], []
    limit = SimpleNamespace(admit=joins.append, cancel=cancelled.append)
    admission = Admission(SimpleNamespace(connection_limit=limit))
    addresses = SimpleNamespace(leave=lambda slot: None)
    owner = SimpleNamespace(admission=admission, addresses=addresses, left=lambda reader: None)
    peer = SimpleNamespace(stream=object(), reply=answers.append)
    asked = asked_of(ParsedRequest(0, b"GET", b"/apps/1/channels/news/stream", [], [], b""))
    assert asked is not None
    reader = Reader(owner, peer, asked)
    reader.state = ReaderState.ADMITTING
    admission.ask(peer.stream, App(id="1", name="a", keys=()), reader._admitted)
    reader.end(ApiError("unauthorized", REVOKED))
    assert answers[0].startswith(b"HTTP/1.1 401 ")
    assert (cancelled, len(admission)) == (joins, 0)
