"""The plugin as a user has it: the tests of a FastAPI app in a run of their own."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import redpoll_client

# What a user writes: the tests of an application, which only know the fixtures.
TESTS = Path(redpoll_client.__file__).parent / "examples" / "test_fastapi_app.py"


def run(folder: Path, *arguments: str, tests: str = TESTS.read_text()) -> subprocess.CompletedProcess[str]:
    (folder / "test_app.py").write_text(tests)
    # Without the other plugins of this environment, which take seconds to import.
    plugins = ["-p", "redpoll.testing.plugin", "-p", "xdist.plugin", "-p", "pytest_asyncio.plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", *plugins, *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_pytest_finds_the_plugin():
    found = {one.name: one.value for one in entry_points(group="pytest11")}
    assert found["redpoll"] == "redpoll.testing.plugin"


def test_an_applications_tests_on_two_workers(tmp_path):
    done = run(tmp_path, "-n", "2")
    assert "12 passed" in done.stdout, done.stdout + done.stderr


def test_the_same_tests_over_the_real_server(tmp_path):
    done = run(tmp_path, "--redpoll-real")
    assert "12 passed" in done.stdout, done.stdout + done.stderr


# Each publishes and has a client that doesn't leave by itself. What is left at the end is an error of the run.
TWO_HUNDRED = """
import asyncio, gc, os, socket, threading, urllib.request, pytest

def held():
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))

BEFORE = []

@pytest.mark.parametrize("number", range(200))
def test_one(redpoll, number):
    with socket.create_connection((redpoll.host, redpoll.port)) as client:
        client.sendall(f"GET /app/{redpoll.app_key}?protocol=7 HTTP/1.1\\r\\nHost: x\\r\\nUpgrade: websocket\\r\\n"
            "Connection: Upgrade\\r\\nSec-WebSocket-Version: 13\\r\\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\n\\r\\n".encode())
        assert b" 101 " in client.recv(100)

def test_nothing_is_left():
    # The first test has opened what the libraries keep.
    assert held() == BEFORE[0], (held(), BEFORE)

@pytest.fixture(autouse=True)
def measured():
    yield
    if not BEFORE:
        BEFORE.append(held())
"""


def test_two_hundred_tests_leave_no_thread_no_task_and_no_descriptor(tmp_path):
    kinds = ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning")
    strict = [word for kind in kinds for word in ("-W", f"error::{kind}")]
    done = run(tmp_path, *strict, tests=TWO_HUNDRED)
    assert "201 passed" in done.stdout, done.stdout + done.stderr
    # A task that is left is named when it is collected.
    assert "Task was destroyed" not in done.stdout + done.stderr


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
    done = run(tmp_path, "-k", "welcome")
    assert "redpoll.testing needs h11: pip install 'redpoll[testing]'" in done.stdout, done.stdout + done.stderr
