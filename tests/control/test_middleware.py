"""What every request passes, through real sockets: routes, bodies, credentials, errors."""

import asyncio
import json
import socket
import time

import pytest

from redpoll import handover as passages

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
OTHER_KEY, OTHER_SECRET = "1111111111111111aaaa", "2222222222222222bbbb"
BODY = b'{"name":"e","channels":["c"],"data":"{}"}'


def code_of(reply):
    return reply.status, reply.json()["code"]


# -- routes -----------------------------------------------------------------------------------------------------


async def test_an_unknown_address_is_404_in_the_one_error_shape(plane):
    for path in ("/nothing", "/apps/3", "/apps/3/events/", "/api/v1/healthz", "/app/key"):
        reply = await plane.ask("GET", path)
        assert code_of(reply) == (404, "not_found")
        assert set(reply.json()) == {"error", "code", "status", "trace_id"}
        assert reply.json()["trace_id"] == reply.headers["x-service-trace-id"]
        assert reply.headers["content-type"] == "application/json"


async def test_a_wrong_method_is_405_and_names_the_right_ones(plane):
    reply = await plane.ask("DELETE", "/apps/3/events")
    assert code_of(reply) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    assert (await plane.ask("PUT", "/apps/3/auth")).headers["allow"] == "OPTIONS, POST"


async def test_head_is_get_without_a_body(plane):
    reply = await plane.ask("HEAD", "/healthz")
    assert (reply.status, reply.headers["content-length"]) == (200, "15")
    assert (await plane.ask("GET", "/healthz")).body == b'{"status":"ok"}'


async def test_the_proxies_form_of_a_target_is_understood(plane, sign):
    target = "http://example.com" + sign("POST", "/apps/3/events", BODY)
    assert (await plane.ask("POST", target, BODY)).status == 200
    assert (await plane.ask("GET", "http://example.com/healthz")).status == 200
    assert (await plane.ask("OPTIONS", "*")).status == 404


# -- credentials ------------------------------------------------------------------------------------------------


async def test_the_vectors_of_the_protocols_page(plane):
    plane.plane.front._clock = lambda: 1353088179.0
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


async def test_an_empty_bodys_md5_is_taken_on_get(plane, sign):
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


async def test_a_wrong_signature_is_told_what_to_sign_and_never_the_digest(plane, sign):
    target = sign("POST", "/apps/3/events", BODY, secret="wrong")
    reply = await plane.ask("POST", target, BODY)
    assert code_of(reply) == (401, "invalid_signature")
    assert "POST\\n/apps/3/events\\nauth_key=" in reply.json()["error"]
    right = sign("POST", "/apps/3/events", BODY).split("auth_signature=")[1]
    assert right not in reply.json()["error"]
    assert SECRET not in reply.json()["error"]


@pytest.mark.parametrize(("off_s", "status"), [(-598, 200), (598, 200), (-602, 401), (602, 401)])
async def test_a_timestamp_may_be_ten_minutes_off(plane, sign, off_s, status):
    target = sign("POST", "/apps/3/events", BODY, timestamp=str(int(time.time()) + off_s))
    reply = await plane.ask("POST", target, BODY)
    assert reply.status == status
    if status == 401:
        assert reply.json()["code"] == "timestamp_out_of_range"


async def test_no_app_and_anothers_key_are_answered_alike(plane, sign):
    unknown = await plane.ask("POST", sign("POST", "/apps/999/events", BODY), BODY)
    others = await plane.ask("POST", sign("POST", "/apps/4/events", BODY), BODY)
    assert code_of(unknown) == code_of(others) == (401, "unauthorized")
    assert unknown.json()["error"] == others.json()["error"]
    pair = {"X-Service-Key": KEY, "X-Service-Secret": SECRET}
    assert code_of(await plane.ask("POST", "/apps/999/events", BODY, pair)) == (401, "unauthorized")


async def test_the_header_pair_opens_its_app_and_no_other(plane):
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


async def test_the_first_credential_present_decides_alone(plane, sign):
    target = sign("POST", "/apps/3/events", BODY)
    pair = {"X-Service-Key": KEY, "X-Service-Secret": SECRET}
    wrong_pair = {"X-Service-Key": KEY, "X-Service-Secret": "wrong"}
    bearer = {"Authorization": "Bearer something"}
    assert (await plane.ask("POST", target, BODY, wrong_pair)).status == 401
    assert (await plane.ask("POST", target, BODY, {**bearer, **pair})).status == 401
    # Another scheme is none of ours: proxies put theirs there.
    assert (await plane.ask("POST", target, BODY, {"Authorization": "Basic eDp5"})).status == 200


async def test_without_a_credential_the_answer_is_401_whatever_the_app(plane):
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


async def test_an_announced_body_that_is_too_large_is_refused_before_it_comes(plane):
    plane.wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nContent-Length: 268435456\r\n\r\n")
    assert code_of(await plane.wire.receive()) == (413, "payload_too_large")


async def test_chunks_without_end_are_cut_at_the_limit(plane, connect):
    plane.wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(17):
        plane.wire.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    assert code_of(await plane.wire.receive()) == (413, "payload_too_large")


async def test_a_body_in_chunks_is_as_good_as_a_counted_one(plane, sign):
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


async def test_a_body_that_trickles_is_cut_at_its_deadline(make_plane, redis):
    plane = await make_plane(redis.url, body_timeout_s=0.2)
    plane.wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n")
    began = time.monotonic()
    plane.wire.send(b"{")
    reply = await plane.wire.receive()
    assert reply.status == 408
    assert reply.json()["status"] == 408
    assert reply.headers["connection"] == "close"
    assert time.monotonic() - began < 5


