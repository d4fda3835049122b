"""The commands `worker` and `control`: what their processes import."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["worker", "control"])
def test_a_process_of_the_server_imports_no_other_command(command):
    program = (
        "import sys; from redpoll.cli import main; "
        f"main(['{command}', '--help'], standalone_mode=False); "
        "print(*sorted(name for name in sys.modules if name.startswith('redpoll.cli')))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "redpoll.cli redpoll.cli.processes"
