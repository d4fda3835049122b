import msgspec
import pytest

from redpoll.protocol.apps import (
    DAILY_LIMITS,
    SETTINGS,
    App,
    HistoryRule,
    Key,
    history_fault,
    parse_setting,
    with_eras,
)

OLD, NEW, OFF = (
    Key(key="aa", secret="01"),
    Key(key="bb", secret="02"),
    Key(key="cc", secret="03", enabled=False),
)


def test_secrets_are_found_by_enabled_keys_only():
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


# -- rules of history ----------------------------------------------------------------------------------------


def rule(name: str, **fields: object) -> HistoryRule:
    return HistoryRule(id="00000a", name=name, **{"keep": 10, "seconds": 60, **fields})


def app_with(*rules: HistoryRule) -> App:
    return App(id="1", name="x", keys=(), history=rules)


def test_the_channels_own_rule_wins_then_the_longest_prefix():
    every, news, sport, one = (
        rule("", prefix=True),
        rule("news-", prefix=True),
        rule("news-sport-", prefix=True),
        rule("news-sport-1"),
    )
    for app in (app_with(every, news, sport, one), app_with(one, sport, news, every)):
        asked = ("news-sport-1", "news-sport-2", "news-x", "news", "presence-x")
        assert [app.history_rule(channel) for channel in asked] == [one, sport, news, every, every]


def test_without_a_rule_nothing_is_stored():
    assert app_with().history_rule("a") is None
    assert app_with(rule("a"), rule("b-", prefix=True)).history_rule("ab-") is None


def test_a_rule_with_keep_0_is_an_exception_to_a_wider_rule():
    app = app_with(rule("news-", prefix=True), rule("news-private", keep=0, seconds=0))
    assert app.history_rule("news-private") is None
    assert app.history_rule("news-private-1") is not None


@pytest.mark.parametrize("channel", ["#server-to-user-7", "private-redpoll.console", "private-redpoll.x"])
def test_user_channels_and_the_console_are_never_stored(channel):
    assert app_with(rule("", prefix=True), rule(channel)).history_rule(channel) is None


ALL, NEWS, ONE = {"name": "", "prefix": True}, {"name": "n-", "prefix": True}, {"name": "n-x"}


@pytest.mark.parametrize(
    ("before", "after", "eras"),
    [
        ([], [NEWS], ["new"]),
        # Nothing changed, or rules came and went whose channels were stored before and after.
        ([NEWS], [NEWS], ["n-"]),
        ([NEWS], [{**NEWS, "keep": 20, "replay": 3}], ["n-"]),
        ([NEWS], [NEWS, ONE], ["n-", "n-"]),
        ([ALL], [NEWS, ALL], ["", ""]),
        ([NEWS, ONE], [NEWS], ["n-"]),
        ([NEWS, ONE], [ONE], ["n-x"]),
        # The wider rule now covers channels that were not stored.
        ([NEWS], [ALL, NEWS], ["new", "n-"]),
        ([ONE], [NEWS, ONE], ["new", "n-x"]),
        # So it does when an exception is removed; adding one changes nothing.
        ([NEWS], [NEWS, {**ONE, "keep": 0}], ["n-", None]),
        ([NEWS, {**ONE, "keep": 0}], [NEWS], ["new"]),
        ([NEWS, {**ONE, "keep": 0}], [NEWS, ONE], ["n-", "new"]),
        ([ALL, {**NEWS, "keep": 0}], [ALL, {**NEWS, "keep": 0}, ONE], ["", None, "new"]),
        ([ALL, {**NEWS, "keep": 0}, ONE], [ALL, ONE], ["new", "n-x"]),
    ],
)
def test_a_rule_gets_a_new_era_if_channels_were_not_stored_until_now(before, after, eras):
    old = [rule(**{"era": fields["name"] if fields.get("keep", 1) else "", **fields}) for fields in before]
    result = with_eras(old, [rule(**fields) for fields in after], "new")
    assert [new.era for new in result] == [era or "" for era in eras]
    assert [msgspec.structs.replace(new, era="") for new in result] == [rule(**fields) for fields in after]


