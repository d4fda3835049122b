"""The state that a worker shows, over its life on a real Redis."""

from structlog.testing import capture_logs

from redpoll.cluster.membership.connection_state import ConnectionState, RedisState


def states(logs) -> list[str]:
    return [entry["state"] for entry in logs if entry["event"] == "redis connection state changed"]


def test_change_is_logged_once():
    connection = RedisState()
    with capture_logs() as logs:
        for _ in range(2):
            connection.change(ConnectionState.REGISTERING)
    assert logs == [
        {
            "event": "redis connection state changed",
            "state": "registering",
            "previous": "down",
            "log_level": "info",
        }
    ]


async def test_worker_registers_asserts_and_is_open(start_worker):
    with capture_logs() as logs:
        worker = await start_worker(1)
    assert states(logs) == ["registering", "reasserting", "open"]
    assert worker.registry.connection_state is ConnectionState.OPEN


async def test_break_leads_through_down_to_open_again(start_worker, wait_until):
    worker = await start_worker(1)
    socket = await worker.attach("news")
    with capture_logs() as logs:
        worker.link.drop("for the test")
        assert worker.registry.connection_state is ConnectionState.DOWN
        await wait_until(lambda: worker.registry.connection_state is ConnectionState.OPEN)
    assert states(logs) == ["down", "registering", "reasserting", "open"]
    assert socket.state == "attached"


async def test_fenced_worker_takes_its_next_name_and_is_open_again(start_worker, link, wait_until):
    worker = await start_worker(1)
    await worker.attach("news")
    with capture_logs() as logs:
        await link.ask(b"FLUSHALL")
        await wait_until(lambda: worker.registry.fenced and worker.registry.connection_state is ConnectionState.OPEN)
    assert states(logs) == ["fenced", "registering", "reasserting", "open"]
    assert worker.registry.worker_id.endswith(".1")


async def test_closed_worker_is_down(start_worker):
    worker = await start_worker(1)
    worker.registry.close()
    assert worker.registry.connection_state is ConnectionState.DOWN
