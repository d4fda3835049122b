"""Webhooks that a back end pulls as a stream of events, from a whole server; and streams alone, with a clock."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from helpers.pulled_server import acknowledge, delivery_stream, occupying, pull, pulled_server
from helpers.reading import EVENTS
from helpers.wire import Api, signed_path
from redpoll.http.messages import FIELDS, HTTP_1_0, PULL_LIMIT, PullTerms
from redpoll.http.reader import ParsedRequest
from redpoll.loop.writable import WRITABLE_BELOW_BYTES
from redpoll.worker.streams.pull_stream import PullStream
from redpoll.worker.streams.pulls import MAX_PULLS_OF_APP, Pulls, PullState

# -- in a whole server -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    """Two workers; what was handed out stays so until the end of the test."""
    with pulled_server(workers=2, lease_s=600) as running:
        yield running


async def test_each_delivery_is_an_event_with_what_an_answer_has(server, api, occupy):
    async with delivery_stream(server) as stream:
        channels = [await occupy(), await occupy()]
        events = [await stream.next() for _ in channels]
        assert [event.name for event in events] == ["delivery", "delivery"]
        deliveries = [event.json for event in events]
        assert [event.id for event in events] == [one["id"] for one in deliveries]
        assert {(one["channel"], one["attempt"]) for one in deliveries} == {(channel, 1) for channel in channels}
        first = deliveries[0]
        assert sorted(first) == ["attempt", "body", "channel", "endpoint_id", "event", "headers", "id"]
        checked = {"payload": first["body"], "signature": first["headers"]["X-Service-Signature"]}
        assert (await api.ask("POST", "/webhooks/verify", checked))[1]["valid"]
        assert await acknowledge(api, deliveries) == 2
        assert stream.response.headers["Cache-Control"] == "no-cache, no-transform"


async def test_stream_has_at_most_its_limit_unacknowledged(server, api, occupy):
    async with delivery_stream(server, limit="2", endpoint=server.webhook["id"]) as stream:
        channels = [await occupy() for _ in range(5)]
        taken = [(await stream.next()).json for _ in range(2)]
        # The others are there for everybody else.
        others = []
        while len(others) < 2:
            others += await pull(api, limit=str(2 - len(others)), wait="60")
        assert await acknowledge(api, taken[:1]) == 1
        last = (await stream.next()).json
        assert sorted(one["channel"] for one in [*taken, *others, last]) == sorted(channels)
        assert {one["attempt"] for one in [*taken, *others, last]} == {1}
        assert await acknowledge(api, [taken[1], *others, last]) == 4


async def test_what_a_stream_has_not_acknowledged_comes_again_also_on_the_same_stream():
    with pulled_server() as server:
        async with Api(server) as api, occupying(server) as occupy, delivery_stream(server, limit="1") as stream:
            channels = {await occupy(), await occupy()}
            seen = {}
            while len(seen) < 2 or max(seen.values()) < 2:
                one = (await stream.next()).json
                assert one["attempt"] == seen.get(one["id"], 0) + 1
                seen[one["id"]] = one["attempt"]
                if one["attempt"] == 2:
                    channels.remove(one["channel"])
                    assert await acknowledge(api, [one]) == 1
            assert len(channels) == 1


async def test_client_that_has_left_takes_nothing_and_the_next_stream_goes_on(server, api, occupy):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    path = f"/apps/{server.app_id}/webhooks/stream"
    target = signed_path(server, "GET", path)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n".encode())
    assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    for _ in range(2):
        # Each ends its stream with a delivery that it has acknowledged.
        async with delivery_stream(server) as stream:
            await occupy()
            one = (await stream.next()).json
            assert one["attempt"] == 1
            assert await acknowledge(api, [one]) == 1


async def test_streams_count_among_the_requests_of_an_app():
    with pulled_server(lease_s=600) as server:
        async with Api(server, connections=100) as api, occupying(server) as occupy:
            async with delivery_stream(server), delivery_stream(server) as stream:
                asked = [api.ask("GET", "/webhooks/stream", params={"wait": "60"}) for _ in range(MAX_PULLS_OF_APP - 1)]
                waiting = [asyncio.create_task(one) for one in asked]
                status, body = await next(asyncio.as_completed(waiting))
                assert (status, body["code"]) == (429, "too_many_connections")
                refused = await api.ask("GET", "/webhooks/stream", headers=EVENTS)
                assert (refused[0], refused[1]["code"]) == (429, "too_many_connections")
                for one in waiting:
                    one.cancel()
                assert stream.response.status == 200
            # There is room again, also for a stream.
            async with delivery_stream(server) as stream:
                await occupy()
                assert (await stream.next()).json["attempt"] == 1


async def test_wrong_requests_get_an_answer(api):
    for params, status, code in (
        ({"limit": "101"}, 400, "bad_request"),
        ({"endpoint": "none"}, 404, "not_found"),
    ):
        answer = await api.ask("GET", "/webhooks/stream", params=params, headers=EVENTS)
        assert (answer[0], answer[1]["code"]) == (status, code)


async def test_stopping_server_ends_streams(server):
    """It is the last test of the whole server, which ends here. An answer that isn't whole would be an error."""
    async with delivery_stream(server) as stream:
        await asyncio.to_thread(server.stop)
        assert await stream.rest() == []