def test_rules_survive_json():
    app = app_with(rule("news-", prefix=True, replay=3, client_events=True), rule("x", replay_seconds=5))
    assert msgspec.json.decode(msgspec.json.encode(app), type=App) == app


@pytest.mark.parametrize(
    "given",
    [
        rule("news"),
        rule("", prefix=True),
        rule("news-", prefix=True, keep=10_000, seconds=2_592_000, replay=1_000),
        rule("news", keep=3, replay=3, client_events=True),
        rule("news", seconds=5, replay_seconds=5),
        rule("news", keep=0, seconds=0),
        rule("x" * 200),
    ],
)
def test_valid_rules_have_no_fault(given):
    assert history_fault(given) is None


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (HistoryRule(id="00000", name="x"), "id must be 6 hex digits"),
        (rule(""), "'' can't be the name of a channel"),
        (rule("a b"), "'a b' can't be the name of a channel"),
        (rule("x" * 201), "can't be the name of a channel"),
        (rule("#", prefix=True), "'#' can't be the beginning of a channel name"),
        (rule("private-redpoll.console"), "reserved for the server"),
        (rule("x", keep=-1), "keep must be between 0 and 10000 messages, not -1"),
        (rule("x", keep=10_001), "keep must be between 0 and 10000 messages, not 10001"),
        (rule("x", seconds=0), "seconds must be between 1 and 2592000, not 0"),
        (rule("x", seconds=2_592_001), "seconds must be between 1 and 2592000, not 2592001"),
        (rule("x", keep=0), "with keep 0 nothing is stored"),
        (rule("x", keep=0, seconds=0, replay=1), "with keep 0 nothing is stored"),
        (rule("x", keep=0, seconds=0, client_events=True), "with keep 0 nothing is stored"),
        (rule("x", replay=1, replay_seconds=1), "not both"),
        (rule("x", replay=11), "replay must be between 0 and 10 messages, not 11"),
        (rule("x", keep=2_000, replay=1_001), "replay must be between 0 and 1000 messages, not 1001"),
        (rule("x", replay=-1), "replay must be between 0 and 10 messages, not -1"),
        (rule("x", replay_seconds=61), "replay_seconds must be between 0 and the rule's 60 seconds, not 61"),
        (rule("x", replay_seconds=-1), "replay_seconds must be between 0 and the rule's 60 seconds, not -1"),
    ],
)
def test_an_inconsistent_rule_is_refused_with_a_sentence(given, fault):
    sentence = history_fault(given)
    assert sentence is not None
    assert fault in sentence


# -- settings ------------------------------------------------------------------------------------------------


def test_the_table_has_every_field_of_the_record_but_those_that_have_commands_of_their_own():
    identity = ("id", "name", "keys")
    derived = ("history", "hooks", "console_key", "console_until", "debug_until", "debug_socket", "made")
    assert {*SETTINGS, *identity, *derived} == set(App.__struct_fields__)
    assert not SETTINGS.keys() & {*identity, *derived}
    assert list(SETTINGS) == [field for field in App.__struct_fields__ if field in SETTINGS]


def test_the_default_of_each_setting():
    assert {name: setting.default for name, setting in SETTINGS.items()} == {
        "enabled": True,
        "client_events": True,
        "subscription_count": False,
        "watchlist": False,
        "grants": False,
        "user_authentication_timeout_s": 0.0,
        "allowed_origins": (),
        "max_connections": 0,
        "plan": "pro",
        "cache_ttl_s": 1800,
        "idempotency": False,
        "tls_required": False,
        "max_event_name_chars": 200,
        "max_channels": 100,
        "max_data_bytes": 10240,
        "max_batch": 10,
        "max_presence_members": 100,
        "max_user_info_bytes": 1024,
        "user_resume_s": 0,
        "max_cached_channels": 10_000,
        "max_history_channels": 10_000,
        "max_occupied_channels": 1_000_000,
    }


def test_plans_limit_the_messages_of_a_day():
    limits = {plan: App(id="1", name="x", keys=(), plan=plan).daily_limit for plan in DAILY_LIMITS}
    assert limits == {"free": 200_000, "starter": 1_000_000, "pro": None}
    assert App(id="1", name="x", keys=()).daily_limit is None


