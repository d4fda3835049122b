import msgspec

from redpoll.protocol.apps import App, Key

OLD, NEW, OFF = (
    Key(key="aa", secret="01"),
    Key(key="bb", secret="02"),
    Key(key="cc", secret="03", enabled=False),
)


def test_each_enabled_key_has_its_secret_and_no_other_has_one():
    app = App(id="1", name="x", keys=(OLD, NEW, OFF))
    assert [app.secret_of(key) for key in ("aa", "bb", "cc", "dd", "")] == ["01", "02", None, None, None]


def test_the_server_signs_with_the_oldest_enabled_key():
    assert App(id="1", name="x", keys=(OFF, NEW, OLD)).signing_key() is NEW
    assert App(id="1", name="x", keys=(OFF,)).signing_key() is None


def test_a_record_survives_json_and_leaves_defaults_out():
    app = App(id="1", name="x", keys=(OLD, OFF), max_channels=7, allowed_origins=("example.com",))
    text = msgspec.json.encode(app)
    assert msgspec.json.decode(text, type=App) == app
    assert b"max_data_bytes" not in text
