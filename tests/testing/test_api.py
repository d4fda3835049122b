import json

import aiohttp
import pytest

from helpers.wire import Api, Socket, channel_auth, signed_path
from redpoll.control.api.routes import routes_of
from redpoll.testing import FakeServer
from redpoll.testing.api import Api as FakeApi


class _Unserved:
    def __getattr__(self, name):
        return self


async def test_routes_are_those_of_the_server(server):
    unserved = _Unserved()
    real = {route.name: route for route in routes_of(*[unserved] * 10).all}
    assert isinstance(server._api, FakeApi)
    for route in server._api.routes.all:
        twin = real[route.name]
        for name in ("method", "pattern", "scope", "access", "cross_origin", "takes_body"):
            assert getattr(route, name) == getattr(twin, name), (route.name, name)


async def test_errors_are_the_servers(server, api):
    event = {"name": "n", "channel": "c", "data": "d"}
    for body, code in (
        ({**event, "name": "pusher:x"}, "invalid_event_name"),
        ({**event, "channel": "not a name"}, "invalid_channel"),
        ({**event, "data": "x" * 10_241}, "payload_too_large"),
        ({**event, "channels": ["a"]}, "bad_request"),
        ({**event, "socket_id": "x"}, "invalid_socket_id"),
        ({**event, "info": "x"}, "invalid_info"),
        ([], "bad_request"),
    ):
        status, answer = await api.ask("POST", "/events", body)
        assert (answer["code"], answer["status"]) == (code, status)
    assert (await api.ask("GET", "/nothing"))[1]["code"] == "not_found"
    assert (await api.ask("DELETE", "/events"))[1]["code"] == "method_not_allowed"
    assert (await api.ask("GET", "/channels/a/users"))[1]["code"] == "not_presence_channel"
    assert server.published == []


async def test_a_wrong_signature_shows_what_was_to_sign(server, api):
    path = signed_path(server, "GET", "/apps/1/channels")[:-4] + "0000"
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{server.port}{path}") as answer:
        body = await answer.json()
    assert (answer.status, body["code"]) == (401, "invalid_signature")
    assert "GET\\n/apps/1/channels\\nauth_key=fake-key" in body["error"]
    assert len(answer.headers["X-Service-Trace-Id"]) == 32


async def test_tokens_and_the_header_pair_open_the_app(server):
    server.add_token("secret-token", ["read"])
    url = f"http://127.0.0.1:{server.port}/api/v1/apps/1"
    bearer = {"Authorization": "Bearer secret-token"}
    pair = {"X-Service-Key": server.app_key, "X-Service-Secret": server.app_secret}
    async with aiohttp.ClientSession() as http:
        for headers, status in ((bearer, 200), (pair, 200), ({"Authorization": "Bearer no"}, 401)):
            async with http.get(f"{url}/channels", headers=headers) as answer:
                assert answer.status == status
        async with http.post(f"{url}/events", headers=bearer, json={}) as answer:
            assert (answer.status, (await answer.json())["code"]) == (403, "insufficient_scope")


async def test_browser_module_gets_304_if_the_page_has_it(server):
    url = f"http://127.0.0.1:{server.port}/api/v1/redpoll.js"
    async with aiohttp.ClientSession() as http:
        async with http.get(url) as first:
            assert first.status == 200
        async with http.get(url, headers={"If-None-Match": first.headers["ETag"]}) as again:
            assert (again.status, await again.read()) == (304, b"")


async def test_auth_signs_what_the_server_accepts(server, api):
    client = await Socket.connect(server)
    form = {"socket_id": client.socket_id, "channel_name": "private-a"}
    status, answer = await api.ask("POST", "/auth", form)
    assert (status, answer["auth"]) == (200, channel_auth(server, client.socket_id, "private-a"))


async def test_a_repeated_correlation_id_publishes_once():
    with FakeServer(idempotency=True) as server:
        async with Api(server) as api:
            event = {"name": "paid", "channel": "c", "data": "1", "correlation_id": "order-7"}
            for _ in range(2):
                assert await api.ask("POST", "/events", event) == (200, {})
            assert (await api.ask("POST", "/events", {**event, "data": "2"}))[0] == 409
            server.assert_published("paid", times=1)
            server.clock.advance(120)
            await api.ask("POST", "/events", {**event, "data": "2"})
            assert server.assert_published("paid", times=2).data == "2"


async def test_the_repetition_of_a_request_that_was_published_in_part_publishes_the_rest():
    with FakeServer(idempotency=True) as server:
        server.keep_history("kept-")
        async with Api(server) as api:
            await api.publish("kept-a", "last", "d", end=True)
            event = {"name": "more", "channels": ["kept-a", "b"], "data": "d", "correlation_id": "order-7"}
            for _ in range(2):
                status, answer = await api.ask("POST", "/events", event)
                assert (status, answer["code"]) == (409, "channel_ended")
            assert server.assert_published("more", times=1).channel == "b"
            status, answer = await api.ask("POST", "/events", {**event, "data": "another"})
            assert (status, answer["code"]) == (409, "idempotency_conflict")
            assert (await api.ask("DELETE", "/channels/kept-a/history"))[0] == 200
            for _ in range(2):
                assert await api.ask("POST", "/events", event) == (200, {})
            assert [one.channel for one in server.published if one.name == "more"] == ["b", "kept-a"]


async def test_channels_are_paged(server, api):
    client = await Socket.connect(server)
    for name in ("a", "b", "c"):
        await client.subscribe(name)
    first = await api.get("/channels", limit="2")
    assert list(first["channels"]) == ["a", "b"]
    assert list((await api.get("/channels", cursor=first["next"]))["channels"]) == ["c"]


@pytest.mark.parametrize(("status", "body"), [(503, "unavailable"), (500, "internal"), (502, None)])
async def test_requests_fail_as_often_as_asked(server, api, status, body):
    server.fail(status, times=2)
    path = signed_path(server, "GET", "/apps/1/channels")
    seen = []
    async with aiohttp.ClientSession() as http:
        for _ in range(3):
            async with http.get(f"http://127.0.0.1:{server.port}{path}") as answer:
                seen.append(answer.status)
                text = await answer.text()
                if answer.status == status:
                    assert json.loads(text)["code"] == body if body else text.startswith("<html>")
    assert seen == [status, status, 200]
