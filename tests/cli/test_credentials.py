"""`redpoll key …`, `redpoll token …` and `redpoll grant …`, without a server."""

import json
import time

import pytest


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


def test_token_is_shown_only_when_created(typed, app_id):
    before_s = time.time()
    result = typed("token", "create", app_id, "--name", "CI", "--scope", "publish", "--expires", "30d", "--json")
    made = json.loads(result.stdout)
    assert list(made) == ["id", "token", "name", "scopes", "expires_at"]
    assert (made["name"], made["scopes"]) == ("CI", ["publish"])
    # The time is shown in whole seconds.
    assert before_s - 1 < made["expires_at"] - 30 * 86_400 <= time.time()
    listed = typed("token", "list", app_id)
    assert made["token"] not in listed.stdout
    assert listed.stdout.startswith(f"{made['id']}  {made['token'][:8]}…  publish  expires ")


@pytest.mark.parametrize(
    ("words", "scopes"),
    [
        (["publish,read"], ["publish", "read"]),
        (["read", "publish"], ["publish", "read"]),
        (["auth, read", "read"], ["read", "auth"]),
        (["all"], ["all"]),
    ],
)
def test_scopes_can_be_repeated_or_comma_separated(typed, app_id, words, scopes):
    options = [part for word in words for part in ("--scope", word)]
    assert json.loads(typed("token", "create", app_id, "--name", "n", *options, "--json").stdout)["scopes"] == scopes


def test_unknown_scope_exits_with_1(typed, app_id):
    result = typed("token", "create", app_id, "--name", "n", "--scope", "write")
    assert (result.exit_code, result.stderr) == (
        1,
        "redpoll: a token needs one or more of the scopes publish, read, auth, webhooks, all, not 'write'\n",
    )


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000)])
def test_expires_accepts_seconds_minutes_hours_and_days(typed, app_id, text, seconds):
    typed("token", "create", app_id, "--name", "n", "--scope", "all", "--expires", text)
    (token,) = json.loads(typed("token", "list", app_id, "--json").stdout)
    assert token["expires_at"] - token["created_at"] == seconds


@pytest.mark.parametrize("text", ["30", "d", "0d", "-1d", "1.5h", "1w", "1d2h", ""])
def test_other_lifetimes_are_refused(typed, app_id, text):
    result = typed("token", "create", app_id, "--name", "n", "--scope", "all", "--expires", text)
    assert result.exit_code == 2
    assert result.stderr.startswith("--expires: must be a number followed by s, m, h or d")


def test_tokens_are_revoked(typed, app_id):
    for name in ("a", "b"):
        typed("token", "create", app_id, "--name", name, "--scope", "all")
    ids = [token["id"] for token in json.loads(typed("token", "list", app_id, "--json").stdout)]
    result = typed("token", "revoke", *ids)
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [[ids[0], "revoked"], [ids[1], "revoked"]]
    assert all(token["revoked_at"] for token in json.loads(typed("token", "list", app_id, "--json").stdout))
    assert "  revoked " in typed("token", "list", app_id).stdout
    assert typed("token", "revoke", ids[0], "nix").stderr == (
        "redpoll: there is no token with the id nix; nothing was revoked\n"
    )


def test_token_for_the_management_belongs_to_no_app(typed, app_id):
    made = json.loads(typed("token", "create", "--manage", "--name", "platform", "--expires", "1d", "--json").stdout)
    assert made["scopes"] == ["manage"]
    listed = typed("token", "list", "--manage")
    assert listed.stdout.startswith(f"{made['id']}  {made['token'][:8]}…  manage  expires ")
    assert typed("token", "list", app_id).stdout == ""
    assert typed("token", "revoke", made["id"]).stdout.startswith(f"{made['id']}  revoked ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--manage", "--scope", "read"], "give --scope"),
        ([], "give --scope"),
        (["--manage", "1234567"], "belongs to no app"),
    ],
)
def test_token_is_either_an_apps_or_the_managements(typed, app_id, words, text):
    result = typed("token", "create", "--name", "n", *words)
    assert result.exit_code == 2
    assert text in result.stderr


def test_scope_manage_is_refused_for_an_app(typed, app_id):
    result = typed("token", "create", app_id, "--name", "n", "--scope", "manage")
    assert result.exit_code == 1
    assert "redpoll token create --manage" in result.stderr


def test_grants_are_minted_checked_and_revoked(typed, app_id):
    minted = typed(
        "grant", "mint", app_id, "--user", "7", "--channel", "private-*", "--client-events", "--info", '{"a":1}'
    )
    assert "redpoll app set ID grants=true" in minted.stderr
    auth = minted.stdout.strip()
    assert typed("app", "set", app_id, "grants=true").exit_code == 0
    checked = typed("grant", "check", app_id, auth, "--channel", "private-a")
    assert (checked.exit_code, checked.stdout.splitlines()[-1]) == (0, "accepted")
    assert typed("grant", "check", app_id, auth, "--json").exit_code == 0
    assert "may       subscribe,client_events" in checked.stdout
    refused = typed("grant", "check", app_id, auth, "--channel", "presence-a")
    assert refused.exit_code == 1
    assert refused.stderr == "Invalid grant: no pattern of its channels matches presence-a\n"
    assert "0 subscriptions ended" in typed("grant", "revoke", app_id, "--user", "7").stdout
    assert typed("grant", "check", app_id, auth).stderr == "access was revoked\n"
    as_json = typed("grant", "check", app_id, auth, "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["valid"]) == (1, False)
    assert typed("grant", "revoke", app_id).stderr == "name --jti or --user\n"
    assert "--info isn't JSON" in typed("grant", "mint", app_id, "--info", "{").stderr
