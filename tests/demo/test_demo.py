import signal
import socket

import aiohttp
import pytest

from browser.demo import running_demo
from helpers.server import Server
from redpoll.demo.backend import Account
from redpoll.demo.demo import DemoError, run


async def test_demo_uses_an_app_of_a_running_server_and_shows_no_secret():
    with Server(workers=1) as server, running_demo("--url", server.pusher_url) as demo:
        assert "redpoll history rule add 4711 --channel demo-ticker" in demo.said
        async with aiohttp.ClientSession() as http:
            async with http.get(demo.url) as reply:
                page = await reply.text()
            async with http.get(f"{demo.url}config.js") as reply:
                config = await reply.text()
            async with http.post(f"{demo.url}kill", data={"what": "worker"}) as reply:
                assert reply.status == 405
        assert f"127.0.0.1:{server.port}" in page
        assert "data-kill" not in page
        assert server.app_key in config
        assert server.app_secret not in page + config
        demo.process.send_signal(signal.SIGTERM)
        assert demo.process.wait(60) == 0


def test_taken_port_is_named():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(DemoError, match="can't listen on"),
    ):
        run(Account("127.0.0.1", 1, False, "1", "k", "s"), "127.0.0.1", taken.getsockname()[1], print)
