"""The front through real sockets: routes, credentials, bodies, errors, rate limits."""

import json
import time

import pytest
from structlog.testing import capture_logs

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.scripts import RATE
from redpoll.cluster.shared_rate import SharedRate
from redpoll.control.accounts import login_throttle
from redpoll.control.http.ratelimit import RateLimit
from redpoll.ipc.messages import NodesChanged
from redpoll.loop.turns import TooManyWaiting
from redpoll.protocol.tokens import MANAGE
from redpoll.store.errors import StoreUnavailable

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
OTHER_KEY, OTHER_SECRET = "1111111111111111aaaa", "2222222222222222bbbb"
BODY = b'{"name":"e","channels":["c"],"data":"{}"}'


def code_of(reply):
    return reply.status, reply.json()["code"]


# -- routes -----------------------------------------------------------------------------------------------------


async def test_an_unknown_path_is_404_with_an_error_body(plane):
    for path in ("/nothing", "/apps/3", "/apps/3/events/", "/api/v1/healthz", "/app/key"):
        reply = await plane.ask("GET", path)
        assert code_of(reply) == (404, "not_found")
        assert set(reply.json()) == {"error", "code", "status", "trace_id"}
        assert reply.json()["trace_id"] == reply.headers["x-service-trace-id"]
        assert reply.headers["content-type"] == "application/json"


async def test_a_wrong_method_is_405_and_the_response_lists_the_allowed_ones(plane):
    reply = await plane.ask("DELETE", "/apps/3/events")
    assert code_of(reply) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    assert (await plane.ask("PUT", "/apps/3/auth")).headers["allow"] == "OPTIONS, POST"


async def test_head_is_answered_like_get_without_a_body(plane):
    reply = await plane.ask("HEAD", "/healthz")
    assert (reply.status, reply.headers["content-length"]) == (200, "15")
    assert (await plane.ask("GET", "/healthz")).body == b'{"status":"ok"}'


async def test_a_request_target_may_be_an_absolute_url(plane, sign):
    target = "http://example.com" + sign("POST", "/apps/3/events", BODY)
    assert (await plane.ask("POST", target, BODY)).status == 200
    assert (await plane.ask("GET", "http://example.com/healthz")).status == 200
    assert (await plane.ask("OPTIONS", "*")).status == 404


async def test_a_query_of_more_than_100_parameters_is_400_before_it_is_parsed(plane, sign):
    params = {f"a{number}[]": "" for number in range(96)}
    assert (await plane.ask("GET", sign("GET", "/apps/3/channels", params=params))).status == 200
    params = {f"a{number}[]": "" for number in range(97)}
    for target in (sign("GET", "/apps/3/channels", params=params), "/healthz?" + "&" * 100, "/dashboard?" + "a&" * 100):
        reply = await plane.ask("GET", target)
        assert reply.status == 400
        assert b"more than 100 parameters" in reply.body


async def test_a_parameter_can_not_be_added_to_a_signed_query(plane, sign):
    target = sign("GET", "/apps/3/channels")
    assert (await plane.ask("GET", target)).status == 200
    for added in ("auth_signature[x]=1", "auth_signature%5B%5D=1", "body_md5[]=1", "info[]=user_count"):
        assert (await plane.ask("GET", f"{target}&{added}")).status == 401


# -- credentials ------------------------------------------------------------------------------------------------


async def test_signatures_of_the_published_examples(plane):
    plane.plane.front.clock = lambda: 1353088179.0
    body = b'{"name":"foo","channels":["project-3"],"data":"{\\"some\\":\\"data\\"}"}'
    query = (
        "auth_key=278d425bdf160c739803&auth_timestamp=1353088179&auth_version=1.0"
        "&body_md5=ec365a775a4cd0599faeb73354201b6f"
        "&auth_signature=da454824c97ba181a32ccc17a72625ba02771f50b50e1e7430e47a1f3f457e6c"
    )
    assert (await plane.ask("POST", f"/apps/3/events?{query}", body)).status == 200
    query = (
        "auth_key=278d425bdf160c739803&auth_timestamp=1353088179&auth_version=1.0&filter_by_prefix=presence-"
        "&info=user_count&auth_signature=16819168891cb5dfd72b5c7a5d3d602605b26c6ba1930033b5e2eeeb65010291"
    )
    assert (await plane.ask("GET", f"/apps/3/channels?{query}")).json() == {"channels": {}}


async def test_the_path_may_be_signed_without_its_prefix_as_php_does(plane, sign):
    target = sign("POST", "/api/v1/apps/3/events", BODY, signed_path="/apps/3/events")
    assert (await plane.ask("POST", target, BODY)).status == 200


