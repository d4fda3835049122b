"""`redpoll user …`: users and their one-time passwords."""

import json


def test_created_user_gets_a_one_time_password(typed, answering):
    asked = answering({"name": "eve", "role": "viewer", "password": "pass-word"})
    lines = typed("user", "create", "eve", "--role", "viewer").stdout.splitlines()
    assert lines[:2] == ["name      eve", "password  pass-word"]
    assert asked == [("user create", {"name": "eve", "role": "viewer"})]


def test_unknown_role_is_refused(typed):
    assert typed("user", "create", "eve", "--role", "king").exit_code == 2
    assert typed("user", "create", "eve").exit_code == 2


def test_reset_prints_a_new_password(typed, answering):
    made = {"name": "eve", "password": "another"}
    asked = answering(made)
    assert json.loads(typed("user", "reset", "eve", "--json").stdout) == made
    assert asked == [("user reset", {"name": "eve"})]


def test_users_are_created_and_reset_without_a_server(typed):
    made = json.loads(typed("user", "create", "eve", "--role", "viewer", "--json").stdout)
    assert made["name"] == "eve"
    again = json.loads(typed("user", "reset", "eve", "--json").stdout)
    assert list(again) == ["name", "password"]
    assert again["password"] not in ("", made["password"])
    for words in (("create", "eve", "--role", "admin"), ("reset", "nobody")):
        result = typed("user", *words)
        assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