async def test_a_client_that_leaves_half_way_through_its_body_is_no_error(plane, connect, wait_until):
    wire = await connect(plane.port)
    before = len(plane.plane.connections.connections)
    wire.send(b"POST /apps/3/events HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")
    await wait_until(lambda: plane.plane.connections.requests_count)
    wire.writer.transport.abort()
    await wait_until(lambda: len(plane.plane.connections.connections) == before - 1)
    assert 500 not in plane.plane.routes.unmatched.answers
    assert 500 not in plane.plane.routes.find("/apps/3/events")[0]["POST"].answers


async def test_an_upgrade_that_no_worker_takes_is_503_and_ends_the_connection(plane, tmp_path):
    reader, writer = await asyncio.open_unix_connection(sock=await handed_over(plane, tmp_path))
    writer.write(b"GET /app/k HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nframes")
    everything = await asyncio.wait_for(reader.read(), 10)
    assert everything.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 503" in everything
    assert b"Retry-After: 1" in everything
    writer.close()


async def handed_over(plane, tmp_path):
    """The client's end of a connection whose worker has gone since."""
    client, accepted = socket.socketpair()
    client.setblocking(False)
    passage = passages.connect(str(tmp_path / "handover.sock"), lambda *_: None, lambda: None)
    passage.send(accepted.detach(), ("203.0.113.9", 1), b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
    async with asyncio.timeout(10):
        while not plane.plane.handover.received_total:
            await asyncio.sleep(0.005)
        passage.close()
        while plane.plane.handover.workers:
            await asyncio.sleep(0.005)
    return client


async def test_on_the_control_port_an_upgrade_is_an_ordinary_request(plane):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert (await plane.ask("GET", "/app/k", headers=upgrade)).status == 404
    assert (await plane.ask("GET", "/healthz", headers=upgrade)).status == 200
    assert (await plane.ask("GET", "/healthz", headers={"Connection": "Upgrade", "Upgrade": "h2c"})).status == 200


# -- errors and traces ------------------------------------------------------------------------------------------


async def test_what_is_no_http_is_answered_in_the_one_error_shape(plane):
    plane.wire.send(b"GARBAGE\r\n\r\n")
    reply = await plane.wire.receive()
    assert code_of(reply) == (400, "bad_request")
    assert reply.json()["trace_id"] == reply.headers["x-service-trace-id"]
    assert await plane.wire.wait_closed() == b""


async def test_a_mistake_of_ours_is_500_and_tells_its_trace_id_only(plane):
    async def fails(call):
        raise RuntimeError("the password is 1234")

    plane.plane.routes.find("/healthz")[0]["GET"].handler = fails
    reply = await plane.ask("GET", "/healthz")
    assert code_of(reply) == (500, "internal")
    assert b"1234" not in reply.body
    # The connection lives.
    assert (await plane.ask("GET", "/")).body == b"OK"


async def test_an_inbound_traceparent_gives_the_trace_id(plane, sign):
    target = sign("POST", "/apps/3/events", BODY)
    known = "0af7651916cd43dd8448eb211c80319c"
    reply = await plane.ask("POST", target, BODY, {"traceparent": f"00-{known}-b7ad6b7169203331-01"})
    assert reply.headers["x-service-trace-id"] == known
    for bad in (f"00-{'0' * 32}-b7ad6b7169203331-01", "00-xyz", f"ff-{known}-b7ad6b7169203331-01", known):
        reply = await plane.ask("POST", target, BODY, {"traceparent": bad})
        assert reply.status == 200
        assert reply.headers["x-service-trace-id"] != known
        assert len(reply.headers["x-service-trace-id"]) == 32


async def test_pages_of_origins_that_are_not_allowed_read_nothing(plane):
    app = plane.records.apps["3"]
    plane.records.apps["3"] = type(app)(id=app.id, name=app.name, keys=app.keys, allowed_origins=("good.example",))
    for origin, allowed in (("https://good.example", True), ("https://evil.example", False), ("null", False)):
        reply = await plane.ask("OPTIONS", "/apps/3/auth", headers={"Origin": origin})
        assert reply.status == 204
        assert ("access-control-allow-origin" in reply.headers) is allowed
    # Which apps there are isn't told by the difference.
    reply = await plane.ask("OPTIONS", "/apps/999/auth", headers={"Origin": "https://evil.example"})
    assert reply.headers["access-control-allow-origin"] == "https://evil.example"


async def test_an_app_that_is_switched_off_is_403_for_its_own_key_only(plane, sign):
    app = plane.records.apps["3"]
    plane.records.apps["3"] = type(app)(id=app.id, name=app.name, keys=app.keys, enabled=False)
    assert code_of(await plane.ask("POST", sign("POST", "/apps/3/events", BODY), BODY)) == (403, "app_disabled")
    assert (await plane.ask("POST", sign("POST", "/apps/3/events", BODY, secret="no"), BODY)).status == 401


async def test_every_answer_is_counted_under_its_route(plane):
    await plane.trigger()
    await plane.trigger(name="")
    await plane.ask("GET", "/nothing")
    assert plane.plane.routes.find("/apps/3/events")[0]["POST"].answers == {200: 1, 400: 1}
    assert plane.plane.routes.unmatched.answers[404] == 1


async def test_an_error_text_is_json_whatever_the_caller_wrote(plane, sign):
    target = sign("POST", "/apps/3/events", BODY, params={"x": '"\\\n\x00ü'}, secret="wrong")
    reply = await plane.ask("POST", target, BODY)
    assert reply.status == 401
    json.loads(reply.body)
