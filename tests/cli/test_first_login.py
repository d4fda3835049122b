"""`redpoll first-login` on a server whose output is a file, as a journal is."""

import json

import pytest


@pytest.fixture
def shown(typed, server, monkeypatch):
    monkeypatch.setenv("REDPOLL_DATA_DIR", str(server.folder / "data"))
    return typed


def test_app_and_password_are_shown_with_the_addresses_of_the_running_server(shown, server):
    text = shown("first-login").stdout
    password = (server.folder / "data" / "first-login").read_text().strip()
    assert f"PUSHER_URL={server.pusher_url}\n" in text
    assert f"for the dashboard at {server.control_url}\n" in text
    assert f"password  {password}\n" in text
    printed = (server.folder / "out").read_text() + (server.folder / "err").read_text()
    assert password not in printed
    assert server.app_secret not in printed
    assert f"redpoll first-login --data-dir {server.folder / 'data'}\n" in printed


def test_json_has_no_password_after_the_first_login(shown, server):
    file = server.folder / "data" / "first-login"
    password = file.read_text().strip()
    answer = json.loads(shown("first-login", "--json").stdout)
    assert (answer["app"]["secret"], answer["dashboard"]) == (server.app_secret, server.control_url)
    assert answer["password"] == password
    # As the control plane does at the first login.
    file.unlink()
    try:
        assert json.loads(shown("first-login", "--json").stdout)["password"] is None
        assert "redpoll user reset admin" in shown("first-login").stdout
    finally:
        file.write_text(f"{password}\n")


def test_server_with_several_apps_names_the_commands_that_show_them(typed, monkeypatch):
    address = {
        "host": "::1",
        "port": 6001,
        "tls_port": None,
        "control_host": "::1",
        "control_port": 9601,
        "control_tls": False,
    }
    apps = [{"id": "1", "key": "a", "secret": "the-secret"}, {"id": "2", "key": "b", "secret": "the-secret"}]
    results = {"server show": address, "app list": apps, "first login": {"password": None}}
    monkeypatch.setattr("redpoll.cli.users.run", lambda _settings, verb, _args: results[verb])
    text = typed("first-login").stdout
    assert "has 2 apps: `redpoll app list`" in text
    assert "the-secret" not in text


def test_without_a_server_the_command_says_that_it_needs_one(typed):
    result = typed("first-login")
    assert result.exit_code == 1
    assert "needs a running server" in result.stderr
