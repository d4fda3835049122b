"""`redpoll app …`, without a server."""

import io
import json
import signal

import pytest
from click.testing import CliRunner

from redpoll.cli import main
from redpoll.protocol.apps import SETTINGS


def test_app_is_created_listed_and_shown_without_a_server(typed, tmp_path):
    created = json.loads(typed("app", "create", "demo", "--json").stdout)
    assert json.loads(typed("app", "list", "--json").stdout) == [created]
    assert json.loads(typed("app", "show", created["id"], "--json").stdout) == created
    assert created["name"] == "demo"
    assert (tmp_path / "data" / "redpoll.sqlite").stat().st_mode & 0o077 == 0


def test_list_names_the_folder_in_which_it_found_no_app(typed, tmp_path):
    """The folder is often not the one that was meant."""
    listed = typed("app", "list")
    assert (listed.exit_code, listed.stdout) == (0, "")
    assert listed.stderr.endswith(f"there is no app in the data folder {tmp_path / 'data'}\n")


def test_app_create_prints_how_to_connect(typed):
    text = typed("app", "create", "demo").stdout
    assert "PUSHER_URL=http://" in text
    assert "127.0.0.1:6001" in text
    (line,) = typed("app", "list").stdout.splitlines()
    assert line.endswith("demo")
    shown = typed("app", "show", line.split()[0]).stdout
    assert shown.startswith("id ")
    assert "secret  " in shown


def test_app_create_prints_the_address_of_the_running_server(typed, server):
    """Its port may be from a flag or a file that this command wasn't given."""
    data = ("--data-dir", str(server.folder / "data"))
    text = typed("app", "create", "second", *data).stdout
    # Other tests expect the server's only app.
    typed("app", "delete", text.partition("  id ")[2].split()[0], "--yes", *data)
    assert text.startswith(f"For the server at 127.0.0.1:{server.port}:\n")
    assert f"@127.0.0.1:{server.port}/apps/" in text


def test_settings_are_shown_in_the_form_that_app_set_reads(typed, app_id):
    given = ("plan=free", "client_events=0", "allowed_origins=a.example,*.b.example", "cache_ttl_s=60")
    result = typed("app", "set", app_id, *given)
    assert result.stdout.splitlines() == ["plan=free", "client_events=false", *given[2:]]
    shown = typed("app", "set", app_id).stdout.splitlines()
    assert [line.partition("=")[0] for line in shown] == list(SETTINGS)
    assert typed("app", "set", app_id, *shown).stdout.splitlines() == shown
    assert typed("app", "show", app_id).stdout.endswith("\n".join(shown) + "\n")
    values = json.loads(typed("app", "set", app_id, "--json").stdout)["settings"]
    assert (values["client_events"], values["allowed_origins"]) == (False, ["a.example", "*.b.example"])


def test_every_wrong_assignment_is_reported_and_nothing_changes(typed, app_id):
    result = typed("app", "set", app_id, "plan=free", "plan=pro", "enabled=maybe", "colour=red", "watchlist")
    assert (result.exit_code, result.stdout) == (2, "")
    starts = ("plan is given more than once", "", "", "'watchlist' must have the form NAME=VALUE")
    names = ("plan", "enabled", "colour", "watchlist")
    lines = result.stderr.splitlines()
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    assert all(name in line for line, name in zip(lines, names, strict=True))
    assert "plan=pro" in typed("app", "set", app_id).stdout


def test_an_app_is_switched_off_and_on(typed, app_id):
    assert typed("app", "set", app_id, "enabled=false").stdout == "enabled=false\n"
    assert typed("app", "set", app_id, "enabled=true").stdout == "enabled=true\n"


def test_unknown_app_exits_with_1(typed, app_id):
    result = typed("app", "show", "5")
    assert (result.exit_code, result.stderr) == (1, "redpoll: there is no app with the id 5\n")


def test_app_is_deleted_after_a_question(typed, app_id):
    asked = typed("app", "delete", app_id)
    assert (asked.exit_code, "can't be undone" in asked.stderr) == (1, True)
    assert typed("app", "show", app_id).exit_code == 0
    assert typed("app", "delete", app_id, "--yes").stdout == f"app {app_id} (demo) deleted\n"
    assert typed("app", "show", app_id).exit_code == 1
    assert typed("app", "delete", app_id, "--yes").exit_code == 1


class Interrupted(io.RawIOBase):
    """Ctrl-C while a command reads its standard input."""

    def readable(self) -> bool:
        return True

    def readinto(self, _into: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0


@pytest.fixture
def interruptible():
    """A run of the tests in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupted_at_its_question_it_ends_with_130_and_deletes_nothing(typed, app_id, interruptible):
    result = CliRunner().invoke(main, ["app", "delete", app_id], input=io.BufferedReader(Interrupted()))
    assert (result.exit_code, result.stderr.rpartition("[y/N]:")[2]) == (130, " \n")
    # The end of the input is no Ctrl-C.
    assert CliRunner().invoke(main, ["app", "delete", app_id], input="").exit_code == 1
    assert app_id in typed("app", "list").stdout


def test_interrupted_while_it_works_it_ends_with_130_quietly(interruptible):
    words = ["publish", "news", "big", "-", "--url", "http://K:S@127.0.0.1:9/apps/1"]
    result = CliRunner().invoke(main, words, input=io.BufferedReader(Interrupted()))
    assert (result.exit_code, result.output) == (130, "")
