"""Replays that wait: until their client has read, until a retry, or for too long."""

import pytest

from redpoll.cluster.history import HistoryPosition
from redpoll.cluster.membership.hold_call import CHANNEL
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.worker.replay import waiting as module
from redpoll.worker.replay.replay import Answer, Kind, Replay, State
from redpoll.worker.replay.waiting import WaitingReplays


class Connection:
    sid_hi, sid_lo = 1, 2
    code = 0

    def shut(self, code: int, message: str) -> None:
        self.code = code


class Table:
    """Stands in for the drain signal too: `drained(connection)` reports one as drained."""

    def __init__(self) -> None:
        self.awaited: dict[Connection, list] = {}
        self.waiting = WaitingReplays(self, self.go)
        self.gone: list[Replay] = []

    def wait(self, connection, then) -> None:
        self.awaited.setdefault(connection, []).append(then)

    def drained(self, connection) -> None:
        for then in self.awaited.pop(connection):
            then()

    def go(self, replay: Replay) -> None:
        replay.state = State.WAITING_FOR_PAGE
        self.gone.append(replay)

    def replay(self, connection: Connection | None = None, *, begun: float = 1e12, kind=Kind.RECOVERING) -> Replay:
        local_channel = LocalChannel("1", "c", CHANNEL, b"t")
        local_channel.history = HistoryPosition("e", 50, True)
        return Replay(local_channel, connection or Connection(), begun, kind, Answer(b"", None))


async def test_a_replay_goes_on_when_its_connection_has_drained():
    table = Table()
    slow, other = table.replay(), table.replay()
    for replay in (slow, other):
        table.waiting.wait_writable(replay)
    table.drained(other.connection)
    assert table.gone == [other]
    assert slow.state is State.WAITING_FOR_DRAIN
    table.drained(slow.connection)
    assert table.gone == [other, slow]
    assert not len(table.waiting)


async def test_a_few_replays_of_one_connection_go_on_at_a_time():
    table = Table()
    connection = Connection()
    replays = [table.replay(connection) for _ in range(9)]
    for replay in replays:
        table.waiting.wait_writable(replay)
    assert len(table.awaited[connection]) == 1
    table.drained(connection)
    assert table.gone == replays[:4]
    # The next ones follow when one of these ends, waits or leaves, and the connection has drained again.
    assert not table.awaited
    table.waiting.advance(connection)
    table.drained(connection)
    assert table.gone == replays[:8]
    table.waiting.wait_retry(replays[0])
    table.drained(connection)
    assert table.gone == replays


async def test_a_replay_that_leaves_is_not_called():
    table = Table()
    connection = Connection()
    leaving, staying = table.replay(connection), table.replay(connection)
    for replay in (leaving, staying):
        table.waiting.wait_writable(replay)
    table.waiting.forget(leaving)
    table.drained(connection)
    assert table.gone == [staying]


async def test_a_closed_connection_leaves_nothing():
    table = Table()
    replay = table.replay()
    table.waiting.wait_writable(replay)
    table.waiting.forget(replay)
    table.waiting.closed(replay.connection)
    assert len(table.waiting) == 0
    assert not table.waiting._awaited


async def test_a_replay_ahead_of_its_channel_waits_for_it(wait_until):
    table = Table()
    ahead, witness = table.replay(), table.replay()
    ahead.local_channel.history.live = False
    ahead.at, ahead.exact = 60, True
    for replay in (ahead, witness):
        table.waiting.wait_retry(replay)
    await wait_until(lambda: table.gone == [witness])
    assert len(table.waiting) == 1
    assert ahead.state is State.WAITING_TO_RETRY
    ahead.local_channel.history.last = 60
    await wait_until(lambda: table.gone == [witness, ahead])
    await wait_until(lambda: table.waiting._retry_timer is None)


@pytest.mark.parametrize("wait", ["wait_writable", "wait_retry"])
async def test_a_client_without_an_answer_for_too_long_is_closed(wait, wait_until, monkeypatch):
    monkeypatch.setattr(module, "_EXPIRY_S", 0.05)
    table = Table()
    answered, unanswered = table.replay(begun=-100.0), table.replay(begun=-100.0)
    answered.answer = None
    for replay in (answered, unanswered):
        getattr(table.waiting, wait)(replay)
    await wait_until(lambda: unanswered.connection.code == 4100)
    assert answered.connection.code == 0
    table.waiting.forget(answered)
    await wait_until(lambda: table.waiting._retry_timer is table.waiting._expiry_timer is None)