# -- one stream --------------------------------------------------------------------------------------------------

HEAD = "HTTP/1.1 200 OK\r\nX-Stream-App: 1\r\nX-Service-Trace-Id: 7\r\nX-Pull-Terms: {}\r\n\r\n"


class Peer:
    """The connection of a stream: what it asked control for, and what was written."""

    def __init__(self):
        self.limits = []
        self.written = b""
        self.finished = False
        self.stream = SimpleNamespace(write_http=self._write, unsent_bytes=0)

    def _write(self, data):
        self.written += data

    def recognised(self):
        pass

    def ask(self, pull):
        fields = dict(pull.request.fields)
        self.limits.append(int(fields[FIELDS.index(PULL_LIMIT)]))

    def pass_on(self, flags, response):
        self.written += response

    pass_unanswered = None

    def reply(self, response):
        self.written += response

    def finish(self, last):
        self.written += last
        self.finished = True


class Hearing:
    """Hears what the test says."""

    def topic(self, app_id, name):
        return name

    def add(self, listener):
        self.listener = listener

    def remove(self, listener):
        pass


class World:
    """A worker with one stream. `now` is the clock; `read` are those that wait for their clients to read."""

    def __init__(self, limit=3, lease_s=60.0, flags=0):
        self.now = 0.0
        self.admits = True
        self.read = []
        self.hearing = Hearing()
        self.pulls = Pulls(self.hearing, lambda: self.admits)
        self.pulls.now_s = lambda: self.now
        self.pulls.when_read = lambda stream, then: self.read.append(then)
        self.peer = Peer()
        self.terms = PullTerms(30, limit, lease_s, float("inf"))
        # Clients can't say how much a stream may have.
        request = ParsedRequest(flags, b"GET", b"/apps/1/webhooks/stream", [(FIELDS.index(PULL_LIMIT), b"99")], [], b"")
        self.stream = PullStream(self.pulls, self.peer, request)
        self.stream.ask()

    def answer(self, *ids, next_s=float("inf")):
        body = json.dumps({"deliveries": [{"id": delivery_id, "event": "e"} for delivery_id in ids]})
        self.stream.answered(0, (HEAD.format(self.terms._replace(next_s=next_s).packed()) + body).encode())

    def hear(self, payload):
        self.hearing.listener.pushed(payload)

    @property
    def events(self):
        return [line[4:] for line in self.peer.written.decode().splitlines() if line.startswith("id: ")]


async def test_first_question_takes_nothing_and_the_next_ones_as_much_as_there_is_room():
    world = World()
    assert world.peer.limits == [0]
    world.answer()
    assert b"X-Service-Trace-Id: 7\r\n" in world.peer.written
    assert b"chunked" in world.peer.written
    assert world.peer.limits == [0, 3]
    world.answer("a", "b")
    assert (world.events, world.peer.limits) == (["a", "b"], [0, 3, 1])
    world.answer("c")
    assert (world.stream.state, world.peer.limits) == (PullState.FULL, [0, 3, 1])
    # What is due now is for others.
    world.hear(b"w")
    world.hear(b"a x")
    assert (world.stream.state, world.peer.limits) == (PullState.FULL, [0, 3, 1])
    world.hear(b"a a x c")
    assert world.peer.limits == [0, 3, 1, 2]
    world.hear(b"a b")
    # It asked for 2 before it heard of the third: the next question is for what is left.
    world.answer("d", "e")
    assert world.peer.limits == [0, 3, 1, 2, 1]
    world.answer()
    # `w` came meanwhile, once; then nothing did.
    assert world.stream.state is PullState.WAITING
    world.hear(b"w")
    assert world.peer.limits[-1] == 1
    world.stream.left()
    assert len(world.pulls) == 0


