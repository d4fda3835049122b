"""deploy/promised.json is what the code promises (deploy/docs/promises.md), and a change of it needs a line in
CHANGELOG.md."""

import copy
import json

import promised
import pytest

CHANGELOG = "# Changelog\n\n## 0.1.0 - Unreleased\n"


def test_code_keeps_what_is_promised():
    found = promised.changes(json.loads(promised.PATH.read_text()), promised.promised())
    lines = [f"{kind}: {line}" for kind, each in found.items() for line in each]
    assert not lines, "\n".join(
        [
            *lines,
            f"Others build on these names (deploy/docs/promises.md). If the change is meant: name it in CHANGELOG.md, "
            f'in the part "Unreleased", run {promised.COMMAND}, and commit deploy/promised.json.',
        ]
    )


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("settings", "port"),
        ("metrics", "redpoll_connections"),
        ("http errors", "unknown_app"),
        ("close codes", "UNKNOWN_KEY"),
        ("commands", "redpoll app create"),
        ("commands", "redpoll app create --json"),
        ("http requests", "POST /api/v1/apps/{app_id}/events"),
        ("http bodies", "Trigger.socket_id"),
        ("app settings", "client_events"),
    ],
)
def test_rename_is_found_and_needs_an_entry(section, name):
    now = promised.promised()
    renamed = copy.deepcopy(now)
    renamed[section][f"{name}_renamed"] = renamed[section].pop(name)
    found = promised.changes(now, renamed)
    assert found == {"gone": [f"{section}: `{name}`"], "changed": [], "new": [f"{section}: `{name}_renamed`"]}
    assert promised.unmentioned(found, CHANGELOG) == found["gone"]
    assert promised.unmentioned(found, CHANGELOG + f"- `{name}` has another name.\n") == []


def test_change_of_a_default_needs_an_entry():
    found = promised.changes({"settings": {"port": "default 1"}}, {"settings": {"port": "default 2"}})
    assert found["changed"] == ["settings: `port`"]
    assert promised.unmentioned(found, CHANGELOG + "- `port` is now 2.\n") == []
    assert promised.unmentioned(found, CHANGELOG) == ["settings: `port`"]


def test_new_names_need_an_entry_once_there_is_a_release():
    found = promised.changes({}, {"settings": {"port": ""}})
    assert promised.unmentioned(found, "## Unreleased\n") == []
    assert promised.unmentioned(found, "## Unreleased\n\n## 0.1.0 - 2027-01-01\n\n- `port`\n") == ["settings: `port`"]
