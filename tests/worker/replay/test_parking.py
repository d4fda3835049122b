"""Replays that wait: until their socket has read, the channel has got as far as they, or too long."""

from redpoll.cluster.membership.local_channel import CHANNEL, HistoryPosition, LocalChannel
from redpoll.worker.replay.parking import MOST_OWED_BYTES, Parking
from redpoll.worker.replay.replay import PARKED, READY, Replay


class Connection:
    bytes_owed = 0
    code = 0

    def shut(self, code: int, message: str) -> None:
        self.code = code


class Table:
    def __init__(self) -> None:
        self.parking = Parking(self.go)
        self.gone: list[Replay] = []

    def go(self, replay: Replay) -> None:
        replay.state = READY
        self.gone.append(replay)

    def replay(self, begun: float = 1e12) -> Replay:
        local_channel = LocalChannel("1", "c", CHANNEL, b"t")
        local_channel.history = HistoryPosition("e", 50, True)
        return Replay(local_channel, Connection(), begun)


async def test_it_goes_on_when_the_socket_owes_less(wait_until):
    table = Table()
    slow, other = table.replay(), table.replay()
    slow.connection.bytes_owed = MOST_OWED_BYTES
    for replay in (slow, other):
        table.parking.put(replay, 0)
    await wait_until(lambda: table.gone == [other])
    assert slow.state == PARKED
    slow.connection.bytes_owed -= 1
    await wait_until(lambda: table.gone == [other, slow])
    await wait_until(lambda: table.parking._timer is None)


async def test_of_one_socket_a_few_go_on_at_a_time(wait_until):
    table = Table()
    replays = [table.replay() for _ in range(9)]
    for replay in replays:
        replay.connection = replays[0].connection
        table.parking.put(replay, 0)
    table.parking._look()
    assert table.gone == replays[:4]
    await wait_until(lambda: table.gone == replays)


async def test_who_knows_more_than_the_channel_waits_for_it(wait_until):
    table = Table()
    ahead, witness = table.replay(), table.replay()
    ahead.local_channel.history.live = False
    ahead.at, ahead.exact = 60, True
    for replay in (ahead, witness):
        table.parking.put(replay, 0)
    await wait_until(lambda: table.gone == [witness])
    assert len(table.parking) == 1
    ahead.local_channel.history.last = 60
    await wait_until(lambda: table.gone == [witness, ahead])


async def test_who_waits_too_long_for_an_answer_is_sent_elsewhere(wait_until):
    table = Table()
    told, untold = table.replay(begun=-100.0), table.replay(begun=-100.0)
    told.told = True
    for replay in (told, untold):
        table.parking.put(replay, 1e9)
    await wait_until(lambda: untold.connection.code == 4100)
    assert told.connection.code == 0
    table.parking.forget(told)
    await wait_until(lambda: table.parking._timer is None)