async def test_the_api_is_also_at_the_configured_prefix_signed_with_or_without_it(plane, sign):
    plane.plane.front._authentication.path_prefix = "/live"
    for signed_path in ("/live/apps/3/events", "/apps/3/events"):
        target = sign("POST", "/live/apps/3/events", BODY, signed_path=signed_path)
        assert (await plane.ask("POST", target, BODY)).status == 200
    assert (await plane.ask("POST", sign("POST", "/apps/3/events", BODY), BODY)).status == 200
    for path in ("/other/apps/3/events", "/live/healthz", "/live/live/apps/3/events", "/livelier/apps/3/events"):
        assert (await plane.ask("GET", path)).status == 404


async def test_body_md5_of_an_empty_body_is_accepted_on_get(plane, sign):
    target = sign("GET", "/apps/3/channels", params={"body_md5": "d41d8cd98f00b204e9800998ecf8427e"})
    assert (await plane.ask("GET", target)).status == 200
    target = sign("GET", "/apps/3/channels", params={"body_md5": "0" * 32})
    assert code_of(await plane.ask("GET", target)) == (401, "body_md5_mismatch")


async def test_a_byte_changed_anywhere_is_401(plane, sign):
    target = sign("POST", "/apps/3/events", BODY)
    assert (await plane.ask("POST", target, BODY)).status == 200
    path, query = target.split("?")
    changed = {
        "method": ("GET", "/apps/3/channels?" + sign("POST", "/apps/3/channels").split("?")[1], b""),
        "path": ("POST", f"/apps/3/batch_events?{query}", BODY),
        "mount": ("POST", f"/apps/%33/events?{query}", BODY),
        "parameter added": ("POST", f"{target}&info=user_count", BODY),
        "parameter": ("POST", target.replace("auth_version=1.0", "auth_version=1.1"), BODY),
        "timestamp": ("POST", sign("POST", "/apps/3/events", BODY, auth_timestamp=str(int(time.time()) - 1)), BODY),
        "signature": ("POST", target[:-1] + ("0" if target[-1] != "0" else "1"), BODY),
        "signature in capitals": (
            "POST",
            path + "?" + query.replace(query.split("auth_signature=")[1], query.split("auth_signature=")[1].upper()),
            BODY,
        ),
        "body": ("POST", target, BODY.replace(b'"e"', b'"f"')),
        "body added": ("POST", target, BODY + b" "),
        "body left out": ("POST", target, b""),
    }
    for what, (method, changed_target, body) in changed.items():
        reply = await plane.ask(method, changed_target, body)
        assert reply.status == 401, what


async def test_the_error_for_a_wrong_signature_shows_what_to_sign_but_not_the_signature(plane, sign):
    target = sign("POST", "/apps/3/events", BODY, secret="wrong")
    reply = await plane.ask("POST", target, BODY)
    assert code_of(reply) == (401, "invalid_signature")
    assert "POST\\n/apps/3/events\\nauth_key=" in reply.json()["error"]
    right = sign("POST", "/apps/3/events", BODY).split("auth_signature=")[1]
    assert right not in reply.json()["error"]
    assert SECRET not in reply.json()["error"]


@pytest.mark.parametrize(("off_s", "status"), [(-600, 200), (600, 200), (-601, 401), (601, 401)])
async def test_a_timestamp_may_be_ten_minutes_off(plane, sign, off_s, status):
    plane.plane.front.clock = lambda: 1_700_000_000.0
    target = sign("POST", "/apps/3/events", BODY, timestamp=str(1_700_000_000 + off_s))
    reply = await plane.ask("POST", target, BODY)
    assert reply.status == status
    if status == 401:
        assert reply.json()["code"] == "timestamp_out_of_range"


async def test_an_unknown_app_and_a_key_of_another_app_get_the_same_response(plane, sign):
    unknown = await plane.ask("POST", sign("POST", "/apps/999/events", BODY), BODY)
    others = await plane.ask("POST", sign("POST", "/apps/4/events", BODY), BODY)
    assert code_of(unknown) == code_of(others) == (401, "unauthorized")
    assert unknown.json()["error"] == others.json()["error"]
    pair = {"X-Service-Key": KEY, "X-Service-Secret": SECRET}
    assert code_of(await plane.ask("POST", "/apps/999/events", BODY, pair)) == (401, "unauthorized")


async def test_the_header_pair_gives_access_to_its_own_app_only(plane):
    pair = {"X-Service-Key": KEY, "X-Service-Secret": SECRET}
    assert (await plane.ask("POST", "/apps/3/events", BODY, pair)).status == 200
    for wrong in (
        {"X-Service-Key": KEY, "X-Service-Secret": SECRET[:-1]},
        {"X-Service-Key": KEY, "X-Service-Secret": ""},
        {"X-Service-Key": OTHER_KEY, "X-Service-Secret": OTHER_SECRET},
        {"X-Service-Key": KEY},
        {"X-Service-Secret": SECRET},
    ):
        assert code_of(await plane.ask("POST", "/apps/3/events", BODY, wrong)) == (401, "unauthorized")


