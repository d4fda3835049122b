"""`redpoll apply` and `redpoll export`, without a server and with one."""

import asyncio
import json
import random
import sqlite3
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from cli.test_imports import SOKETI
from helpers.lengths import amount
from helpers.server import Server
from helpers.wire import Api, Socket

APPS = """\
[[apps]]
id = "shop"
name = "Shop"
key = "0123456789abcdefabcd"
secret = "env:SHOP_SECRET"
settings = { client_events = false, max_connections = 5000 }
history = [
  { prefix = "news-", keep = 1000, seconds = 3600, replay = 10, max_rate = 20, join = "delta", by = "id" },
  { prefix = "cursor-", max_rate = 5, latest = true },
  { channel = "chat", keep = 200, seconds = 86400, replay_seconds = 60, client_events = true },
]
webhooks = [
  { url = "https://shop.example.com/hook", events = ["all"], format = "pusher", batch = true },
  { pull = true, client_events = ["client-order"] },
]
tokens = [{ name = "ci", scopes = ["publish"], expires = "90d" }]
"""
# What is wrong with an app, and what the message says. `%` is the place.
FAULTS = [
    ("id = ''", "an app's id must have"),
    ("name = 'no id'", "an app needs an id"),
    ("id = 'a/b'", "an app's id must have"),
    ("id = 'a'\nname = ''", "an app's name must have"),
    ("id = 'a'\nname = 7", ".name: must be a text"),
    ("id = 'a'\ncolour = 'red'", ".colour: unknown"),
    ("id = 'a'\nkey = 'a:b'", "a key must have"),
    ("id = 'a'\nkey = 'k'\nsecret = 'ä'", "a secret must have"),
    ("id = 'a'\nkey = 'taken'", "key taken belongs to app other"),
    ("id = 'a'\nkey = 'k'\nkeys = [{ key = 'l' }]", "give either key and secret, or keys"),
    ("id = 'a'\nkeys = [{ secret = 's' }]", "needs key"),
    ("id = 'a'\nkeys = [{ key = 'k' }, { key = 'k' }]", "the key k is here twice"),
    ("id = 'a'\nkeys = [{ key = 'k', enabled = false }]", "an app needs one enabled key"),
    ("id = 'a'\nkeys = [{ key = 'k', enabled = 'no' }]", "enabled: must be true or false"),
    ("id = 'a'\nsecret = 'env:NOT_SET'", "the environment has no variable NOT_SET"),
    ("id = 'a'\nsecret = 'file:/nowhere/secret'", "/nowhere/secret can't be read"),
    ("id = 'a'\nsettings = { max_speed = 1 }", "there is no setting 'max_speed'"),
    ("id = 'a'\nsettings = { max_batch = 0 }", "max_batch must be between 1 and 1000"),
    ("id = 'a'\nsettings = { client_events = 'maybe' }", "client_events must be true or false"),
    ("id = 'a'\nsettings = { max_batch = {} }", "max_batch: must be a text, a number"),
    ("id = 'a'\nsettings = { max_presence_members = 10000, max_user_info_bytes = 16384 }", "do not fit into"),
    ("id = 'a'\nhistory = [{ keep = 1, seconds = 1 }]", "a rule has either prefix or channel"),
    ("id = 'a'\nhistory = [{ prefix = 'a', seconds = 1 }]", "needs keep"),
    ("id = 'a'\nhistory = [{ prefix = 'a', max_rate = 0, latest = true }]", "max_rate must be between 1 and 1000"),
    ("id = 'a'\nhistory = [{ prefix = 'a', max_rate = 5, latest = true, join = 'a' }]", "either latest or join"),
    ("id = 'a'\nhistory = [{ prefix = 'a', max_rate = 5, join = '.' }]", "is no path"),
    ("id = 'a'\nhistory = [{ prefix = 'a', keep = 1, seconds = 0 }]", "seconds must be between"),
    ("id = 'a'\nhistory = [{ prefix = 'a', keep = 0 }, { prefix = 'a', keep = 0 }]", "has a rule already"),
    ("id = 'a'\nwebhooks = [{ url = 'http://10.0.0.1/' }]", "the URL must begin with https://"),
    ("id = 'a'\nwebhooks = [{ url = 'https://a.example/', events = ['none'] }]", "a webhook's events are all"),
    ("id = 'a'\nwebhooks = [{ url = 'https://a.example/', format = 'xml' }]", "a webhook's format is"),
    ("id = 'a'\nwebhooks = [{ url = 'https://a.example/', secret = 'two words' }]", "a webhook's secret must have"),
    ("id = 'a'\nhistory = [{ prefix = 'a', keep = 10000000000000 }]", "keep: must be a whole number"),
    ("id = 'a'\nwebhooks = [{ url = 'https://a.example/', batch = true }]", "only a webhook in the format pusher can"),
    ("id = 'a'\nwebhooks = [{ url = 'https://a.example/', batch = 1 }]", "batch: must be true or false"),
    ("id = 'a'\nwebhooks = [{ url = '' }]", "the URL must begin with https://"),
    ("id = 'a'\nwebhooks = [{ events = ['all'] }]", "needs either url, or pull = true"),
    ("id = 'a'\nwebhooks = [{ url = 'https://a.example/', pull = true }]", "needs either url, or pull = true"),
    ("id = 'a'\nwebhooks = [{ pull = true, client_events = ['order'] }]", "must begin with client-"),
    ("id = 'a'\ntokens = [{ name = 'x', scopes = ['root'] }]", "a token needs one or more of the scopes"),
    ("id = 'a'\ntokens = [{ name = 'x', scopes = ['read'], expires = 'soon' }]", "expires: must be a number"),
    ("id = 'a'\ntokens = [{ name = 'x', scopes = ['read'], expires = '2001-01-01' }]", "lifetime must be more than"),
    ("id = 'a'\ntokens = [{ name = 'x', scopes = ['read'] }, { name = 'x', scopes = ['read'] }]", "is here twice"),
    ("id = 'other'", "the id other is that of apps[1] too"),
]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOP_SECRET", "shop-secret")
    path = tmp_path / "apps.toml"
    path.write_text(APPS)
    return path


