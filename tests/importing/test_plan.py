"""What a plan makes of values that redpoll has no room for."""

import pytest

from redpoll.importing.plan import ALL_HOSTS, AppPlan, Plan, SourceError, as_bool, as_number, without_secrets


@pytest.fixture
def app() -> AppPlan:
    return Plan("x").app("a", "k", "s", where="file")


@pytest.mark.parametrize("value", [-1, 0, None, "-1"])
def test_no_limit_of_theirs_is_none_here(app, value):
    app.limit("capacity", value, "max_connections")
    assert app.settings == {"max_connections": "0"}


def test_origins(app):
    app.origins("o", ["https://A.example/", "*.b.example", "c:8080"])
    assert app.settings == {"allowed_origins": "a.example,*.b.example,c:8080"}
    for everyone in (["*"], ["a.example", "*"], []):
        app.settings.clear()
        app.origins("o", everyone)
        assert app.settings == {}


@pytest.mark.parametrize(
    ("origins", "opens"),
    [
        (["192.168.*", "shop.*"], [True, True]),
        (["192.168.*", "shop.example"], [False, False]),
        ([f"{number}.example" for number in range(51)], [True]),
        ("shop.*", [True]),
        ([""], [True]),
    ],
)
def test_origins_that_cannot_be_taken_over_leave_a_new_app_open_and_it_is_said(app, origins, opens):
    rows = len(app.rows)
    app.origins("o", origins)
    assert [ALL_HOSTS in row.note for row in app.rows[rows:]] == opens


def test_setting_that_does_not_fit_is_reported(app):
    app.set("timeout", 9_999, "user_authentication_timeout_s", "9999")
    assert app.settings == {}
    assert app.rows[-1].ours == ""
    assert "3600" in app.rows[-1].note


def test_words_of_environment_files():
    assert [as_bool(value) for value in (True, "true", "1", "On", False, "false", "", None, 0)] == [True] * 4 + [
        False
    ] * 5
    assert as_number("1.5", "x") == 1.5
    with pytest.raises(SourceError, match="x is not a number"):
        as_number("many", "x")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("SOKETI_DB_MYSQL_PASSWORD", "x", "…"),
        ("ssl.passphrase", "x", "…"),
        ("queue.sqs.secretAccessKey", "x", "…"),
        ("apiToken", "x", "…"),
        ("database.mysql.host", "db", "db"),
        ("ssl.keyPath", "/k.pem", "/k.pem"),
        ("nodes", [{"host": "h", "password": "x"}], [{"host": "h", "password": "…"}]),
        ("servers", ["nats://user:x@n:4222", 7], ["nats://…@n:4222", 7]),
    ],
)
def test_secrets_are_not_shown(name, value, shown):
    assert without_secrets(name, value) == shown


def test_a_truth_value_is_no_id():
    with pytest.raises(SourceError, match="no id of the app found"):
        Plan("x").app(True, "k", "s", where="file")
