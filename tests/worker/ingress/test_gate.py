"""The gate: which requests become WebSockets, which are refused and how, and what the worker answers itself."""

import asyncio
import json
import zlib

import msgspec
import pytest
import websockets

from redpoll.worker.hub import addresses
from redpoll.worker.ingress.gate import Gate

KEY = "278d425bdf160c739803"
UPGRADE = (
    "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


async def exchange(worker, request: bytes, timeout_s: float = 60.0) -> bytes:
    """Send raw bytes to the worker's port and read until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), timeout_s)
    writer.close()
    return answer


def error_of(answer: bytes) -> tuple[int, dict]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def refusal(bench, worker, path: str, **more) -> tuple[dict, int, str]:
    """The error frame, close code and close reason that a connection to `path` meets."""
    client = await bench.open(worker, path, **more)
    frame = json.loads(await client.socket.recv())
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await client.socket.recv()
    return frame, closed.value.rcvd.code, closed.value.rcvd.reason


class TestUpgrades:
    async def test_a_known_key_gets_connection_established_as_its_first_frame(self, bench):
        worker = await bench.start(activity_timeout_s=77)
        client = await bench.open(worker)
        frame = await client.next()
        assert frame["event"] == "pusher:connection_established"
        assert set(frame) == {"event", "data"}
        data = json.loads(frame["data"])
        assert data["activity_timeout"] == 77
        first, second = data["socket_id"].split(".")
        assert first.isdecimal()
        assert second.isdecimal()

    async def test_only_clients_that_ask_to_recover_get_recover_true(self, bench):
        worker = await bench.start()
        for query, expected in (("&recover=1", True), ("", None), ("&recover=0", None), ("&recovery=1", None)):
            client = await bench.open(worker, f"/app/{KEY}?protocol=7{query}")
            assert json.loads((await client.next())["data"]).get("recover") is expected

    async def test_no_two_connections_share_a_socket_id(self, bench):
        worker = await bench.start()
        ids = {(await bench.client(worker)).socket_id for _ in range(50)}
        assert len(ids) == 50

    @pytest.mark.parametrize(
        ("path", "code"),
        [
            ("/app/unknown?protocol=7", 4001),
            ("/app/", 4005),
            ("/nowhere", 4005),
            (f"/app/{KEY}?protocol=seven", 4006),
            (f"/app/{KEY}?protocol=4", 4007),
            (f"/app/{KEY}?protocol=8", 4007),
        ],
    )
    async def test_a_refusal_has_its_code_in_an_error_frame_and_in_the_close(self, bench, path, code):
        worker = await bench.start()
        frame, close_code, close_reason = await refusal(bench, worker, path)
        assert frame["event"] == "pusher:error"
        assert frame["data"]["code"] == code == close_code
        assert frame["data"]["message"].startswith(close_reason[:100])

    async def test_a_disabled_app_is_refused_with_4003(self, bench):
        worker = await bench.start()
        app = worker.directory.find(KEY)
        await bench.put(app.id, msgspec.structs.replace(app, enabled=False))
        await bench.settled(worker, lambda: not worker.directory.find(KEY).enabled)
        _frame, code, _reason = await refusal(bench, worker, f"/app/{KEY}?protocol=7")
        assert code == 4003

    async def test_a_foreign_origin_is_refused_with_4009(self, bench):
        worker = await bench.start()
        app = worker.directory.find(KEY)
        await bench.put(app.id, msgspec.structs.replace(app, allowed_origins=("good.example",)))
        await bench.settled(worker, lambda: worker.directory.find(KEY).allowed_origins)
        _frame, code, _reason = await refusal(
            bench, worker, f"/app/{KEY}?protocol=7", origin="https://evilgood.example"
        )
        assert code == 4009
        client = await bench.open(worker, origin="https://good.example")
        assert (await client.next())["event"] == "pusher:connection_established"

    async def test_a_prefix_before_app_is_served(self, bench):
        worker = await bench.start()
        client = await bench.open(worker, f"/behind/a/proxy/app/{KEY}?protocol=7")
        assert (await client.next())["event"] == "pusher:connection_established"

    @pytest.mark.parametrize("before", ["//[", "//[x]", "http://[", "http://h:port"])
    async def test_what_is_no_url_before_app_is_a_prefix_too(self, bench, before):
        worker = await bench.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        writer.write(UPGRADE.format(path=f"{before}/app/{KEY}").encode())
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).startswith(b"HTTP/1.1 101 ")
        writer.close()

    async def test_connection_may_list_upgrade_among_others(self, bench):
        worker = await bench.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        writer.write(UPGRADE.format(path=f"/app/{KEY}?protocol=7").encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head  # RFC 6455 section 1.3
        writer.close()

    async def test_upgrades_are_503_until_the_directory_is_loaded(self, bench):
        worker = await bench.start()
        worker.directory.complete = False
        status, error = error_of(await exchange(worker, UPGRADE.format(path=f"/app/{KEY}").encode()))
        assert status == 503
        assert error["code"] == "unavailable"


class TestPlainHttp:
    async def test_the_websocket_address_without_an_upgrade_is_426(self, bench):
        worker = await bench.start()
        status, error = error_of(await exchange(worker, f"GET /app/{KEY} HTTP/1.0\r\n\r\n".encode()))
        assert status == 426
        assert set(error) == {"error", "code", "status", "trace_id"}

    async def test_a_wrong_websocket_version_is_426_and_names_the_right_one(self, bench):
        worker = await bench.start()
        request = UPGRADE.format(path=f"/app/{KEY}").replace("Version: 13", "Version: 8")
        answer = await exchange(worker, request.encode())
        assert error_of(answer)[0] == 426
        assert b"Sec-WebSocket-Version: 13\r\n" in answer

    @pytest.mark.parametrize(
        "garbage",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            b"hello\r\n\r\n",
            b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        ],
    )
    async def test_garbage_is_answered_400_and_the_worker_goes_on(self, bench, garbage):
        worker = await bench.start()
        status, error = error_of(await exchange(worker, garbage))
        assert status == 400
        assert error["code"] == "bad_request"
        await bench.client(worker)

    async def test_a_head_larger_than_16_kib_is_431(self, bench):
        worker = await bench.start()
        request = b"GET / HTTP/1.1\r\nHost: x\r\nX-Large: " + b"a" * 20_000
        assert error_of(await exchange(worker, request))[0] == 431

    async def test_an_incomplete_head_is_answered_408(self, bench):
        worker = await bench.start(head_timeout_s=0.5)
        status, _error = error_of(await exchange(worker, b"GET / HTTP/1.1\r\nHost:"))
        assert status == 408

    async def test_a_silent_connection_is_closed_without_a_byte(self, bench):
        worker = await bench.start(head_timeout_s=0.5)
        assert await exchange(worker, b"") == b""

    async def test_without_a_control_plane_the_worker_answers_503_itself(self, bench):
        worker = await bench.start()
        answer = await exchange(worker, b"GET /apps/1/channels HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert error_of(answer)[0] == 503
        assert b"Retry-After: 1\r\n" in answer

    async def test_without_a_control_plane_the_worker_is_alive_and_not_ready(self, bench):
        worker = await bench.start()
        assert b" 200 OK" in await exchange(worker, b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 503 " in await exchange(worker, b"GET /readyz HTTP/1.0\r\n\r\n")


class TestAddresses:
    @pytest.fixture(autouse=True)
    def slots_of_their_own(self, monkeypatch):
        """Python's hash differs in each process, and now and then gives two addresses the same slot."""
        monkeypatch.setattr(addresses, "hash", lambda text: zlib.crc32(text.encode()), raising=False)

    async def test_connections_of_one_address_beyond_the_limit_are_refused_with_4100(self, bench):
        worker = await bench.start(max_connections_per_address=2, trusted_proxies=("127.0.0.1",))
        client = {"additional_headers": {"X-Forwarded-For": "8.8.8.8"}}
        first, _ = [await bench.client(worker, **client) for _ in range(2)]
        frame, code, reason = await refusal(bench, worker, f"/app/{KEY}?protocol=7", **client)
        assert (frame["data"]["code"], code) == (4100, 4100)
        assert "your address" in reason
        assert worker.gate.addresses.refused == 1
        await bench.client(worker, additional_headers={"X-Forwarded-For": "8.8.4.4"})
        await first.socket.close()
        await bench.settled(worker, lambda: worker.gate.connections == 2)
        await bench.client(worker, **client)

    async def test_subscribes_of_one_address_are_limited_over_all_its_connections(self, bench):
        worker = await bench.start(
            subscribes_per_second_per_address=1, max_connections_per_address=0, trusted_proxies=("127.0.0.1",)
        )
        client = {"additional_headers": {"X-Forwarded-For": "8.8.8.8"}}
        first, second = [await bench.client(worker, **client) for _ in range(2)]
        for number in range(30):
            await first.subscribe(f"one-{number}")
            await second.subscribe(f"two-{number}")
        # As many as a minute allows, and those that came back meanwhile.
        for number in range(30, 100):
            await second.ask(f"two-{number}")
        refusal = await second.until("pusher:subscription_error")
        assert json.loads(refusal["data"]) | {"error": ""} == {"type": "LimitReached", "error": "", "status": 429}
        assert 0 < worker.hub.subscribe_rates.refused <= 70
        other = await bench.client(worker, additional_headers={"X-Forwarded-For": "8.8.4.4"})
        await other.subscribe("three")
        worker.gate.settings_changed(worker.gate.settings.changed_by({"subscribes_per_second_per_address": 0}))
        await first.subscribe("one-more")

    async def test_a_closed_connection_counts_until_its_descriptor_is_closed(self, bench):
        """Clients that violated the protocol and kept TCP open filled all descriptors of a worker."""
        worker = await bench.start()
        # However long the ten take, the janitor ends none of them.
        worker.janitor.close_timeout_s = 60.0
        writers = []
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
            # A frame without a mask: closed with 1002.
            writer.write(UPGRADE.format(path=f"/app/{KEY}").encode() + b"\x81\x01x")
            await asyncio.wait_for(reader.read(), 60)
            writers.append(writer)
        assert len(worker.hub.open_connections) == 0
        assert worker.gate.connections == 10
        for writer in writers:
            writer.close()
        await bench.settled(worker, lambda: worker.gate.connections == 0)


async def test_a_connection_without_room_no_longer_counts_once_it_is_dropped(bench, monkeypatch):
    """Its descriptor closes in the same pass; the connections that come next must not be dropped for it."""
    counts = []
    connected = Gate.connected

    def note(gate, connection):
        connected(gate, connection)
        counts.append(gate.connections - len(gate.strangers.leaving))

    worker = await bench.start()
    client = await bench.client(worker)
    worker.gate.max_connections = -47
    monkeypatch.setattr(Gate, "connected", note)
    assert [await exchange(worker, b"") for _ in range(5)] == [b""] * 5
    assert counts == [1] * 5
    await client.nothing_more()
