"""What a worker writes about connections that are being debugged."""

import json
import time

import pytest
import structlog

from cluster.links import deafen, hear


@pytest.fixture
def lines(monkeypatch):
    # If an earlier test of this process has configured logging, the module's logger keeps to that.
    monkeypatch.setattr("redpoll.cluster.debug_log.log", structlog.get_logger())
    with structlog.testing.capture_logs() as logged:
        yield logged


@pytest.fixture
def patient(monkeypatch):
    """No line says that a subscribe waits, on the slowest machine."""
    monkeypatch.setattr("redpoll.cluster.membership.join_queue._NOTED_S", 60.0)


def phrases(lines):
    return [line["what"] for line in lines if line["event"] == "debug"]


async def test_each_step_of_a_connection_of_the_app_has_a_line(bench, lines, patient):
    worker = await bench.start()
    await bench.change(debug_until=time.time() + 60)
    client = await bench.client(worker)
    await client.subscribe("private-a")
    await bench.publish("private-a", "greeting", "hello")
    await client.events(1)
    await client.send("client-x", "{}", channel="private-a")
    await client.send("pusher:unsubscribe", {"channel": "private-a"})
    await client.send("nonsense")
    await client.until("pusher:error")
    await client.socket.close()
    await bench.settled(worker, lambda: "connection ended" in phrases(lines))
    # The client's own event comes back from Redis at some time, for nobody.
    assert [phrase for phrase in phrases(lines) if phrase != "event sent"] == [
        "connection opened",
        "message received",
        "subscribe accepted",
        "subscribed",
        "message received",
        "client event accepted",
        "message received",
        "channel left",
        "message received",
        "frame sent",
        "connection ended",
    ]
    shown = [line for line in lines if line["event"] == "debug"]
    assert {line["socket"] for line in shown} == {client.socket_id, ""}
    sent = next(line for line in shown if line["what"] == "event sent")
    assert (sent["channel"], sent["event_name"], sent["sockets"], sent["data"]) == ("private-a", "greeting", 1, "hello")
    ended = next(line for line in shown if line["what"] == "connection ended")
    assert ended["code"] == 1000
    assert client.sign("private-a").partition(":")[2] not in json.dumps(lines)


async def test_of_one_connection_only_its_lines_are_written(bench, lines, patient):
    worker = await bench.start()
    client, other = await bench.client(worker), await bench.client(worker)
    await bench.change(debug_until=time.time() + 60, debug_socket=client.socket_id)
    await other.subscribe("presence-a", {"user_id": "1"})
    await bench.publish("presence-a", "first", "1")
    await other.events(1)
    await client.subscribe("presence-a", {"user_id": "2"})
    await bench.publish("presence-a", "second", "2")
    await client.events(1)
    await other.events(1)
    await client.socket.close()
    await bench.settled(worker, lambda: "connection ended" in phrases(lines))
    assert phrases(lines)[:4] == ["message received", "subscribe accepted", "subscribed", "event sent"]
    assert phrases(lines)[4:] == ["connection ended"]
    assert {line["socket"] for line in lines if line["event"] == "debug"} == {client.socket_id}


async def test_a_refused_client_is_shown_with_the_reason(bench, lines):
    worker = await bench.start()
    await bench.change(debug_until=time.time() + 60, allowed_origins=("example.com",))
    refused = await bench.open(worker, origin="https://evil.example")
    assert await refused.closed_with() == 4009
    (line,) = [line for line in lines if line.get("what") == "connection refused"]
    assert (line["code"], line["headers"]["origin"]) == (4009, "https://evil.example")


async def test_a_connection_that_the_server_closes_has_the_reason(bench, lines):
    worker = await bench.start()
    client = await bench.client(worker)
    await bench.change(debug_until=time.time() + 60)
    worker.hub.close_socket("1", client.socket_id)
    assert await client.closed_with() == 4009
    (line,) = [line for line in lines if line.get("what") == "closed by the server"]
    assert (line["socket"], line["code"]) == (client.socket_id, 4009)


async def test_nothing_is_written_after_the_end(bench, lines):
    worker = await bench.start()
    client = await bench.client(worker)
    await bench.change(debug_until=time.time() - 1)
    await client.subscribe("other")
    assert phrases(lines) == []
    assert not worker.hub.debugging.any


async def test_a_subscribe_that_waits_says_what_for(bench, lines):
    worker = await bench.start()
    client, other = await bench.client(worker), await bench.client(worker)
    await bench.change(debug_until=time.time() + 60, debug_socket=client.socket_id)
    deafen(worker.link)
    await client.ask("presence-a", {"user_id": "1"})
    await other.ask("presence-a", {"user_id": "2"})
    await bench.settled(worker, lambda: phrases(lines).count("subscribe waits") >= 2)
    hear(worker.link)
    await client.until("pusher_internal:subscription_succeeded")
    line = next(line for line in lines if line.get("what") == "subscribe waits")
    assert (line["socket"], line["channel"], line["state"]) == (client.socket_id, "presence-a", "in flight")
    assert (line["waits_for"], line["redis"]) == ("Redis' answer", "open")
    assert line["for_s"] >= 1
    assert {line["socket"] for line in lines if line.get("what") == "subscribe waits"} == {client.socket_id}
    connection = next(one for one in worker.hub.open_connections if one.session.socket_id == client.socket_id)
    assert str(connection) == f"connection {client.socket_id}"