async def test_auth_signs_with_the_key_of_the_header_pair(plane):
    pair = {"X-Service-Key": OTHER_KEY, "X-Service-Secret": OTHER_SECRET}
    body = b'{"socket_id":"1.2","channel_name":"private-a"}'
    assert (await plane.ask("POST", "/apps/4/auth", body, pair)).json()["auth"].startswith(OTHER_KEY + ":")


async def test_only_the_first_credential_of_a_request_counts(plane, sign):
    target = sign("POST", "/apps/3/events", BODY)
    pair = {"X-Service-Key": KEY, "X-Service-Secret": SECRET}
    wrong_pair = {"X-Service-Key": KEY, "X-Service-Secret": "wrong"}
    bearer = {"Authorization": "Bearer something"}
    assert (await plane.ask("POST", target, BODY, wrong_pair)).status == 401
    assert (await plane.ask("POST", target, BODY, {**bearer, **pair})).status == 401
    # Other schemes are ignored: proxies use this header too.
    assert (await plane.ask("POST", target, BODY, {"Authorization": "Basic eDp5"})).status == 200


async def test_without_a_credential_every_app_is_401(plane):
    for path in ("/apps/3/events", "/apps/999/events"):
        assert code_of(await plane.ask("POST", path, BODY)) == (401, "unauthorized")
    assert code_of(await plane.ask("GET", "/apps/3/channels")) == (401, "unauthorized")


# -- bodies -----------------------------------------------------------------------------------------------------


async def test_a_megabyte_is_read_and_a_byte_more_is_413(plane, sign):
    filled = BODY[:-1] + b',"x":"' + b"y" * (1024 * 1024 - len(BODY) - 7) + b'"}'
    assert len(filled) == 1024 * 1024
    assert (await plane.ask("POST", sign("POST", "/apps/3/events", filled), filled)).status == 200
    larger = filled + b" "
    reply = await plane.ask("POST", sign("POST", "/apps/3/events", larger), larger)
    assert code_of(reply) == (413, "payload_too_large")
    assert reply.headers["connection"] == "close"


async def test_a_content_length_that_is_too_large_is_refused_before_the_body(plane):
    plane.wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nContent-Length: 268435456\r\n\r\n")
    assert code_of(await plane.wire.receive()) == (413, "payload_too_large")


async def test_an_endless_chunked_body_is_refused_at_the_limit(plane, connect):
    credentials = f"X-Service-Key: {KEY}\r\nX-Service-Secret: {SECRET}\r\n".encode()
    plane.wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\n%bTransfer-Encoding: chunked\r\n\r\n" % credentials)
    for _ in range(17):
        plane.wire.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    assert code_of(await plane.wire.receive()) == (413, "payload_too_large")


async def test_a_chunked_body_is_accepted(plane, sign):
    target = sign("POST", "/apps/3/events", BODY)
    head = f"POST {target} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, BODY[at : at + 1]) for at in range(len(BODY)))
    assert (await plane.wire.ask(head + chunks + b"0\r\n\r\n")).status == 200


async def test_a_client_that_waits_for_100_continue_gets_it(plane, sign):
    target = sign("POST", "/apps/3/events", BODY)
    head = f"POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(BODY)}\r\nExpect: 100-continue\r\n\r\n"
    assert (await plane.wire.ask(head.encode())).status == 100
    assert (await plane.wire.ask(BODY)).status == 200


async def test_a_compressed_body_is_415(plane, sign):
    target = sign("POST", "/apps/3/events", BODY)
    reply = await plane.ask("POST", target, BODY, {"Content-Encoding": "gzip"})
    assert code_of(reply) == (415, "unsupported_media_type")
    assert (await plane.ask("POST", target, BODY, {"Content-Encoding": "identity"})).status == 200


async def test_a_request_without_a_credential_is_refused_before_its_body(plane):
    plane.wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n")
    reply = await plane.wire.receive()
    assert code_of(reply) == (401, "unauthorized")
    assert reply.headers["connection"] == "close"


async def test_a_slow_body_is_refused_at_its_deadline(make_plane, redis):
    plane = await make_plane(redis.url, body_timeout_s=0.2)
    credentials = f"X-Service-Key: {KEY}\r\nX-Service-Secret: {SECRET}\r\n".encode()
    plane.wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\n%bContent-Length: 100\r\n\r\n" % credentials)
    plane.wire.send(b"{")
    reply = await plane.wire.receive()
    assert reply.status == 408
    assert reply.json()["status"] == 408
    assert reply.headers["connection"] == "close"


