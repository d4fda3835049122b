"""`redpoll key …`, without a server."""

import json


def test_keys_are_rotated(typed, app_id):
    (old,) = json.loads(typed("key", "list", app_id, "--json").stdout)
    added = json.loads(typed("key", "add", app_id, "--json").stdout)
    assert list(added) == ["key", "secret"]
    assert typed("key", "disable", app_id, old["key"]).stdout == f"{old['key']}  (disabled)\n"
    assert typed("key", "list", app_id).stdout.splitlines() == [
        f"{old['key']}  {old['secret']}  (disabled)",
        f"{added['key']}  {added['secret']}",
    ]
    assert json.loads(typed("app", "show", app_id, "--json").stdout)["key"] == added["key"]
    back = typed("key", "add", app_id, old["key"]).stdout
    assert back == f"key     {old['key']}\nsecret  {old['secret']}\n"


def test_last_enabled_key_can_not_be_disabled(typed, app_id):
    (only,) = json.loads(typed("key", "list", app_id, "--json").stdout)
    result = typed("key", "disable", app_id, only["key"])
    assert result.exit_code == 1
    assert "is the last enabled key" in result.stderr