def applied(typed, *words):
    result = typed("apply", *map(str, words), "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_file_becomes_records_and_a_second_time_changes_nothing(typed, file):
    first = applied(typed, file)
    assert [(app["id"], app["outcome"]) for app in first["apps"]] == [("shop", "created")]
    assert [(one["what"], one["name"]) for one in first["made"]] == [
        ("webhook", "https://shop.example.com/hook"),
        ("webhook", "(pulled)"),
        ("token", "ci"),
    ]
    before = typed("export").stdout
    second = applied(typed, file, "--prune")
    assert ([app["outcome"] for app in second["apps"]], second["made"]) == (["unchanged"], [])
    assert typed("export").stdout == before
    shown = json.loads(typed("app", "show", "shop", "--json").stdout)
    assert (shown["key"], shown["secret"]) == ("0123456789abcdefabcd", "shop-secret")
    (token,) = json.loads(typed("token", "list", "shop", "--json").stdout)
    assert (token["name"], token["scopes"]) == ("ci", ["publish"])


def test_dry_run_shows_the_plan_without_secrets_and_changes_nothing(typed, file):
    text = typed("apply", str(file), "--dry-run").stdout
    assert "app shop (Shop): would be created" in text
    assert "client_events: on → off" in text
    assert "This was a dry run: nothing was changed." in text
    assert "shop-secret" not in text
    assert "made" not in text
    assert json.loads(typed("app", "list", "--json").stdout) == []


def test_dry_run_shows_no_key_that_will_be_another_one(typed, file):
    file.write_text("[[apps]]\nid = 'a'\n[[apps]]\nid = 'b'\nsecret = 's'\n[[apps]]\nid = 'c'\nkey = 'mine'\n")
    plans = [applied(typed, file, "--dry-run") for _ in range(2)]
    assert plans[0] == plans[1]
    assert [app["changes"] for app in plans[0]["apps"]] == [["a new key: added"]] * 2 + [["key mine: added"]]
    made = {one["app"]: one["name"] for one in applied(typed, file)["made"]}
    assert len(made["a"]) == 20
    assert made["c"] == "mine"


@pytest.mark.parametrize("kind", ["toml", "yaml", "json"])
def test_secrets_that_begin_like_references_survive_export_and_apply(typed, file, tmp_path, monkeypatch, kind):
    secrets = {"a": "env:HOME", "b": "file:/etc/hostname", "c": "text:text:", "d": "plain"}
    apps = [
        {
            "id": name,
            "key": name,
            "secret": f"text:{secret}",
            "webhooks": [{"url": "https://a.example/", "secret": f"text:{secret}"}],
        }
        for name, secret in secrets.items()
    ]
    apps[3] |= {"keys": [{"key": name, "secret": f"text:{secret}"} for name, secret in (("d", "env:D"), ("e", "x"))]}
    del apps[3]["key"], apps[3]["secret"]
    file.write_text(json.dumps({"apps": apps}))
    applied(typed, file, "--format", "json")
    exported = typed("export", "--format", kind).stdout
    assert json.loads(typed("app", "show", "a", "--json").stdout)["secret"] == "env:HOME"
    (tmp_path / "file").write_text(exported)
    again = applied(typed, tmp_path / "file", "--format", kind)
    assert ({app["outcome"] for app in again["apps"]}, again["made"]) == ({"unchanged"}, [])
    monkeypatch.setenv("REDPOLL_DATA_DIR", str(tmp_path / "elsewhere"))
    applied(typed, tmp_path / "file", "--format", kind)
    assert typed("export", "--format", kind).stdout == exported


def test_change_is_written_and_prune_undoes_the_rest(typed, file):
    applied(typed, file)
    typed("app", "create", "by hand")
    typed("key", "add", "shop", "extra")
    file.write_text(
        "[[apps]]\nid = 'shop'\nkey = '0123456789abcdefabcd'\nsecret = 'another'\n"
        "webhooks = [{ url = 'https://shop.example.com/hook', events = ['channel.occupied'] }]\n"
        "tokens = [{ name = 'ci', scopes = ['read'] }]\n"
    )
    changed = applied(typed, file)["apps"][0]
    assert changed["changes"] == [
        "key 0123456789abcdefabcd: another secret",
        "webhook https://shop.example.com/hook: events, format, batch changed",
        "token ci: revoked and made again",
    ]
    shop, by_hand = applied(typed, file, "--prune")["apps"]
    assert shop["changes"] == [
        "key extra: disabled",
        "history of news-…: removed",
        "history of cursor-…: removed",
        "history of chat: removed",
        "client_events: off → on",
        "max_connections: 5000 → 0",
        "webhook (pulled): deleted",
    ]
    assert (by_hand["name"], by_hand["outcome"]) == ("by hand", "switched off")
    assert {app["outcome"] for app in applied(typed, file, "--prune")["apps"]} == {"unchanged"}
    file.write_text("apps = []")
    refused = typed("apply", str(file), "--prune")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "has no app, so --prune would switch off all apps" in refused.stderr
    assert {app["outcome"] for app in applied(typed, file, "--prune", "--dry-run")["apps"]} == {"switched off"}
    assert "enabled=true" in typed("app", "set", "shop").stdout


def test_webhooks_without_a_url_are_told_apart_by_their_secret_then_by_what_they_get(typed, file):
    rows = {
        "one": "{ pull = true, secret = 'one' }",
        "two": "{ pull = true, secret = 'two' }",
        "joins": "{ pull = true, events = ['member.added'], channels = ['presence-a', 'presence-b'] }",
        "orders": "{ pull = true, client_events = ['client-order'] }",
    }

    def write(**changed):
        chosen = rows | changed
        file.write_text(f"[[apps]]\nid = 'shop'\nwebhooks = [{', '.join(filter(None, chosen.values()))}]\n")
        return applied(typed, file, "--prune")["apps"][0]["changes"]

    def shown():
        found = json.loads(typed("webhook", "list", "shop", "--json").stdout)
        return {one["id"]: (one["events"], one["client_events"], one["enabled"]) for one in found}

    write()
    first = shown()
    rows = dict(reversed(rows.items()))
    assert (write(), shown()) == ([], first)
    # One goes, one changes, and the others stay what they are.
    changes = write(orders="", two="{ pull = true, secret = 'two', enabled = false }")
    assert changes == ["webhook (pulled): enabled changed", "webhook (pulled): deleted"]
    _, two, _, orders = first
    del first[orders]
    assert shown() == first | {two: (*first[two][:2], False)}


def test_each_fault_is_named_with_its_line_and_changes_nothing(typed, file):
    assert len(FAULTS) >= 30
    file.write_text("[[apps]]\nid = 'other'\nkey = 'taken'\nsecret = 's'\n")
    applied(typed, file)
    before = typed("export").stdout
    for fault, sentence in FAULTS:
        # An app that is right stands before the one with the fault.
        file.write_text(f"[[apps]]\nid = 'right'\n[[apps]]\nid = 'other'\n[[apps]]\n{fault}\n")
        result = typed("apply", str(file))
        assert result.exit_code == 2, fault
        named = [line for line in result.stderr.splitlines() if sentence in line]
        assert len(named) == 1, (fault, result.stderr)
        assert named[0].startswith(f"{file}:"), named
        assert int(named[0].removeprefix(f"{file}:").partition(":")[0]) in range(5, 9), named
    assert typed("export").stdout == before


def test_all_faults_are_named_at_once(typed, app_id, file):
    file.write_text("[[apps]]\nid = 'a'\nsettings = { x = 1, max_batch = 0 }\n[[apps]]\nid = 'b/c'\n")
    assert [line.partition(": ")[0] for line in typed("apply", str(file)).stderr.splitlines()] == [
        f"{file}:3",
        f"{file}:3",
        f"{file}:4",
    ]


@pytest.mark.parametrize("kind", ["toml", "yaml", "json"])
def test_export_of_an_import_gives_the_same_records_elsewhere(typed, tmp_path, monkeypatch, kind):
    (tmp_path / "soketi.json").write_text(json.dumps(SOKETI))
    typed("import", "soketi", str(tmp_path / "soketi.json"))
    exported = typed("export", "--format", kind).stdout
    (tmp_path / "file").write_text(exported)
    monkeypatch.setenv("REDPOLL_DATA_DIR", str(tmp_path / "elsewhere"))
    applied(typed, tmp_path / "file", "--format", kind)
    assert typed("export", "--format", kind).stdout == exported
    shown = json.loads(typed("app", "show", "shop-1", "--json").stdout)
    assert (shown["key"], shown["secret"]) == ("shop-key", "shop-secret")


def many(count):
    apps = [{"id": f"app-{n}", "key": f"key-{n}", "webhooks": [{"url": "https://a.example/"}]} for n in range(count)]
    return json.dumps({"apps": apps})


def test_killed_at_random_it_leaves_all_or_nothing(tmp_path):
    count, chance = 500, random.Random(27)
    (tmp_path / "apps.json").write_text(many(count))

    def start(folder):
        words = ["apply", str(tmp_path / "apps.json"), "--data-dir", str(tmp_path / folder)]
        return subprocess.Popen([sys.executable, "-m", "redpoll", *words], stdout=subprocess.DEVNULL)

    def apps_in(folder):
        path = tmp_path / folder / "redpoll.sqlite"
        if not path.exists():
            return 0
        with sqlite3.connect(path) as database:
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'apps'").fetchone():
                return 0
            return database.execute("SELECT count(*) FROM apps").fetchone()[0]

    began = time.monotonic()
    assert start("whole").wait() == 0
    lasts_s = time.monotonic() - began
    assert apps_in("whole") == count
    for number in range(amount(2, 10)):
        process = start(f"killed-{number}")
        try:
            process.wait(lasts_s * chance.uniform(0.2, 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        assert apps_in(f"killed-{number}") in (0, count)


async def test_thousands_of_apps_of_a_running_server_and_its_clients(tmp_path):
    """The last of them can be used when the command ends. An app that is switched off closes its connections."""
    with Server(workers=1) as server:
        await apply_to_server(server, tmp_path)


async def apply_to_server(server, tmp_path):
    count = amount(2_000, 10_000)
    last = f"app-{count - 1}"
    (tmp_path / "apps.json").write_text(many(count))
    folder = str(server.folder / "data")

    def apply(path):
        words = ["apply", str(path), "--data-dir", folder, "--json"]
        done = subprocess.run([sys.executable, "-m", "redpoll", *words], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    made = apply(tmp_path / "apps.json")["made"]
    secret = next(one["secret"] for one in made if one["app"] == last and one["what"] == "secret")

    class Target:
        port, app_id, app_key, app_secret = server.port, last, f"key-{count - 1}", secret

    socket = await Socket.connect(Target)
    await socket.subscribe("news")
    async with Api(Target) as api:
        await api.publish("news", "hello", "{}")
    await socket.next("hello")
    (tmp_path / "one.json").write_text(json.dumps({"apps": [{"id": last, "settings": {"enabled": False}}]}))
    assert apply(tmp_path / "one.json")["apps"][0]["changes"] == ["enabled: on → off"]
    assert await socket.until_closed() == 4003


async def test_app_with_the_id_of_a_deleted_one_begins_empty(typed, tmp_path):
    path = tmp_path / "apps.toml"
    with Server(workers=1) as server:
        folder = str(server.folder / "data")

        async def begin(key: str) -> Api:
            path.write_text(
                f"[[apps]]\nid = 'again'\nkey = '{key}'\nsecret = 'secret'\n"
                "history = [{ prefix = 'news-', keep = 10, seconds = 3600 }]\n"
            )
            await asyncio.to_thread(applied, typed, path, "--data-dir", folder)
            return Api(SimpleNamespace(port=server.port, app_id="again", app_key=key, app_secret="secret"))

        async with await begin("first") as api:
            for channel in ("news-a", "cache-a"):
                await api.publish(channel, "n", "of the first")
            assert (await api.get("/channels/news-a/history"))["messages"]
        deleted = await asyncio.to_thread(typed, "app", "delete", "again", "--yes", "--data-dir", folder)
        assert deleted.exit_code == 0, deleted.output
        async with await begin("second") as api:
            assert (await api.get("/channels/news-a/history"))["messages"] == []
            assert (await api.get("/channels/cache-a", info="cache"))["cache"] is None
