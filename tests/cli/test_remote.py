"""Which app a command reaches, and what it says when it doesn't. The requests are in test_messages.py."""

import json
from functools import partial

import pytest

URL = "http://K:S@127.0.0.1:9/apps/1"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--url", "localhost:6001"), 2, "isn't the address of an app"),
        (("--url", "ws://127.0.0.1:9/app/K"), 2, "has no secret"),
        (("--url", URL, "--app", "1"), 2, "give either --url or --app"),
        (("--url", URL), 1, "can't be reached"),
        ((), 1, "needs a running server"),
    ],
)
def test_what_is_wrong_with_the_address_is_said(typed, words, code, says):
    result = typed("channels", *words)
    assert (result.exit_code, says in result.stderr) == (code, True), result.stderr


def test_pusher_url_names_the_app(typed, monkeypatch):
    monkeypatch.setenv("PUSHER_URL", URL)
    assert "http://127.0.0.1:9 can't be reached" in typed("channels").stderr


def test_of_several_apps_one_must_be_chosen(typed, server, wait_until_true):
    where = ("--data-dir", str(server.folder / "data"))
    other = json.loads(typed("app", "create", "other", "--json", *where).stdout)
    result = typed("channels", *where)
    assert result.exit_code == 2
    assert other["id"] in result.stderr

    def is_empty(app_id: str) -> bool:
        result = typed("channels", "--app", app_id, "--json", *where)
        return result.exit_code == 0 and json.loads(result.stdout) == {"channels": {}}

    for app_id in (other["id"], server.app_id):
        # Clients of other tests may just have gone.
        wait_until_true(partial(is_empty, app_id))
    unknown = typed("channels", "--app", "1", *where)
    assert (unknown.exit_code, "no app with the id 1" in unknown.stderr) == (1, True)


def test_what_is_no_pusher_server_is_called_so(typed, server):
    result = typed("channels", "--url", f"http://K:S@127.0.0.1:{server.control_port}/apps/1")
    assert (result.exit_code, "401" in result.stderr) == (1, True)
