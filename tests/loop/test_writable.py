"""The drain signal, with real sockets: a client that reads slowly is reported once it has read most of it."""

import asyncio

from redpoll.loop.writable import WRITABLE_BELOW_BYTES


async def stalled(bench, worker):
    """A client that doesn't read, its connection in the worker, filled beyond WRITABLE_BELOW_BYTES."""
    client = await bench.client(worker)
    connection = next(c for c in worker.hub.open_connections if c.session.socket_id == client.socket_id)
    client.socket.transport.pause_reading()
    sent = 0
    while connection.unsent_bytes < WRITABLE_BELOW_BYTES:
        connection.send(b"\x82\x7e\x40\x00" + b"x" * 16_384)
        sent += 1
        await asyncio.sleep(0)
    return client, connection, sent


async def test_a_connection_is_reported_when_its_client_has_read(bench, wait_until):
    worker = await bench.start()
    client, connection, sent = await stalled(bench, worker)
    unsent: list[int] = []
    worker.hub.writable_signal.wait(connection, lambda: unsent.append(connection.unsent_bytes))
    # Frames to others are flushed meanwhile.
    witness = await bench.client(worker)
    await witness.nothing_more()
    assert unsent == []
    client.socket.transport.resume_reading()
    for _ in range(sent):
        await asyncio.wait_for(client.socket.recv(), 60)
    await wait_until(lambda: len(unsent) == 1)
    assert unsent[0] < WRITABLE_BELOW_BYTES


async def test_a_connection_with_little_unsent_is_reported_at_once_but_not_from_within_the_call(bench, wait_until):
    worker = await bench.start()
    await bench.client(worker)
    (connection,) = worker.hub.open_connections
    calls: list[int] = []
    worker.hub.writable_signal.wait(connection, lambda: calls.append(1))
    worker.hub.writable_signal.wait(connection, lambda: calls.append(2))
    assert calls == []
    await wait_until(lambda: calls == [1, 2])


async def test_what_fits_into_the_kernel_is_reported_after_the_flush(bench, wait_until):
    worker = await bench.start()
    client = await bench.client(worker)
    (connection,) = worker.hub.open_connections
    calls: list[int] = []
    connection.send(b"\x82\x7f" + (WRITABLE_BELOW_BYTES).to_bytes(8) + b"x" * WRITABLE_BELOW_BYTES)
    assert connection.unsent_bytes >= WRITABLE_BELOW_BYTES
    worker.hub.writable_signal.wait(connection, lambda: calls.append(1))
    assert len(await asyncio.wait_for(client.socket.recv(), 60)) == WRITABLE_BELOW_BYTES
    await wait_until(lambda: calls == [1])


async def test_a_connection_that_closes_is_not_reported(bench, wait_until):
    worker = await bench.start()
    client, connection, _ = await stalled(bench, worker)
    calls: list[int] = []
    worker.hub.writable_signal.wait(connection, lambda: calls.append(1))
    client.socket.transport.abort()
    await wait_until(lambda: not len(worker.hub.open_connections))
    assert calls == []
    assert not worker.hub.writable_signal._waiting


async def test_an_error_in_one_caller_does_not_lose_the_others(bench, wait_until):
    worker = await bench.start()
    await bench.client(worker)
    (connection,) = worker.hub.open_connections
    calls: list[int] = []

    def fail() -> None:
        raise RuntimeError("injected")

    worker.hub.writable_signal.wait(connection, fail)
    worker.hub.writable_signal.wait(connection, lambda: calls.append(1))
    await wait_until(lambda: calls == [1])
    assert worker.statistics.loop_exceptions_total == 1


async def test_both_signals_of_one_connection_come_each_at_its_time(bench, wait_until):
    worker = await bench.start()
    client, connection, sent = await stalled(bench, worker)
    seen: list[tuple[str, int]] = []
    signal = worker.hub.writable_signal
    signal.wait_drained(connection, lambda: seen.append(("drained", connection.unsent_bytes)))
    signal.wait(connection, lambda: seen.append(("writable", connection.unsent_bytes)))
    signal.wait_drained(connection, lambda: seen.append(("drained", connection.unsent_bytes)))
    client.socket.transport.resume_reading()
    for _ in range(sent):
        await asyncio.wait_for(client.socket.recv(), 60)
    await wait_until(lambda: len(seen) == 3)
    assert sorted(name for name, _ in seen) == ["drained", "drained", "writable"]
    assert {left for name, left in seen if name == "drained"} == {0}
    # Neither is waited for any more.
    signal.wait_drained(connection, lambda: seen.append(("again", 0)))
    await wait_until(lambda: seen[3:] == [("again", 0)])
