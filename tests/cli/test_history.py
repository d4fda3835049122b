"""`redpoll history …` without a server."""

import json

import pytest

NEWS = ("--prefix", "news-", "--keep", "1000", "--seconds", "3600")


@pytest.fixture
def add(typed, app_id):
    """`add("--prefix", …)` runs `history rule add`."""
    return lambda *words: typed("history", "rule", "add", app_id, *words)


def test_rules_are_added_listed_and_removed(typed, app_id, add):
    made = json.loads(add(*NEWS, "--replay", "10", "--json").stdout)
    assert made == {
        "id": made["id"],
        "name": "news-",
        "prefix": True,
        "keep": 1000,
        "seconds": 3600,
        "replay": 10,
        "replay_seconds": 0,
        "client_events": False,
        "max_rate": None,
        "latest": False,
        "join": "",
        "by": "",
    }
    exception = add("--channel", "news-secret", "--keep", "0").stdout.split()[0]
    chat = add("--channel", "chat", "--keep", "5", "--seconds", "60", "--replay-seconds", "30", "--client-events")
    assert typed("history", "rule", "list", app_id).stdout.splitlines() == [
        f"{made['id']}  news-*  keep 1000 for 3600 s  replay the last 10",
        f"{exception}  news-secret  keep none",
        f"{chat.stdout.split()[0]}  chat  keep 5 for 60 s  replay the last 30 s  client events too",
    ]
    assert json.loads(typed("history", "rule", "list", app_id, "--json").stdout)[0] == made
    text = add("--channel", "text", "--keep", "0", "--max-rate", "20", "--join", "delta", "--by", "id").stdout
    assert text.endswith("  text  keep none  at most 20 a second, join delta by id\n")
    assert "keep none  at most 5 a second, latest" in add("--prefix", "c-", "--max-rate", "5", "--latest").stdout
    for line in typed("history", "rule", "list", app_id).stdout.splitlines()[-2:]:
        typed("history", "rule", "remove", app_id, line.split()[0])
    assert typed("history", "rule", "remove", app_id, exception).stdout == f"{exception}  news-secret  keep none\n"
    assert len(typed("history", "rule", "list", app_id).stdout.splitlines()) == 2


def test_a_rule_for_every_channel(add):
    assert add("--prefix", "", "--keep", "5", "--seconds", "60").stdout.split()[1] == "*"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--keep", "1", "--seconds", "1"), "give either --prefix or --channel"),
        ((*NEWS, "--channel", "a"), "give either --prefix or --channel"),
        (("--prefix", "a b", "--keep", "1", "--seconds", "1"), "'a b' can't be the beginning of a channel name"),
        (("--channel", "a", "--keep", "1"), "seconds must be between 1 and"),
        (("--channel", "a", "--keep", "-1", "--seconds", "1"), "keep must be between 0 and 10000"),
        (("--channel", "a", "--keep", "10001", "--seconds", "1"), "keep must be between 0 and 10000"),
        (("--channel", "a", "--keep", "0", "--replay", "1"), "with keep 0 nothing is stored"),
        ((*NEWS, "--replay", "1", "--replay-seconds", "1"), "not both"),
        ((*NEWS, "--replay", "1001"), "replay must be between 0 and 1000"),
        (("--channel", "a"), "give --keep, how many messages are stored, or --max-rate"),
        ((*NEWS, "--max-rate", "0", "--latest"), "max_rate must be between 1 and 1000 frames a second, not 0"),
        ((*NEWS, "--max-rate", "0"), "max_rate must be between 1 and 1000 frames a second, not 0"),
        ((*NEWS, "--max-rate", "5"), "give either latest or join"),
        ((*NEWS, "--latest"), "give max_rate as well"),
        ((*NEWS, "--max-rate", "5", "--latest", "--join", "delta"), "give either latest or join, not both"),
        ((*NEWS, "--max-rate", "5", "--join", "a..b"), "'a..b' is no path"),
        ((*NEWS, "--max-rate", "5", "--join", "a", "--by", "b."), "'b.' is no path"),
        ((*NEWS, "--max-rate", "5", "--latest", "--by", "b"), "by belongs to join"),
        ((*NEWS, "--replay-seconds", "3601"), "replay_seconds must be between 0 and the rule's 3600 seconds"),
    ],
)
def test_contradictory_rule_exits_with_2(typed, app_id, add, words, fault):
    result = add(*words)
    assert result.exit_code == 2
    assert fault in result.stderr
    assert typed("history", "rule", "list", app_id).stdout == ""


def test_keep_must_be_a_number(add):
    assert add("--channel", "a", "--keep", "many").exit_code == 2


def test_second_rule_for_the_same_channels_is_refused_with_the_command_to_remove_the_first(add, app_id):
    first = json.loads(add(*NEWS, "--json").stdout)
    again = add(*NEWS)
    assert again.exit_code == 1
    assert f"redpoll history rule remove {app_id} {first['id']}" in again.stderr


def test_show_and_clear_need_a_running_server(typed, app_id):
    for verb in ("show", "clear"):
        result = typed("history", verb, app_id, "news")
        assert result.exit_code == 1
        assert "needs a running server, and none runs on this data folder" in result.stderr


def test_messages_are_shown_one_per_line_with_control_characters_escaped(typed, answering):
    messages = [
        {"offset": 5, "event": "plain", "data": "{}", "time_ms": 1_700_000_000_123},
        {"offset": 6, "event": "e\x1b[31m", "data": "two\nlines" + "x" * 300, "time_ms": 1_700_000_001_000},
    ]
    asked = answering({"epoch": "e", "messages": messages, "next": "e:5"})
    words = ("--limit", "2", "--since", "1", "--backwards")
    lines = typed("history", "show", "7", "news", *words).stdout.splitlines()
    assert lines[0] == "2023-11-14 22:13:20 UTC  5  plain  {}"
    assert lines[1].startswith("2023-11-14 22:13:21 UTC  6  e\\x1b[31m  two\\nlinesxxx")
    assert len(lines[1]) < 260
    assert lines[2] == "more: --cursor e:5"
    query = {"limit": "2", "since": "1", "direction": "backwards"}
    assert asked == [("history show", {"app": "7", "channel": "news", "query": query})]


def test_clear_prints_the_result(typed, answering):
    answering({"epoch": "abc"})
    assert typed("history", "clear", "7", "news").stdout == "cleared; the new epoch is abc\n"
    answering({"epoch": ""})
    assert typed("history", "clear", "7", "news").stdout == "nothing was stored\n"
