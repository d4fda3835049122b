import json

from click.testing import CliRunner

from redpoll.cli import main


def test_a_wrong_address_ends_with_2_and_says_what_is_expected():
    result = CliRunner().invoke(main, ["doctor", "localhost:6001"])
    assert result.exit_code == 2
    assert "ws[s]://HOST[:PORT]/app/KEY" in result.stderr


def test_the_address_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PUSHER_URL", "http://KEY:S3CRET@127.0.0.1:9/apps/1")
    result = CliRunner().invoke(main, ["doctor", "--env", "--json"])
    assert (result.exit_code, json.loads(result.stdout)[-1]["check"]) == (1, "TCP")
    assert CliRunner().invoke(main, ["doctor", "ws://127.0.0.1:9/app/KEY", "--env"]).exit_code == 2
    monkeypatch.delenv("PUSHER_URL")
    unset = CliRunner().invoke(main, ["doctor", "--env"])
    assert (unset.exit_code, unset.stderr) == (2, "PUSHER_URL isn't set\n")


def test_a_failed_check_ends_with_1_and_json_is_json():
    result = CliRunner().invoke(main, ["doctor", "ws://127.0.0.1:9/app/KEY", "--json"])
    assert result.exit_code == 1
    findings = json.loads(result.stdout)
    assert findings[-1]["check"] == "TCP"
    assert findings[-1]["verdict"] == "failed"


def test_without_an_address_it_checks_this_machine(tmp_path):
    result = CliRunner().invoke(main, ["doctor", "--data-dir", str(tmp_path), "--json"])
    assert {finding["check"] for finding in json.loads(result.stdout)} >= {"Descriptors", "Redis", "Disk"}
