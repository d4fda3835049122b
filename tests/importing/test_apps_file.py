import json

import pytest

from redpoll.importing import apps_file
from redpoll.importing.plan import SourceError

NOW = 1_700_000_000.0
TOML = """\
# The shop.
[[apps]]
id = "shop"
key = "abc"
secret = "env:SHOP"
settings = { max_connections = 5, client_events = false, allowed_origins = ["a.example", "b.example"] }

[[apps]]
id = 1234567

[apps.settings]
max_batch = 3

[[apps.webhooks]]
url = "https://a.example/"

[[apps.webhooks]]
url = "https://b.example/"
events = ["all"]
"""
YAML = """\
apps:
  - id: shop
    key: abc
    secret: env:SHOP
    settings: {max_connections: 5, client_events: false, allowed_origins: [a.example, b.example]}
  - id: 1234567
    settings:
      max_batch: 3
    webhooks:
      - url: https://a.example/
      - url: https://b.example/
        events: [all]
"""
JSON = json.dumps(
    {
        "apps": [
            {
                "id": "shop",
                "key": "abc",
                "secret": "env:SHOP",
                "settings": {
                    "max_connections": 5,
                    "client_events": False,
                    "allowed_origins": ["a.example", "b.example"],
                },
            },
            {
                "id": 1234567,
                "settings": {"max_batch": 3},
                "webhooks": [{"url": "https://a.example/"}, {"url": "https://b.example/", "events": ["all"]}],
            },
        ]
    },
    indent=2,
)


def parse(text, name="apps.toml"):
    return apps_file.parse(
        name, text.encode(), None, lambda secret: apps_file.resolve_secret(secret, {"SHOP": "s3"}), NOW
    )


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.json", JSON), ("standard input", JSON)]
)
def test_three_formats_say_the_same(name: str, text: str):
    file = parse(text, name)
    assert file.faults == []
    shop, other = file.apps
    assert (shop["id"], other["id"]) == ("shop", "1234567")
    assert shop["keys"] == [{"key": "abc", "enabled": True, "secret": "s3"}]
    assert shop["settings"] == {
        "max_connections": "5",
        "client_events": "false",
        "allowed_origins": "a.example,b.example",
    }
    assert other["webhooks"] == [{"url": "https://a.example/"}, {"url": "https://b.example/", "events": ["all"]}]
    assert other["keys"] == []


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [("a.toml", TOML, (2, 6, 12, 18)), ("a.yaml", YAML, (2, 5, 8, 11)), ("a.json", JSON, (3, 3, 16, 16))],
)
def test_places_have_lines(name: str, text: str, lines: tuple[int, ...]):
    file = parse(text, name)
    places = ("apps[0]", "apps[0].settings.max_connections", "apps[1].settings.max_batch", "apps[1].webhooks[1].url")
    assert tuple(file.line(place) for place in places) == lines


def test_expiry_is_a_duration_or_a_date():
    file = parse(
        "[[apps]]\nid='a'\ntokens=[{name='x',scopes=['read'],expires='90d'},"
        "{name='y',scopes=['read'],expires=2030-01-01},{name='z',scopes=['read']}]"
    )
    assert [token["expires_at"] for token in file.apps[0]["tokens"]] == [NOW + 90 * 86_400, 1_893_456_000.0, None]


def test_webhook_may_have_a_pin_which_is_a_text():
    file = parse("[[apps]]\nid='a'\nwebhooks=[{url='https://a.example/',pin='ab'},{url='https://b.example/',pin=7}]")
    assert [webhook.get("pin") for webhook in file.apps[0]["webhooks"]] == ["ab", None]
    assert [(fault.where, fault.text) for fault in file.faults] == [("apps[0].webhooks[1].pin", "must be a text")]


def test_secrets_come_from_files(tmp_path):
    (tmp_path / "secret").write_text("s4\n")
    assert apps_file.resolve_secret(f"file:{tmp_path}/secret", {}) == "s4"
    (tmp_path / "empty").touch()
    (tmp_path / "large").write_bytes(b"x" * 5_000)
    for name, why in (("none", "can't be read"), ("empty", "is empty"), ("large", "is too large")):
        with pytest.raises(ValueError, match=why):
            apps_file.resolve_secret(f"file:{tmp_path}/{name}", {})


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.toml", "[[apps]]\nid = \n", r"a\.toml:2: not valid TOML"),
        ("a.json", '{"apps": [\n{]}', r"a\.json:2: not valid JSON"),
        ("a.yaml", "apps:\n  - id: [", r"a\.yaml:3: not valid YAML"),
        ("a.json", "[" * 100_000, r"nested too deeply|not valid JSON"),
        ("a.toml", f"a = {'1' * 5000}", "not valid TOML"),
        ("a.json", '{"apps": [{"id": "\\ud800"}]}', "half of a surrogate pair"),
        ("a.toml", "x" * (apps_file.MAX_BYTES + 1), "more than 16 MiB"),
    ],
)
def test_file_that_cannot_be_read_is_refused(name: str, text: str, why: str):
    with pytest.raises(SourceError, match=why):
        parse(text, name)


def test_ids_and_keys_of_yaml_that_look_like_numbers_stay_as_they_are():
    file = parse("apps:\n  - id: 0123\n    key: 01234567\n  - id: 1e5\n    keys: [{key: 0x1F}]\n", "a.yaml")
    assert file.faults == []
    assert [(app["id"], app["keys"][0]["key"]) for app in file.apps] == [("0123", "01234567"), ("1e5", "0x1F")]


@pytest.mark.parametrize("written", ["1.5", "true", "null", "[a]"])
def test_an_id_that_is_no_text_and_no_whole_number_is_refused(written: str):
    file = parse(f"apps:\n  - id: {written}\n", "a.yaml")
    assert ("apps[0].id", "must be a text") in file.faults
