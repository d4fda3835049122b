"""`redpoll store copy`: an existing server's records move to another database."""

import json

import pytest

from redpoll.host import datafolder


def test_records_move_to_postgres_and_the_next_server_finds_them(typed, app_id, tmp_path, postgres_url, monkeypatch):
    file = tmp_path / "data" / "redpoll.sqlite"
    # The command checkpoints and shrinks the file as it closes it.
    shown = typed("app", "show", app_id, "--json").stdout
    before = file.read_bytes()
    result = typed("store", "copy", f"sqlite:{file}", postgres_url, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    copied = json.loads(result.stdout)
    assert (copied["rows"]["apps"], copied["rows"]["keys"]) == (1, 1)
    assert file.read_bytes() == before
    again = typed("store", "copy", f"sqlite:{file}", postgres_url)
    assert (again.exit_code, "isn't empty" in again.stderr) == (1, True)
    file.unlink()
    monkeypatch.setenv("REDPOLL_DATABASE_URL", postgres_url)
    assert typed("app", "show", app_id, "--json").stdout == shown
    back = tmp_path / "other" / "redpoll.sqlite"
    assert "copied" in typed("store", "copy", postgres_url, f"sqlite:{back}").stdout
    monkeypatch.delenv("REDPOLL_DATABASE_URL")
    assert typed("app", "show", app_id, "--json", "--data-dir", str(back.parent)).stdout == shown


@pytest.mark.parametrize(
    ("source", "target", "code", "fault"),
    [
        ("mysql://db/x", "sqlite:x", 2, "SOURCE must begin with sqlite: or postgresql://"),
        ("sqlite:missing", "sqlite:x", 1, "there is no record store at"),
        ("sqlite:data/redpoll.sqlite", "sqlite:data/redpoll.sqlite", 1, "the target must be a new file"),
    ],
)
def test_what_cant_be_copied_is_said(typed, app_id, tmp_path, monkeypatch, source, target, code, fault):
    monkeypatch.chdir(tmp_path)
    result = typed("store", "copy", source, target)
    assert (result.exit_code, fault in result.stderr) == (code, True), result.output


def test_folder_of_a_running_server_is_not_copied(typed, app_id, tmp_path):
    with datafolder.lock(tmp_path / "data", "serve"):
        result = typed("store", "copy", f"sqlite:{tmp_path}/data/redpoll.sqlite", f"sqlite:{tmp_path}/new/x")
    assert (result.exit_code, "stop the server first" in result.stderr) == (1, True)
