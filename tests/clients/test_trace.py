"""The event trace of a running server: was an event sent, to whom, and when."""

import json
from collections.abc import Callable

import aiohttp
from click.testing import CliRunner

from helpers.server import Server
from helpers.wire import Api, Socket, connect_many, eventually, signed_path, subscribe_all
from redpoll.cli import main


async def publish(server: Server, channel: str, **more: object) -> str:
    """Publishes one event and returns the trace id of the response."""
    body = json.dumps({"name": "order", "channels": [channel], "data": "{}", **more}).encode()
    target = signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
    async with aiohttp.ClientSession() as session, session.post(f"{server.public_url}{target}", data=body) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["X-Service-Trace-Id"]


def stages(trace: dict) -> list[str]:
    return [span["stage"] for span in trace["spans"]]


async def test_a_publish_says_which_worker_wrote_it_to_how_many_sockets(server: Server) -> None:
    sockets = await connect_many(server, 24)
    await subscribe_all(sockets, "traced")
    holding = {pid: len(ports) for pid, ports in server.client_ports().items() if ports}
    assert len(holding) > 1, "all on one worker shows little"
    trace_id = await publish(server, "traced", correlation_id="order-7")
    async with Api(server) as api:

        async def seen() -> int:
            status, trace = await api.ask("GET", f"/trace/{trace_id}")
            return sum(span.get("sockets", 0) for span in trace["spans"]) if status == 200 else -1

        # The goal is 2 s; a CI machine may be slower.
        await eventually(seen, 24, within_s=60)
        trace = await api.get(f"/trace/{trace_id}")
        assert stages(trace)[0] == "authenticated"
        assert stages(trace).count("accepted") == 1
        written = {span["worker"]: span["sockets"] for span in trace["spans"] if span["stage"] == "written"}
        assert sorted(written.values()) == sorted(holding.values())
        assert {span["worker"] for span in trace["spans"] if span["stage"] == "received"} == set(written)
        assert {span["channel"] for span in trace["spans"] if span["stage"] == "written"} == {"traced"}
        found = await api.get("/events/log", correlation_id="order-7")
        assert [event["trace_id"] for event in found["events"]] == [trace_id]
        assert {**trace, "spans": None} == {**found["events"][0], "spans": None}
    for socket in sockets:
        await socket.close()


async def test_a_trace_says_into_which_frame_an_event_was_joined(server: Server) -> None:
    rule = ["--prefix", "joined-", "--max-rate", "1", "--join", "delta"]
    words = ["history", "rule", "add", server.app_id, *rule, "--data-dir", str(server.folder / "data")]
    made = CliRunner().invoke(main, words)
    assert made.exit_code == 0, made.output
    socket = await Socket.connect(server)
    await socket.subscribe("joined-a")
    items = [{"name": "text", "channel": "joined-a", "data": json.dumps({"delta": piece})} for piece in "abc"]
    body = json.dumps({"batch": items}).encode()
    target = signed_path(server, "POST", f"/apps/{server.app_id}/batch_events", body)
    async with aiohttp.ClientSession() as session, session.post(f"{server.public_url}{target}", data=body) as answer:
        trace_id = answer.headers["X-Service-Trace-Id"]
    await socket.until(lambda: len(socket.all("text")) == 2)
    assert [json.loads(frame["data"])["delta"] for frame in socket.all("text")] == ["a", "bc"]
    async with Api(server) as api:

        async def joined() -> list[tuple[int, int]]:
            status, trace = await api.ask("GET", f"/trace/{trace_id}")
            spans = trace["spans"] if status == 200 else []
            return [(span["parts"], span["sockets"]) for span in spans if span.get("frame")]

        await eventually(joined, [(2, 1), (2, 1)])
        trace = await api.get(f"/trace/{trace_id}")
        assert len({span["frame"] for span in trace["spans"] if "frame" in span}) == 1
    await socket.close()


async def test_a_client_event_can_be_traced_to_its_webhook(wait_until: Callable) -> None:
    allowed = {"webhook_allow_http": 1, "webhook_allow_addresses": "127.0.0.0/8"}
    with Server(workers=2, **allowed) as server:
        line = ["webhook", "create", server.app_id, "http://127.0.0.1:1/hook", "--events", "client_event", "--json"]
        made = CliRunner().invoke(main, [*line, "--data-dir", str(server.folder / "data")])
        assert made.exit_code == 0, made.output
        sender, hearer = await Socket.connect(server), await Socket.connect(server)
        await sender.subscribe("private-room")
        await hearer.subscribe("private-room")
        async with Api(server) as api:

            async def hooked() -> bool:
                # Every worker knows the endpoint within a second.
                sender.send({"event": "client-x", "channel": "private-room", "data": {"n": 1}})
                events = (await api.get("/events/log", name="client-x"))["events"]
                traces = [await api.get(f"/trace/{event['trace_id']}") for event in events]
                return any("webhook" in stages(trace) and "written" in stages(trace) for trace in traces)

            await eventually(hooked, True, within_s=60)
            (event, *_) = (await api.get("/events/log", name="client-x"))["events"]
            assert event["caller"] == f"client {sender.socket_id}"
            assert event["channels"] == ["private-room"]
        await sender.close()
        await hearer.close()
