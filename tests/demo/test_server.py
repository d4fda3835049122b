import signal

from browser.demo import running_demo
from helpers.server import processes
from redpoll.demo.backend import TEXT, Backend, listen
from redpoll.demo.server import OwnServer


async def test_server_is_killed_with_the_demo(wait_until):
    """Ctrl-C is in tests/browser/test_demo.py."""
    with running_demo() as demo:
        family = {process.pid for process in demo.family()}
        assert len(family) >= 5
        demo.process.send_signal(signal.SIGKILL)
        demo.process.wait(60)
        await wait_until(lambda: family.isdisjoint(process.pid for process in processes()))


async def test_kill_ends_a_worker_or_redis_and_both_come_back(wait_until):
    with OwnServer("127.0.0.1") as server:
        for what in ("worker", "redis"):
            pid = server.kill(what)
            assert pid is not None
            await wait_until(lambda pid=pid: pid not in {process.pid for process in processes()})
            again = []
            await wait_until(lambda what=what, again=again: again.append(server.kill(what)) or again[-1] is not None)
            assert again[-1] != pid
        folder = server.folder
        assert folder.is_dir()
    assert not folder.exists()


def test_settings_file_of_the_operator_does_not_reach_the_server(tmp_path, monkeypatch):
    file = tmp_path / "redpoll.toml"
    # Without a certificate no server starts with it.
    file.write_text("tls_port = 0\n")
    monkeypatch.setenv("REDPOLL_CONFIG", str(file))
    with OwnServer("127.0.0.1") as server:
        assert server.account.port


async def test_back_end_publishes_to_the_address_on_which_the_server_listens():
    with OwnServer("127.0.0.2") as server:
        backend = Backend(server.account, {})
        runner, _ = await listen(backend.application(), "127.0.0.2", 0)
        try:
            await backend.publish(TEXT, "begin", {})
        finally:
            await runner.cleanup()