async def test_lease_that_ends_makes_room_as_an_acknowledgement_does(wait_until):
    world = World(limit=1, lease_s=0.05)
    world.answer()
    world.answer("a")
    assert world.stream.state is PullState.FULL
    world.now = 0.05
    await wait_until(lambda: len(world.peer.limits) == 3)
    # The same delivery, with a new lease.
    world.answer("a")
    assert (world.events, world.stream.state) == (["a", "a"], PullState.FULL)


async def test_stream_counts_from_zero_after_a_break_of_the_link():
    """Acknowledgements that weren't heard cost its places until the leases ended."""
    world = World(limit=1)
    world.answer()
    # The topic is subscribed for the first time: nothing was missed.
    world.hearing.listener.subscribed()
    world.answer("a")
    world.hearing.listener.subscribed()
    assert (world.stream.state, world.peer.limits) == (PullState.FULL, [0, 1])
    world.hearing.listener.lost()
    assert world.stream.state is PullState.FULL
    world.hearing.listener.subscribed()
    assert (world.stream.state, world.peer.limits) == (PullState.ASKING, [0, 1, 1])


async def test_client_that_does_not_read_gets_nothing_more_until_it_has_read():
    world = World()
    world.answer()
    world.peer.stream.unsent_bytes = WRITABLE_BELOW_BYTES
    world.answer("a")
    world.hear(b"w")
    assert (world.stream.state, world.peer.limits) == (PullState.UNREAD, [0, 3])
    world.peer.stream.unsent_bytes = 0
    (then,) = world.read
    then()
    assert world.peer.limits == [0, 3, 2]
    # Called late, it does nothing.
    then()
    assert world.peer.limits == [0, 3, 2]


async def test_quiet_stream_has_comments(wait_until):
    world = World()
    world.answer()
    world.answer(next_s=0.0)
    before = world.peer.written
    world.now = 15.0
    await wait_until(lambda: world.peer.written != before)
    assert world.peer.written == before + b"3\r\n:\n\n\r\n"
    world.now = 60.0
    world.answer()
    assert world.peer.finished
    assert world.peer.written.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("flags", [0, HTTP_1_0])
async def test_draining_worker_ends_streams_after_what_was_handed_out(flags):
    world = World(flags=flags)
    world.answer()
    world.admits = False
    world.pulls.drain()
    assert not world.peer.finished
    world.answer("a")
    assert (world.events, world.peer.finished, world.stream.state) == (["a"], True, PullState.OVER)
    assert world.peer.written.endswith(b"\n\n" if flags else b"\r\n0\r\n\r\n")
    begins = World()
    begins.admits = False
    begins.answer()
    assert begins.peer.written.startswith(b"HTTP/1.1 503 ")


async def test_refusal_is_an_answer_at_first_and_the_end_later():
    refusal = b"HTTP/1.1 401 Unauthorized\r\n\r\n{}"
    first = World()
    first.stream.answered(0, refusal)
    assert first.peer.written == refusal
    later = World()
    later.answer()
    later.stream.answered(0, refusal)
    assert (b"401" in later.peer.written, later.peer.finished) == (False, True)
    away = World()
    away.answer()
    away.stream.unanswered(True)
    assert away.peer.finished


async def test_streams_of_an_app_take_turns():
    world = World(limit=2)
    world.answer()
    other = Peer()
    second = PullStream(world.pulls, other, world.stream.request)
    second.ask()
    second.answered(0, HEAD.format(world.terms.packed()).encode() + b'{"deliveries":[]}')
    for _ in range(2):
        for stream in (world.stream, second):
            stream.answered(0, HEAD.format(world.terms.packed()).encode() + b'{"deliveries":[]}')
    assert (world.stream.state, second.state) == (PullState.WAITING, PullState.WAITING)
    before = len(world.peer.limits), len(other.limits)
    world.hear(b"w")
    world.answer()
    world.hear(b"w")
    assert (len(world.peer.limits), len(other.limits)) == (before[0] + 1, before[1] + 1)
