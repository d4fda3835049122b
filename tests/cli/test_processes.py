"""What the processes of a server import. `python -m bench.parts.start` shows what a start costs."""

import re
import subprocess
import sys

import pytest

from helpers.server import Server

# What only some servers and commands use. Each of these is imported where it is used: of the processor time of a start
# they would take a third.
RARE = {
    "aiohttp",
    "alembic",
    "asyncpg",
    "cryptography",
    "jinja2",
    "joserfc",
    "redpoll.cli.apps",
    "redpoll.control.accounts.sign_on",
    "redpoll.control.webhooks.client",
    "redpoll.demo",
    "redpoll.doctor.machine",
    "redpoll.importing",
    "redpoll.store.migrating",
    "redpoll.testing",
    "sqlalchemy.dialects.postgresql",
    "yaml",
    "yarl",
}
# What the control plane uses and a worker doesn't.
OF_CONTROL = {
    "argon2",
    "prometheus_client",
    "redpoll.control",
    "redpoll.host",
    "redpoll.store",
    "sqlalchemy",
    "tomllib",
}


@pytest.mark.parametrize("command", ["worker", "control"])
def test_a_process_of_the_server_imports_no_other_command(command):
    program = (
        "import sys; from redpoll.cli import main; "
        f"main(['{command}', '--help'], standalone_mode=False); "
        "print(*sorted(name for name in sys.modules if name.startswith('redpoll.cli')))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "redpoll.cli redpoll.cli.processes"


def test_start_of_a_server_imports_nothing_that_few_servers_use(monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with Server(workers=1) as server:
        printed = (server.folder / "err").read_text()
    imported = set(re.findall(r"^import time: .*\| +(\S+)$", printed, re.MULTILINE))
    assert {"redpoll.host.supervisor", "redpoll.control.plane", "redpoll.worker.main"} <= imported
    assert not imported & RARE


def test_worker_imports_nothing_of_the_control_plane():
    program = "import redpoll.worker.main, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(result.stdout.split()) & OF_CONTROL
