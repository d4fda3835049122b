import json
import signal
import subprocess
import sys

from click.testing import CliRunner

from redpoll.cli import main


def test_wrong_address_is_refused_without_its_secret():
    result = CliRunner().invoke(main, ["demo", "--url", "ws://key:hunter2@127.0.0.1/apps/1"])
    assert result.exit_code == 2
    assert "--url: expected http[s]://KEY:SECRET@HOST[:PORT]/apps/ID" in result.stderr
    assert "hunter2" not in result.output


def test_json_says_where_the_page_is():
    words = ["demo", "--json", "--url", "http://key:a%2Fb@127.0.0.1:9/apps/1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "redpoll", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    text = b""
    while not text.endswith(b"\n}\n"):
        line = process.stdout.readline()
        assert line, f"the demo ended: {text!r}"
        text += line
    running = json.loads(text)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    process.stdout.close()
    assert running["page"].startswith("http://127.0.0.1:")
    assert running["app"] == "http://key:a%2Fb@127.0.0.1:9/apps/1"
    assert running["dashboard"] is None
    assert len(running["rules"]) == 3
