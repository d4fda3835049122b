"""`redpoll reload` on a running server: limits change while it serves clients, and a faulty file changes nothing."""

import json

import aiohttp
import pytest

from helpers.server import Server
from helpers.wire import Socket

FIRST = "max_channels_per_connection = 1\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("settings") / "redpoll.toml"


@pytest.fixture(scope="module")
def server(file):
    """Its settings are in the file. An empty variable counts as not set."""
    file.write_text(FIRST)
    with Server(workers=1, config=file) as running:
        yield running


@pytest.fixture
def reload(server, typed, file):
    def run(text: str, *words: str):
        file.write_text(text)
        return typed("reload", "--data-dir", str(server.folder / "data"), *words)

    yield run
    run(FIRST)


async def refused_channels(server) -> list[str]:
    """Those of two channels that a new connection can't subscribe to."""
    socket = await Socket.connect(server)
    for channel in ("a", "b"):
        socket.send({"event": "pusher:subscribe", "data": {"channel": channel}})
    answered: dict[str, str] = {}
    while len(answered) < 2:
        frame = await socket.next()
        if "channel" in frame:
            answered[frame["channel"]] = frame["event"]
    await socket.close()
    return [channel for channel, event in answered.items() if event == "pusher:subscription_error"]


def test_live_settings_are_applied_and_others_named(reload, typed):
    result = reload(
        'log_level = "warning"\ncontrol_names = ["a.example", "*.b"]\nworkers = 1\nactivity_timeout_s = 60\n'
    )
    assert result.exit_code == 0
    assert set(result.stdout.splitlines()) == {
        "log_level: now warning",
        "control_names: now a.example,*.b",
        "max_channels_per_connection: now 1000",
        "activity_timeout_s: changed, but needs a restart",
    }
    report = json.loads(reload("activity_timeout_s = 60\n", "--json").stdout)
    assert report["restart"] == ["activity_timeout_s"]
    assert set(report["applied"]) == {"log_level", "control_names"}


def test_reload_without_a_change_says_so_and_what_is_read(reload):
    """The file that was edited may be one that the server doesn't read."""
    said = "nothing has changed; the server reads its own environment and the file of its own --config\n"
    assert reload(FIRST).stdout == said


def test_faulty_file_changes_nothing_and_exits_with_1(reload):
    result = reload("max_channels_per_connection = 0\nprot = 1\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "$.prot: unknown setting; did you mean port?" in result.stderr
    assert "$.max_channels_per_connection: " in result.stderr
    assert result.stderr.endswith("redpoll: nothing was changed\n")
    assert reload(FIRST).stdout.startswith("nothing has changed; ")


async def test_limits_of_connections_count_for_new_ones(server, reload, on_thread):
    assert await refused_channels(server) == ["b"]
    assert (await on_thread(reload, "max_channels_per_connection = 2\n")).exit_code == 0
    assert await refused_channels(server) == []


async def test_limits_and_paths_of_the_http_api_change(server, reload, on_thread):
    text = FIRST + 'auth_failures_per_minute = 1\npath_prefix = "/live"\n'
    assert (await on_thread(reload, text)).exit_code == 0
    async with aiohttp.ClientSession(server.public_url) as http:
        body = {"name": "e", "channels": ["news"], "data": "{}"}
        keys = {"X-Service-Key": server.app_key, "X-Service-Secret": server.app_secret}
        async with http.post(f"/live/apps/{server.app_id}/events", json=body, headers=keys) as response:
            assert response.status == 200
        statuses = []
        for _ in range(2):
            async with http.get(f"/apps/{server.app_id}/channels") as response:
                statuses.append(response.status)
        assert statuses == [401, 429]


def test_without_a_server_it_exits_with_1(typed):
    result = typed("reload")
    assert result.exit_code == 1
    assert "a reload needs a running server" in result.stderr


@pytest.fixture
def on_thread():
    """Runs a command in a thread, because it has an event loop of its own."""
    import asyncio

    return asyncio.to_thread