@pytest.mark.parametrize("name", SETTINGS)
def test_parsed_values_fit_into_a_record_and_survive_json(name):
    setting = SETTINGS[name]
    texts = {
        "switch": ("true", "false"),
        "count": (str(setting.minimum), str(setting.maximum)),
        "seconds": ("0", "0.25", str(setting.maximum)),
        "choice": setting.choices,
        "hosts": ("", "a.example,*.b.example:8080"),
    }[setting.type]
    for text in (*texts, f" {texts[0]} "):
        value = parse_setting(name, text)
        app = msgspec.structs.replace(App(id="1", name="x", keys=()), **{name: value})
        assert msgspec.json.decode(msgspec.json.encode(app), type=App) == app
        assert type(value) is type(setting.default)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("enabled", "0", False),
        ("enabled", "1", True),
        ("enabled", "TRUE", True),
        ("plan", "free", "free"),
        ("max_connections", "0", 0),
        ("user_authentication_timeout_s", "30", 30.0),
        ("user_authentication_timeout_s", "0.5", 0.5),
        ("allowed_origins", "", ()),
        ("allowed_origins", " , ", ()),
        ("allowed_origins", "localhost:3000", ("localhost:3000",)),
        ("allowed_origins", "A.example, *.b.Example ,a.example", ("a.example", "*.b.example")),
        ("allowed_origins", "[::1]:8080,127.0.0.1", ("[::1]:8080", "127.0.0.1")),
    ],
)
def test_values_are_read(name, text, value):
    read = parse_setting(name, text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("enabled", ""),
        ("enabled", "yes"),
        ("enabled", "2"),
        ("plan", "gold"),
        ("plan", ""),
        ("max_connections", "-1"),
        ("max_connections", "many"),
        ("max_connections", "1.5"),
        ("max_connections", "1_000"),
        ("max_connections", "٧"),
        ("max_connections", "9" * 5000),
        ("max_channels", "0"),
        ("cache_ttl_s", "0"),
        ("max_data_bytes", "262145"),
        ("user_authentication_timeout_s", "-1"),
        ("user_authentication_timeout_s", "nan"),
        ("user_authentication_timeout_s", "1e3"),
        ("user_authentication_timeout_s", "3601"),
        ("allowed_origins", "https://good.example"),
        ("allowed_origins", "good.example/"),
        ("allowed_origins", "*"),
        ("allowed_origins", "a.*.example"),
        ("allowed_origins", "*good.example"),
        ("allowed_origins", "good.example:"),
        ("allowed_origins", "good.example:0"),
        ("allowed_origins", "good.example:65536"),
        ("allowed_origins", "good..example"),
        ("allowed_origins", "a b"),
        ("allowed_origins", "é.example"),
        ("allowed_origins", "user@good.example"),
        ("allowed_origins", "a." * 130 + "example"),
        ("allowed_origins", "x" * 100_000),
        ("allowed_origins", ",".join(f"h{n}.example" for n in range(51))),
    ],
    ids=lambda text: text[:30],
)
def test_an_invalid_value_is_refused_with_a_sentence_that_names_the_setting(name, text):
    with pytest.raises(ValueError, match=rf"\A{name}[ :]"):
        parse_setting(name, text)


@pytest.mark.parametrize("name", ["", "id", "keys", "name", "daily_limit", "Enabled"])
def test_an_unknown_setting_is_refused_with_the_list_of_settings(name):
    with pytest.raises(ValueError, match=r"there is no setting .*cache_ttl_s"):
        parse_setting(name, "1")


def test_a_record_with_a_plan_that_does_not_exist_is_not_taken():
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"id":"1","name":"x","keys":[],"plan":"gold"}', type=App)


def test_a_record_with_every_list_full_stays_below_what_the_directory_carries():
    hosts = ",".join(f"{'h' * 60}.{'i' * 60}.{n:02}.example:65535" for n in range(50))
    keys = tuple(Key(key="0" * 20, secret="0" * 40) for _ in range(10))
    app = App(id="1", name="x", keys=keys, allowed_origins=parse_setting("allowed_origins", hosts))
    assert len(msgspec.json.encode(app)) < 16 * 1024
