"""The plugin as a user has it: a FastAPI-like app's tests in a run of their own."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

# What a user writes: an application that publishes, and tests that only know the fixtures.
TESTS = """
import pusher
import pytest


@pytest.fixture
def backend(redpoll_app):
    app = redpoll_app
    return pusher.Pusher(
        app_id=app.id, key=app.key, secret=app.secret, host=app.host, port=app.port, ssl=False
    )


@pytest.mark.parametrize("number", range(8))
def test_events_are_the_tests_own(redpoll, backend, number):
    redpoll.assert_not_published()
    backend.trigger("orders", "order.paid", {"number": number})
    assert redpoll.wait("order.paid", "orders").json == {"number": number}


@pytest.mark.redpoll(watchlist=True)
def test_the_marker_sets_the_server(redpoll, redpoll_app):
    redpoll.set(client_events=False)
    assert redpoll_app.port == redpoll.port


def test_a_failure_reaches_the_application(redpoll, backend):
    redpoll.fail(503)
    with pytest.raises(pusher.errors.PusherBadStatus):
        backend.trigger("orders", "order.paid", {})
    redpoll.assert_not_published()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_app.py").write_text(TESTS)
    # Without the other plugins of this environment, which take seconds to import.
    plugins = ["-p", "redpoll.testing.plugin", "-p", "xdist.plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", *plugins, *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_pytest_finds_the_plugin():
    found = {one.name: one.value for one in entry_points(group="pytest11")}
    assert found["redpoll"] == "redpoll.testing.plugin"


def test_ten_tests_of_an_application_on_two_workers(tmp_path):
    done = run(tmp_path, "-n", "2")
    assert "10 passed" in done.stdout, done.stdout + done.stderr


def test_the_same_tests_over_the_real_server(tmp_path):
    done = run(tmp_path, "--redpoll-real")
    assert "10 passed" in done.stdout, done.stdout + done.stderr


def test_a_run_that_does_not_use_it_needs_neither_its_libraries_nor_their_time():
    """pytest loads the plugin wherever redpoll is installed, also without the extra `testing`."""
    script = (
        "import sys, pytest\n"
        "sys.modules.update(dict.fromkeys(['aiohttp', 'h11', 'msgspec', 'websockets']))\n"
        "before = set(sys.modules)\n"
        "import redpoll.testing.plugin\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == ["redpoll", "redpoll.testing", "redpoll.testing.plugin"]


def test_what_the_extra_installs_is_named_where_it_is_missing(tmp_path):
    (tmp_path / "conftest.py").write_text("import sys\nsys.modules['h11'] = None\n")
    done = run(tmp_path, "-k", "marker")
    assert "redpoll.testing needs h11: pip install 'redpoll[testing]'" in done.stdout, done.stdout + done.stderr
