"""`redpoll import`, without a server."""

import json
import tomllib

import pytest

from redpoll.cli.execute import ALL_APPS_WITHIN_S
from redpoll.config import config

SOKETI = {
    "port": 6010,
    "appManager.array.apps": [
        {
            "id": "shop-1",
            "key": "shop-key",
            "secret": "shop-secret",
            "maxConnections": 20,
            "webhooks": [
                {"url": "https://shop.example/h", "event_types": ["channel_occupied"]},
                {"url": "http://10.0.0.1/h", "event_types": ["channel_occupied"]},
            ],
        }
    ],
    "queue.driver": "redis",
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "soketi.json"
    path.write_text(json.dumps(SOKETI))
    return str(path)


def test_app_is_imported_with_its_key_settings_and_webhooks(typed, file):
    outcome = json.loads(typed("import", "soketi", file, "--json").stdout)
    (app,) = outcome["apps"]
    assert (app["id"], app["outcome"]) == ("shop-1", "created")
    assert [webhook["outcome"] for webhook in app["webhooks"]] == ["created", "refused"]
    shown = json.loads(typed("app", "show", "shop-1", "--json").stdout)
    assert (shown["key"], shown["secret"]) == ("shop-key", "shop-secret")
    settings = json.loads(typed("app", "set", "shop-1", "--json").stdout)["settings"]
    assert (settings["max_connections"], settings["client_events"]) == (20, False)
    (webhook,) = json.loads(typed("webhook", "list", "shop-1", "--json").stdout)
    assert (webhook["url"], webhook["format"]) == ("https://shop.example/h", "pusher")


def test_limits_in_place_of_none_are_accepted(typed, tmp_path):
    """The roster of a full presence channel must fit into half of max_unsent_bytes."""
    (tmp_path / ".env").write_text("REVERB_APP_ID=shop\nREVERB_APP_KEY=k\nREVERB_APP_SECRET=s\n")
    (app,) = json.loads(typed("import", "reverb", str(tmp_path / ".env"), "--json").stdout)["apps"]
    assert app["outcome"] == "created"
    settings = json.loads(typed("app", "set", "shop", "--json").stdout)["settings"]
    names = ("max_presence_members", "max_user_info_bytes", "max_batch", "cache_ttl_s")
    assert [settings[name] for name in names] == [240, 2_048, 100, 604_800]


def test_repeated_import_leaves_limits_that_only_redpoll_has(typed, tmp_path):
    (tmp_path / ".env").write_text("REVERB_APP_ID=shop\nREVERB_APP_KEY=k\nREVERB_APP_SECRET=s\n")
    typed("import", "reverb", str(tmp_path / ".env"))
    typed("app", "set", "shop", "max_presence_members=200", "cache_ttl_s=60")
    (app,) = json.loads(typed("import", "reverb", str(tmp_path / ".env"), "--json").stdout)["apps"]
    assert app["outcome"] == "unchanged"
    settings = json.loads(typed("app", "set", "shop", "--json").stdout)["settings"]
    assert [settings["max_presence_members"], settings["cache_ttl_s"]] == [200, 60]


def test_sizes_for_which_the_server_has_no_room_are_left_out(typed, tmp_path, monkeypatch):
    monkeypatch.setenv("REDPOLL_MAX_UNSENT_BYTES", "524288")
    (tmp_path / ".env").write_text("REVERB_APP_ID=shop\nREVERB_APP_KEY=k\nREVERB_APP_SECRET=s\n")
    text = typed("import", "reverb", str(tmp_path / ".env")).stdout
    assert "app shop (shop): created" in text
    assert "NOT set: max_presence_members=240" in text
    settings = json.loads(typed("app", "set", "shop", "--json").stdout)["settings"]
    names = ("max_presence_members", "max_user_info_bytes", "max_batch")
    assert [settings[name] for name in names] == [100, 1_024, 100]


def test_repeated_import_changes_nothing(typed, file):
    typed("import", "soketi", file)
    (app,) = json.loads(typed("import", "soketi", file, "--json").stdout)["apps"]
    assert app["outcome"] == "unchanged"
    assert [webhook["outcome"] for webhook in app["webhooks"]] == ["unchanged", "refused"]


def test_dry_run_shows_all_and_changes_nothing(typed, file):
    text = typed("import", "soketi", file, "--dry-run").stdout
    assert "app shop-1 (shop-1): would be created" in text
    assert "maxConnections: 20" in text
    assert "max_connections=20" in text
    assert "NOT created: webhook http://10.0.0.1/h: the URL must begin with https://" in text


def test_webhook_with_an_empty_url_is_refused_and_isnt_pulled(typed, file, tmp_path):
    apps = json.loads(json.dumps(SOKETI))
    apps["appManager.array.apps"][0]["webhooks"][0]["url"] = ""
    (tmp_path / "soketi.json").write_text(json.dumps(apps))
    for _ in range(2):
        result = typed("import", "soketi", file, "--json")
        (app,) = json.loads(result.stdout)["apps"]
        assert [webhook["outcome"] for webhook in app["webhooks"]] == ["refused", "refused"]
        # One that is pulled is another one.
        assert typed("webhook", "create", "shop-1", "--pull", "--events", "channel.occupied").exit_code == 0


def test_settings_of_the_server_are_lines_for_the_settings_file(typed, file, tmp_path):
    text = typed("import", "soketi", file).stdout
    lines = text.partition("redpoll.toml\n")[2].partition("\n\n")[0]
    assert tomllib.loads(lines) == {"port": 6010, "trigger_rate_per_minute": 0}
    (tmp_path / "redpoll.toml").write_text(lines)
    settings, _ = config.load({}, {}, str(tmp_path / "redpoll.toml"))
    assert settings.port == 6010


def test_unreadable_file_exits_with_2(typed, tmp_path):
    (tmp_path / "none").write_text("nothing")
    result = typed("import", "pusher", str(tmp_path / "none"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has no line NAME=VALUE" in result.stderr


def test_key_of_another_app_refuses_the_import_and_changes_nothing(typed, file, tmp_path):
    typed("import", "soketi", file)
    apps = [{"id": "new", "key": "k", "secret": "s"}, {"id": "other", "key": "shop-key", "secret": "s"}]
    (tmp_path / "apps.json").write_text(json.dumps(apps))
    result = typed("import", "soketi", str(tmp_path / "apps.json"))
    assert result.exit_code == 1
    assert "app other: key shop-key belongs to app shop-1" in result.stderr
    assert [app["id"] for app in json.loads(typed("app", "list", "--json").stdout)] == ["shop-1"]


def test_webhook_that_exists_with_other_values_is_not_called_taken_over(typed, file):
    typed("app", "create", "shop", "--json")
    typed("import", "soketi", file)
    (webhook,) = json.loads(typed("webhook", "list", "shop-1", "--json").stdout)
    assert "webhook in Pusher's format" in typed("import", "soketi", file).stdout
    typed("webhook", "disable", webhook["id"])
    text = typed("import", "soketi", file).stdout
    assert "NOT changed: webhook https://shop.example/h exists, but differs: disabled" in text
    assert "webhook in Pusher's format" not in text


def test_a_server_has_as_long_for_an_import_as_for_other_commands_on_all_apps(typed, file, monkeypatch):
    waits = []

    def run(*_request, timeout_s=30.0):
        waits.append(timeout_s)
        return []

    monkeypatch.setattr("redpoll.cli.imports.run", run)
    assert typed("import", "soketi", file).exit_code == 0
    assert waits == [ALL_APPS_WITHIN_S]
