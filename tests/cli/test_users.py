"""`redpoll user …`: a password is told once."""

import json


def test_a_user_is_made_with_a_password_for_one_login(typed, answering):
    asked = answering("users", {"name": "eve", "role": "viewer", "password": "pass-word"})
    lines = typed("user", "create", "eve", "--role", "viewer").stdout.splitlines()
    assert lines[:2] == ["name      eve", "password  pass-word"]
    assert asked == [("user create", {"name": "eve", "role": "viewer"})]


def test_a_role_is_one_of_two(typed):
    assert typed("user", "create", "eve", "--role", "king").exit_code == 2
    assert typed("user", "create", "eve").exit_code == 2


def test_a_users_password_is_made_anew(typed, answering):
    made = {"name": "eve", "password": "another"}
    asked = answering("users", made)
    assert json.loads(typed("user", "reset", "eve", "--json").stdout) == made
    assert asked == [("user reset", {"name": "eve"})]


def test_users_are_made_and_reset_without_a_server(typed):
    made = json.loads(typed("user", "create", "eve", "--role", "viewer", "--json").stdout)
    assert made["name"] == "eve"
    again = json.loads(typed("user", "reset", "eve", "--json").stdout)
    assert list(again) == ["name", "password"]
    assert again["password"] not in ("", made["password"])
    for words in (("create", "eve", "--role", "admin"), ("reset", "nobody")):
        result = typed("user", *words)
        assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
