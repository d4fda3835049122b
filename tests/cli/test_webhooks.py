"""`redpoll webhook …` and `redpoll dead-letter …`: the commands they send and how they print the results."""

import json

import pytest

ENDPOINT = {
    "id": "0123456789ab",
    "url": "https://hooks.example/in",
    "events": ["all"],
    "format": "service",
    "enabled": True,
    "channels": [],
    "pin": None,
    "failing_since": None,
    "client_events": [],
    "batch": False,
}


def test_create_sends_the_given_options(typed, answering):
    made = {"id": "0123456789ab", "secret": "s3", "url": "https://h.example/", "events": ["all"], "format": "service"}
    asked = answering(made)
    assert typed("webhook", "create", "7", "https://h.example/").stdout.splitlines() == [
        "id      0123456789ab",
        "secret  s3",
        "url     https://h.example/",
        "events  all",
        "format  service",
    ]
    words = ("--events", "member.added,member.removed", "--events", "cache.miss", "--format", "pusher", "--pin")
    shown = typed("webhook", "create", "7", "https://h.example/", *words, "--channels", "a-, b-", "--json")
    assert json.loads(shown.stdout) == made
    plain = {"app": "7", "url": "https://h.example/", "events": ["all"], "format": "service", "channels": []}
    plain |= {"client_events": [], "batch": False}
    typed("webhook", "create", "7", "https://h.example/", "--format", "pusher", "--batch")
    assert asked.pop() == ("webhook create", {**plain, "format": "pusher", "batch": True, "pin": False})
    assert asked == [
        ("webhook create", {**plain, "pin": False}),
        (
            "webhook create",
            {
                **plain,
                "events": ["member.added", "member.removed", "cache.miss"],
                "format": "pusher",
                "channels": ["a-", "b-"],
                "pin": True,
            },
        ),
    ]


def test_create_says_which_setting_the_count_of_subscribers_needs(typed, app_id):
    words = ("webhook", "create", app_id, "https://hooks.example/in", "--events", "subscription.count")
    assert "redpoll app set ID subscription_count=true" in typed(*words).stderr
    assert typed("webhook", "create", app_id, "https://hooks.example/in").stderr == ""
    typed("app", "set", app_id, "subscription_count=true")
    assert typed(*words).stderr == ""


def test_unknown_format_is_refused(typed):
    assert typed("webhook", "create", "7", "https://h.example/", "--format", "xml").exit_code == 2


def test_list_shows_filters_pin_and_state(typed, answering):
    odd = {"enabled": False, "channels": ["a-", "b-"], "pin": "ab" * 32, "failing_since": 1_700_000_000}
    answering([ENDPOINT, ENDPOINT | odd])
    assert typed("webhook", "list", "7").stdout.splitlines() == [
        "0123456789ab  https://hooks.example/in  all  service",
        f"0123456789ab  https://hooks.example/in  all  service  channels a-,b-  pinned to {'ab' * 32}  (disabled)  "
        "(failing since 2023-11-14 22:13:20 UTC)",
    ]


@pytest.mark.parametrize("verb", ["enable", "disable", "delete", "pin", "unpin"])
def test_endpoint_commands_print_the_endpoint(typed, answering, verb):
    asked = answering(ENDPOINT)
    word = "deleted " if verb == "delete" else ""
    assert typed("webhook", verb, ENDPOINT["id"]).stdout.startswith(f"{word}0123456789ab  https://")
    assert json.loads(typed("webhook", verb, ENDPOINT["id"], "--json").stdout) == ENDPOINT
    assert asked == [(f"webhook {verb}", {"id": ENDPOINT["id"]})] * 2


def test_rotate_prints_the_new_secret_and_the_end_of_the_old_one(typed, answering):
    answering({"id": "0123456789ab", "secret": "new", "overlap_until": 1_700_000_000})
    lines = typed("webhook", "rotate", "0123456789ab").stdout.splitlines()
    assert lines[1:] == ["secret  new", "The old secret signs too until 2023-11-14 22:13:20 UTC."]


@pytest.mark.parametrize(
    ("ok", "said", "code"), [(True, "delivered: 204 No Content", 0), (False, "not delivered: timed out", 1)]
)
def test_test_exits_with_1_if_the_event_was_not_delivered(typed, answering, ok, said, code):
    answer = {"id": "1", "ok": ok, "status": None, "reason": said.partition(": ")[2], "duration_ms": 5}
    answering(answer)
    result = typed("webhook", "test", "1")
    assert (result.stdout, result.exit_code) == (f"{said}\n", code)
    shown = typed("webhook", "test", "1", "--json")
    assert (json.loads(shown.stdout), shown.exit_code) == (answer, code)


