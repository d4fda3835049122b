import json
import subprocess

import pytest
from click.testing import CliRunner

from redpoll.cli import main


def test_the_document_needs_no_server_and_is_that_of_a_server_of_this_version(typed, server):
    document = json.loads(typed("openapi").stdout)
    assert "/api/v1/apps/{app_id}/events" in document["paths"]
    without_secret = typed("openapi", "--url", f"ws://127.0.0.1:{server.port}/app/{server.app_key}")
    assert json.loads(without_secret.stdout) == document
    wrong = typed("openapi", "--url", "nowhere")
    assert (wrong.exit_code, "from --url" in wrong.stderr) == (2, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(typed, shell):
    script = typed("completion", shell).stdout
    assert "_REDPOLL_COMPLETE" in script
    assert json.loads(typed("completion", shell, "--json").stdout) == script.removesuffix("\n")


def test_bash_completes_commands(typed, tmp_path):
    script = tmp_path / "completion"
    script.write_text(typed("completion", "bash").stdout)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    environment = {"_REDPOLL_COMPLETE": "bash_complete", "COMP_WORDS": "redpoll publ", "COMP_CWORD": "1"}
    assert "publish" in CliRunner().invoke(main, [], env=environment, prog_name="redpoll").stdout


def test_another_shell_is_refused(typed):
    assert typed("completion", "tcsh").exit_code == 2