async def test_a_client_that_disconnects_within_its_body_causes_no_error(plane, connect, wait_until):
    port = plane.plane.entrance.port
    wire = await connect(plane.port)
    credentials = f"X-Service-Key: {KEY}\r\nX-Service-Secret: {SECRET}\r\n".encode()
    wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\n%bContent-Length: 100\r\n\r\n{" % credentials)
    # Not before: the server accepts later than the client connects.
    await wait_until(lambda: port.reading_bytes)
    before = len(port.connections)
    wire.writer.transport.abort()
    await wait_until(lambda: len(port.connections) == before - 1)
    assert 500 not in plane.plane.routes.unmatched.answers
    assert 500 not in plane.plane.routes.find("/apps/3/events")[0]["POST"].answers


async def test_on_the_control_port_an_upgrade_is_an_ordinary_request(plane):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert (await plane.ask("GET", "/app/k", headers=upgrade)).status == 404
    assert (await plane.ask("GET", "/healthz", headers=upgrade)).status == 200
    assert (await plane.ask("GET", "/healthz", headers={"Connection": "Upgrade", "Upgrade": "h2c"})).status == 200


# -- errors and traces ------------------------------------------------------------------------------------------


async def test_a_malformed_request_gets_an_error_body(plane):
    plane.wire.send(b"GARBAGE\r\n\r\n")
    reply = await plane.wire.receive()
    assert code_of(reply) == (400, "bad_request")
    assert reply.json()["trace_id"] == reply.headers["x-service-trace-id"]
    assert await plane.wire.wait_closed() == b""


async def test_an_internal_error_is_500_and_shows_only_its_trace_id(plane):
    async def fails(call):
        raise RuntimeError("the password is hunter2")

    plane.plane.routes.find("/healthz")[0]["GET"].handler = fails
    reply = await plane.ask("GET", "/healthz")
    assert code_of(reply) == (500, "internal")
    # Not only digits: the trace id is random hex.
    assert b"hunter2" not in reply.body
    # The connection stays open.
    assert (await plane.ask("GET", "/readyz")).status == 200


async def test_request_of_an_app_with_too_many_that_wait_is_to_be_repeated(plane):
    async def fails(request):
        raise TooManyWaiting("16 wait")

    plane.plane.routes.find("/healthz")[0]["GET"].handler = fails
    reply = await plane.ask("GET", "/healthz")
    assert (code_of(reply), reply.json()["error"], reply.headers["retry-after"]) == (
        (429, "rate_limited"),
        "16 wait",
        "1",
    )


async def test_only_callers_with_a_credential_see_why_the_record_store_is_unavailable(plane, sign):
    async def fails(request):
        raise StoreUnavailable("PostgreSQL at redpoll@10.9.8.7/records can't be reached")

    routes = [
        ("GET", "/dashboard/login", "/dashboard/login"),
        ("POST", "/dashboard/login", "/dashboard/login"),
        ("GET", "/healthz", "/healthz"),
        ("GET", "/apps/3/usage", sign("GET", "/apps/3/usage")),
    ]
    replies = []
    with capture_logs() as logs:
        for method, path, target in routes:
            plane.plane.routes.find(path)[0][method].handler = fails
            replies.append(await plane.ask(method, target))
    assert [reply.status for reply in replies] == [503] * 4
    for reply in replies[:3]:
        assert b"ot confirmed: the record store is not available at present" in reply.body
        assert b"10.9.8.7" not in reply.body
    assert replies[3].json()["error"].endswith("redpoll@10.9.8.7/records can't be reached")
    # One line for all of them.
    (line,) = [entry for entry in logs if "10.9.8.7" in str(entry)]
    assert (line["event"], line["log_level"]) == ("record store not available for a request", "warning")


async def test_the_trace_id_comes_from_the_traceparent_header(plane, sign):
    target = sign("POST", "/apps/3/events", BODY)
    known = "0af7651916cd43dd8448eb211c80319c"
    reply = await plane.ask("POST", target, BODY, {"traceparent": f"00-{known}-b7ad6b7169203331-01"})
    assert reply.headers["x-service-trace-id"] == known
    for bad in (f"00-{'0' * 32}-b7ad6b7169203331-01", "00-xyz", f"ff-{known}-b7ad6b7169203331-01", known):
        reply = await plane.ask("POST", target, BODY, {"traceparent": bad})
        assert reply.status == 200
        assert reply.headers["x-service-trace-id"] != known
        assert len(reply.headers["x-service-trace-id"]) == 32


async def test_pages_of_other_origins_can_not_read_the_response(plane):
    app = plane.records.apps["3"]
    plane.records.apps["3"] = type(app)(id=app.id, name=app.name, keys=app.keys, allowed_origins=("good.example",))
    for origin, allowed in (("https://good.example", True), ("https://evil.example", False), ("null", False)):
        reply = await plane.ask("OPTIONS", "/apps/3/auth", headers={"Origin": origin})
        assert reply.status == 204
        assert ("access-control-allow-origin" in reply.headers) is allowed
    # The headers don't show which apps exist.
    reply = await plane.ask("OPTIONS", "/apps/999/auth", headers={"Origin": "https://evil.example"})
    assert reply.headers["access-control-allow-origin"] == "https://evil.example"


async def test_a_disabled_app_is_403_for_its_own_key_only(plane, sign):
    app = plane.records.apps["3"]
    plane.records.apps["3"] = type(app)(id=app.id, name=app.name, keys=app.keys, enabled=False)
    assert code_of(await plane.ask("POST", sign("POST", "/apps/3/events", BODY), BODY)) == (403, "app_disabled")
    assert (await plane.ask("POST", sign("POST", "/apps/3/events", BODY, secret="no"), BODY)).status == 401


async def test_every_response_is_counted_under_its_route(plane):
    await plane.trigger()
    await plane.trigger(name="")
    await plane.ask("GET", "/nothing")
    assert plane.plane.routes.find("/apps/3/events")[0]["POST"].answers == {200: 1, 400: 1}
    assert plane.plane.routes.unmatched.answers[404] == 1


async def test_an_error_body_is_valid_json_if_it_quotes_special_characters(plane, sign):
    target = sign("POST", "/apps/3/events", BODY, params={"x": '"\\\n\x00ü'}, secret="wrong")
    reply = await plane.ask("POST", target, BODY)
    assert reply.status == 401
    json.loads(reply.body)


# -- app tokens -------------------------------------------------------------------------------------------------


async def token(plane, *scopes, app_id="3", lasts_s=None):
    """(token, headers that show it)."""
    made, plain = await plane.records.create_token(app_id, "t", scopes, lasts_s)
    return made, {"Authorization": f"Bearer {plain}"}


CALLS = {
    "publish": [
        ("POST", "/apps/3/events", BODY),
        ("POST", "/apps/3/batch_events", b'{"batch":[]}'),
        ("POST", "/apps/3/users/u/terminate_connections", b"{}"),
        ("POST", "/users/u/terminate_connections", b"{}"),
        ("DELETE", "/apps/3/channels/c/history", b""),
        ("POST", "/apps/3/channels/private-c/unsubscribe", b'{"user_id":"u"}'),
        ("POST", "/apps/3/grants/revoke", b'{"jti":"j"}'),
    ],
    "read": [
        ("GET", "/apps/3/channels", b""),
        ("GET", "/apps/3/events/log", b""),
        ("GET", "/apps/3/usage", b""),
        ("GET", "/apps/3/channels/c/history", b""),
        ("GET", "/apps/3/channels/c/stream", b""),
        ("POST", "/apps/3/webhooks/verify", b'{"payload":"p","signature":"s"}'),
        ("GET", "/apps/3/trace/1", b""),
        ("GET", "/apps/3/channels/c", b""),
        ("GET", "/apps/3/channels/presence-c/users", b""),
    ],
    "webhooks": [("GET", "/apps/3/webhooks/stream", b""), ("POST", "/apps/3/webhooks/ack", b'{"ids":[]}')],
    "auth": [("POST", "/apps/3/auth", b'{"socket_id":"1.2","channel_name":"private-a"}')],
}


@pytest.mark.parametrize("scope", ["publish", "read", "auth", "webhooks", "all"])
async def test_a_token_gives_access_to_the_routes_of_its_scope_only(plane, scope):
    _, shown = await token(plane, scope)
    for wanted, calls in CALLS.items():
        for method, path, body in calls:
            reply = await plane.ask(method, path, body, shown)
            if scope in (wanted, "all"):
                # No such trace exists, streams are read from workers, and no webhook is pulled.
                assert reply.status == (404 if "/trace/" in path or path.endswith("/stream") else 200), path
            else:
                assert code_of(reply) == (403, "insufficient_scope"), path
                assert 'error="insufficient_scope"' in reply.headers["www-authenticate"]


async def test_these_calls_cover_every_route_that_needs_a_credential(plane):
    known = {plane.plane.routes.find(path)[0][method].name for calls in CALLS.values() for method, path, _ in calls}
    # tests/control/management/test_routes.py has the management of apps.
    assert known == {route.name for route in plane.plane.routes.all if route.scope and route.scope != MANAGE}


async def test_a_revoked_token_is_refused_at_once_on_an_open_connection(plane):
    made, shown = await token(plane, "all")
    assert (await plane.ask("POST", "/apps/3/events", BODY, shown)).status == 200
    await plane.records.revoke_tokens([made.id])
    reply = await plane.ask("POST", "/apps/3/events", BODY, shown)
    assert code_of(reply) == (401, "token_revoked")
    assert 'error="invalid_token"' in reply.headers["www-authenticate"]


async def test_the_error_for_an_expired_token_says_when_it_expired(plane):
    made, shown = await token(plane, "all", lasts_s=60)
    assert (await plane.ask("GET", "/apps/3/channels", b"", shown)).status == 200
    plane.plane.front.clock = lambda: made.expires_at + 1
    reply = await plane.ask("GET", "/apps/3/channels", b"", shown)
    assert code_of(reply) == (401, "token_expired")
    assert "expired 1 s ago" in reply.json()["error"]


async def test_an_unknown_token_is_401_even_with_another_credential(plane, sign):
    target = sign("POST", "/apps/3/events", BODY)
    pair = {"X-Service-Key": KEY, "X-Service-Secret": SECRET}
    for wrong in ("Bearer rp_x", "bearer ", "Bearer", "BEARER  \t", f"Bearer {SECRET}"):
        reply = await plane.ask("POST", target, BODY, {"Authorization": wrong, **pair})
        assert code_of(reply) == (401, "unauthorized"), wrong
        assert reply.headers["www-authenticate"] == "Bearer"


async def test_a_revoked_token_is_401_even_with_another_credential(plane, sign):
    made, shown = await token(plane, "all")
    await plane.records.revoke_tokens([made.id])
    target = sign("POST", "/apps/3/events", BODY)
    pair = {"X-Service-Key": KEY, "X-Service-Secret": SECRET}
    assert code_of(await plane.ask("POST", target, BODY, {**shown, **pair})) == (401, "token_revoked")


async def test_the_stored_hash_of_a_token_is_not_a_credential(plane):
    made, _ = await token(plane, "all")
    for text in (made.hash, made.id, made.prefix):
        reply = await plane.ask("GET", "/apps/3/channels", b"", {"Authorization": f"Bearer {text}"})
        assert code_of(reply) == (401, "unauthorized")


async def test_only_authenticated_calls_update_the_time_of_last_use(plane):
    made, shown = await token(plane, "read")
    assert (await plane.ask("POST", "/apps/3/events", BODY, shown)).status == 403
    assert plane.records.tokens[made.hash].last_used_at is None
    plane.plane.front.clock = lambda: 1_700_000_000.0
    await plane.ask("GET", "/apps/3/channels", b"", shown)
    assert plane.records.tokens[made.hash].last_used_at == 1_700_000_000.0


async def test_an_unknown_app_is_404_for_a_token_for_every_app(plane):
    from redpoll.protocol.auth import token_hash
    from redpoll.protocol.tokens import Token

    wide = Token(
        id="w", app_id=None, name="w", hash=token_hash("wide"), prefix="wide", scopes=("all",), created_at=time.time()
    )
    plane.records.tokens[wide.hash] = wide
    shown = {"Authorization": "Bearer wide"}
    for app_id in ("3", "4"):
        assert (await plane.ask("POST", f"/apps/{app_id}/events", BODY, shown)).status == 200
    assert code_of(await plane.ask("POST", "/apps/999/events", BODY, shown)) == (404, "unknown_app")
    # Neither path nor token names the app.
    reply = await plane.ask("POST", "/users/u/terminate_connections", b"{}", shown)
    assert code_of(reply) == (400, "bad_request")


async def test_a_token_of_a_disabled_app_is_403(plane):
    _, shown = await token(plane, "all")
    await plane.records.set_app("3", {"enabled": False})
    assert code_of(await plane.ask("GET", "/apps/3/channels", b"", shown)) == (403, "app_disabled")


# -- keys -------------------------------------------------------------------------------------------------------


async def test_old_and_new_key_both_work_until_the_old_one_is_disabled(plane, sign):
    new = await plane.records.add_key("3")

    def both():
        return [
            plane.ask("POST", sign("POST", "/apps/3/events", BODY, key=key, secret=secret), BODY)
            for key, secret in ((KEY, SECRET), (new.key, new.secret))
        ]

    assert [(await asked).status for asked in both()] == [200, 200]
    await plane.records.disable_key("3", KEY)
    assert [(await asked).status for asked in both()] == [401, 200]
    pair = {"X-Service-Key": KEY, "X-Service-Secret": SECRET}
    for path in ("/apps/3/events", "/users/u/terminate_connections"):
        assert code_of(await plane.ask("POST", path, BODY, pair)) == (401, "unauthorized")
    # For a token the server signs with an enabled key.
    _, shown = await token(plane, "auth")
    body = b'{"socket_id":"1.2","channel_name":"private-a"}'
    assert (await plane.ask("POST", "/apps/3/auth", body, shown)).json()["auth"].startswith(new.key + ":")


async def test_with_a_token_the_key_header_is_ignored(plane):
    _, shown = await token(plane, "auth")
    body = b'{"socket_id":"1.2","channel_name":"private-a"}'
    for other in (OTHER_KEY, "unknown"):
        reply = await plane.ask("POST", f"/apps/3/auth?auth_key={other}", body, {**shown, "X-Service-Key": other})
        assert reply.json()["auth"].startswith(KEY + ":")


NOT_TEXT = (b"\xff", b"\xed\xa0\x80", b"http://[", b"\x80" * 4096)


@pytest.mark.parametrize("value", NOT_TEXT)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_bytes_that_are_no_text_in_any_header_are_refused_without_a_traceback(
    plane, connect, method, value, monkeypatch
):
    """Routes of the API and of the dashboard. A traceback would be 30 log lines for one anonymous request."""
    # Failed logins would wait for each other.
    monkeypatch.setattr(login_throttle, "_FIRST_INTERVAL_S", 0.0)
    names = (
        *(b"Authorization", b"X-Service-Key", b"X-Service-Secret", b"Content-Type", b"Content-Encoding", b"Origin"),
        *(b"Cookie", b"X-CSRF-Token", b"Host", b"Sec-Fetch-Site", b"HX-Request", b"HX-Current-URL", b"traceparent"),
        *(b"X-Forwarded-For", b"X-Forwarded-Proto", b"Access-Control-Request-Headers"),
    )
    prefixes = {b"Authorization": b"Bearer ", b"Cookie": b"redpoll="}
    await plane.records.set_app("3", {"allowed_origins": ("good.example",)})
    wire = await connect(plane.port)
    with capture_logs() as lines:
        for path in (b"/apps/3/events", b"/apps/3/auth", b"/dashboard", b"/dashboard/login", b"/dashboard/new-app"):
            for name in names:
                host = b"" if name == b"Host" else b"Host: test\r\n"
                header = name + b": " + prefixes.get(name, b"") + value
                body = b"" if method == "GET" else b"Content-Length: 0\r\n"
                reply = await wire.ask(
                    method.encode() + b" " + path + b" HTTP/1.1\r\n" + host + body + header + b"\r\n\r\n"
                )
                assert reply.status < 500, (path, name)
                if reply.headers.get("connection") == "close":
                    wire = await connect(plane.port)
    assert not [line for line in lines if line["log_level"] in ("error", "critical")]


# -- the rate limit ---------------------------------------------------------------------------------------------


async def test_triggers_above_the_rate_are_429_and_every_response_has_the_rate_headers(make_plane, redis):
    plane = await make_plane(redis.url, trigger_rate_per_minute=3)
    plane.plane.rate._wall_clock = lambda: 1_700_000_000.4
    left = []
    for event in ({}, {"name": ""}, {}):
        reply = await plane.trigger(**event)
        assert reply.headers["x-ratelimit-policy"] == "ip"
        assert reply.headers["x-ratelimit-limit"] == "3"
        assert reply.headers["x-ratelimit-reset"] == "1700000061"
        assert "retry-after" not in reply.headers
        left.append((reply.status, reply.headers["x-ratelimit-remaining"]))
    # An invalid body is counted: the rate limit comes before decoding.
    assert left == [(200, "2"), (400, "1"), (200, "0")]
    reply = await plane.trigger()
    assert code_of(reply) == (429, "rate_limited")
    assert (reply.headers["x-ratelimit-remaining"], reply.headers["x-ratelimit-policy"]) == ("0", "ip")
    assert 0 < int(reply.headers["retry-after"]) <= 60
    assert "REDPOLL_TRIGGER_RATE_PER_MINUTE" in reply.json()["error"]
    # Reading channels and signing subscriptions aren't triggers.
    reply = await plane.call("GET", "/apps/3/channels")
    assert reply.status == 200
    assert "x-ratelimit-limit" not in reply.headers


async def test_a_batch_counts_once_and_unauthenticated_requests_are_not_counted(make_plane, redis, sign):
    plane = await make_plane(redis.url, trigger_rate_per_minute=2)
    for _ in range(5):
        assert (await plane.ask("POST", sign("POST", "/apps/3/events", BODY, secret="no"), BODY)).status == 401
    items = [{"name": "e", "channel": "c", "data": ""}] * 10
    reply = await plane.call("POST", "/apps/3/batch_events", {"batch": items})
    assert (reply.status, reply.headers["x-ratelimit-remaining"]) == (200, "1")


async def test_the_client_address_comes_from_a_trusted_proxy_only(make_plane, redis, sign):
    async def triggers(plane, *clients):
        statuses = []
        for client in clients:
            target = sign("POST", "/apps/3/events", BODY)
            statuses.append((await plane.ask("POST", target, BODY, {"X-Forwarded-For": client})).status)
        return statuses

    plane = await make_plane(redis.url, trigger_rate_per_minute=1, trusted_proxies=("127.0.0.0/8",))
    assert await triggers(plane, "192.0.2.1", "192.0.2.2", "198.51.100.7, 192.0.2.1") == [200, 200, 429]


async def test_an_untrusted_client_can_not_choose_its_address(make_plane, redis, sign):
    plane = await make_plane(redis.url, trigger_rate_per_minute=1)
    for client, status in (("192.0.2.1", 200), ("192.0.2.2", 429)):
        reply = await plane.ask("POST", sign("POST", "/apps/3/events", BODY), BODY, {"X-Forwarded-For": client})
        assert reply.status == status


async def test_addresses_of_one_ipv6_network_share_the_rate_limit(make_plane, redis, sign):
    plane = await make_plane(redis.url, trigger_rate_per_minute=1, trusted_proxies=("127.0.0.0/8",))
    statuses = []
    for client in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"):
        target = sign("POST", "/apps/3/events", BODY)
        statuses.append((await plane.ask("POST", target, BODY, {"X-Forwarded-For": client})).status)
    assert statuses == [200, 429, 200]


async def test_the_rate_limit_is_shared_while_several_nodes_are_alive(make_plane, redis, sign, node):
    one = await make_plane(redis.url, trigger_rate_per_minute=4)
    # As another node's control plane: it takes from the same limit.
    other = RateLimit(4, SharedRate(one.plane.link, Keys()))
    other.share(is_shared=True)
    nodes = [node("0123456789ab", "here"), node("b" * 12, "there")]
    one.plane.receive(NodesChanged(nodes, "0123456789ab"))
    statuses = []
    for _ in range(2):
        reply = await one.trigger()
        statuses.append((reply.status, reply.headers["x-ratelimit-remaining"]))
        statuses.append((await other.take_shared("127.0.0.1")).passed)
    assert statuses == [(200, "3"), False, (200, "1"), False]
    reply = await one.trigger()
    assert code_of(reply) == (429, "rate_limited")
    assert reply.headers["x-ratelimit-remaining"] == "0"
    assert 0 < int(reply.headers["retry-after"]) <= 60
    assert (await other.take_shared("127.0.0.1")).passed
    # The other node ends, and this one counts by itself again.
    one.plane.receive(NodesChanged(nodes[:1], "0123456789ab"))
    assert (await one.trigger()).headers["x-ratelimit-remaining"] == "3"


async def test_a_node_takes_a_hundredth_of_the_limit_at_a_time(make_plane, redis, node):
    plane = await make_plane(redis.url, trigger_rate_per_minute=1_000)
    nodes = [node("0123456789ab", "here"), node("b" * 12, "there")]
    plane.plane.receive(NodesChanged(nodes, "0123456789ab"))
    scripts = []
    execute = plane.plane.link.execute

    async def counted(script, names, args):
        scripts.append(script)
        return await execute(script, names, args)

    plane.plane.link.execute = counted
    left = [int((await plane.trigger()).headers["x-ratelimit-remaining"]) for _ in range(25)]
    assert left == list(range(999, 974, -1))
    assert scripts.count(RATE) == 3


async def test_a_rate_of_0_means_no_limit_and_no_headers(make_plane, redis):
    plane = await make_plane(redis.url, trigger_rate_per_minute=0)
    for _ in range(400):
        reply = await plane.trigger()
    assert reply.status == 200
    assert "x-ratelimit-limit" not in reply.headers


# -- failures of cross-origin calls ------------------------------------------------------------------------------


async def test_a_page_calls_auth_with_an_auth_token_and_can_read_errors(plane):
    await plane.records.set_app("3", {"allowed_origins": ("good.example",)})
    _, shown = await token(plane, "auth")
    body = b"socket_id=1.2&channel_name=private-a"
    form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": "https://good.example"}
    reply = await plane.ask("POST", "/apps/3/auth", body, {**shown, **form})
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "https://good.example")
    refused = await plane.ask("POST", "/apps/3/auth", body, {"Authorization": "Bearer no", **form})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://good.example")
    evil = {**form, "Origin": "https://evil.example"}
    assert (
        "access-control-allow-origin" not in (await plane.ask("POST", "/apps/3/auth", body, {**shown, **evil})).headers
    )