def test_dead_letters_are_listed(typed, answering):
    letter = {"id": "d1", "event": "member.added", "endpoint_id": "e1", "failed_at": 1_700_000_000, "attempts": 4}
    asked = answering({"letters": [letter], "total": 1})
    line = "d1  member.added  to e1  failed 2023-11-14 22:13:20 UTC  attempts 4"
    result = typed("dead-letter", "list", "7")
    assert (result.stdout, result.stderr) == (line + "\n", "")
    assert json.loads(typed("dead-letter", "list", "7", "--json").stdout) == [letter]
    assert asked == [("dead-letter list", {"app": "7"})] * 2


def test_truncated_list_says_so_on_stderr(typed, answering):
    letter = {"id": "d1", "event": "member.added", "endpoint_id": "e1", "failed_at": 1_700_000_000, "attempts": 4}
    answering({"letters": [letter], "total": 70_000})
    result = typed("dead-letter", "list", "7", "--json")
    assert (json.loads(result.stdout), result.stderr) == ([letter], "showing the latest 1 of 70000 dead letters\n")


def test_dead_letter_is_shown_with_every_attempt_and_control_characters_escaped(typed, answering):
    attempt = {"at": 1_700_000_000, "status": 500, "duration_ms": 12, "reason": "500 Oops", "response": "\x1b[2Jno"}
    letter = {
        "id": "d1",
        "event": "member.added",
        "endpoint_id": "e1",
        "url": "https://h.example/",
        "channel": "presence-a",
        "state": "pending",
        "failed_at": 1_700_000_370,
        "payload": '{"event":"member.added"}',
        "attempts": [attempt, attempt | {"status": None, "reason": "no answer within 10 s", "response": ""}],
    }
    answering(letter)
    assert typed("dead-letter", "show", "d1").stdout.splitlines() == [
        "id       d1",
        "event    member.added",
        "url      https://h.example/",
        "state    failed: retry or discard it",
        "failed   2023-11-14 22:19:30 UTC",
        "attempt  2023-11-14 22:13:20 UTC  500  12 ms  500 Oops",
        "         response \\x1b[2Jno",
        "attempt  2023-11-14 22:13:20 UTC  -  12 ms  no answer within 10 s",
        'payload  {"event":"member.added"}',
    ]
    assert json.loads(typed("dead-letter", "show", "d1", "--json").stdout) == letter


@pytest.mark.parametrize(("verb", "state"), [("retry", "retrying"), ("discard", "discarded")])
def test_several_dead_letters_are_retried_or_discarded_at_once(typed, answering, verb, state):
    asked = answering([{"id": "d1", "state": state}, {"id": "d2", "state": state}])
    assert typed("dead-letter", verb, "d1", "d2").stdout == f"d1  {state}\nd2  {state}\n"
    assert asked == [(f"dead-letter {verb}", {"ids": ("d1", "d2")})]
    assert typed("dead-letter", verb).exit_code == 2


def test_endpoint_is_created_changed_and_deleted_without_a_server(typed, app_id):
    made = json.loads(typed("webhook", "create", app_id, "https://hooks.example/in", "--json").stdout)
    assert {"id", "secret", "url", "events", "format"} <= set(made)
    assert (made["url"], made["events"], made["format"]) == ("https://hooks.example/in", ["all"], "service")
    (listed,) = json.loads(typed("webhook", "list", app_id, "--json").stdout)
    of_creation = ("secret", "subscription_count")
    shown = {name: value for name, value in made.items() if name not in of_creation}
    assert listed == shown | {"waiting": 0, "dropped": 0}
    assert made["secret"] not in typed("webhook", "list", app_id).stdout
    assert typed("webhook", "disable", made["id"]).stdout.endswith("  (disabled)\n")
    assert json.loads(typed("webhook", "enable", made["id"], "--json").stdout)["enabled"]
    assert made["secret"] not in typed("webhook", "rotate", made["id"]).stdout
    assert typed("dead-letter", "list", app_id).stdout == ""
    assert typed("webhook", "delete", made["id"]).exit_code == 0
    assert typed("webhook", "list", app_id).stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        ("webhook", "create", "APP", "http://hooks.example/"),
        ("webhook", "create", "APP", "nonsense"),
        ("webhook", "create", "APP", "https://hooks.example/", "--events", "member.moved"),
        ("webhook", "create", "5", "https://hooks.example/"),
        ("webhook", "disable", "nix"),
        ("webhook", "test", "nix"),
        ("dead-letter", "show", "nix"),
        ("dead-letter", "retry", "nix"),
    ],
)
def test_impossible_commands_exit_with_1(typed, app_id, words):
    result = typed(*(app_id if word == "APP" else word for word in words))
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("redpoll: ")
