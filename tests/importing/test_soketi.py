"""soketi's configurations: JSON with paths or nested, environment files, and tables of apps."""

import json

import pytest

from redpoll.importing import documents, soketi
from redpoll.importing.plan import SourceError

APP = {"id": "shop-1", "key": "shop-key", "secret": "shop/secret+="}


def plan_of(tmp_path, content):
    path = tmp_path / "soketi"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return soketi.read(documents.load(path))


def without(plan):
    return {row.theirs: row.note for row in plan.rows if not row.ours}


def test_app_with_everything_that_maps(tmp_path):
    webhook = {
        "url": "https://shop.example/hooks",
        "event_types": ["channel_occupied", "member_added", "cache_miss"],
        "filter": {"channel_name_starts_with": "presence-"},
    }
    given = APP | {
        "maxConnections": 200,
        "enableClientMessages": True,
        "enabled": False,
        "maxPresenceMembersPerChannel": "50",
        "maxPresenceMemberSizeInKb": 0.5,
        "maxEventChannelsAtOnce": 20,
        "maxEventNameLength": 100,
        "maxEventPayloadInKb": 32,
        "maxEventBatchSize": 5,
        "enableUserAuthentication": True,
        "webhooks": [webhook],
    }
    plan = plan_of(tmp_path, {"appManager.array.apps": [given], "userAuthenticationTimeout": 5_000, "port": 6_002})
    (app,) = plan.apps
    assert (app.id, app.key, app.secret) == ("shop-1", "shop-key", "shop/secret+=")
    assert app.settings == {
        "max_connections": "200",
        "client_events": "true",
        "enabled": "false",
        "max_presence_members": "50",
        "max_user_info_bytes": "512",
        "max_channels": "20",
        "max_event_name_chars": "100",
        "max_data_bytes": "32768",
        "max_batch": "5",
        "cache_ttl_s": "3600",
        "user_authentication_timeout_s": "5",
    }
    events = ["channel.occupied", "member.added", "cache.miss"]
    assert app.webhooks == [{"url": "https://shop.example/hooks", "events": events, "channels": ["presence-"]}]
    assert plan.server == {"port": 6_002, "trigger_rate_per_minute": 0}


def test_defaults_of_soketi_that_differ_from_ours_are_taken_over(tmp_path):
    (app,) = plan_of(tmp_path, {"appManager": {"array": {"apps": [APP]}}}).apps
    assert app.settings["client_events"] == "false"
    assert app.settings["max_data_bytes"] == str(100 * 1_024)
    assert app.settings["max_user_info_bytes"] == "2048"
    assert "max_channels" not in app.settings


def test_no_limit_is_taken_over_as_no_limit(tmp_path):
    plan = plan_of(tmp_path, {"appManager.array.apps": [APP | {"maxConnections": -1}]})
    assert plan.apps[0].settings["max_connections"] == "0"


def test_environment_file_describes_one_app(tmp_path):
    plan = plan_of(
        tmp_path,
        """
SOKETI_HOST=127.0.0.1
SOKETI_PORT='6010'
SOKETI_METRICS_SERVER_PORT=9602
SOKETI_PATH_PREFIX=/ws
SOKETI_SHUTDOWN_GRACE_PERIOD=5000
SOKETI_DEFAULT_APP_ID=shop-1
SOKETI_DEFAULT_APP_KEY=shop-key
SOKETI_DEFAULT_APP_SECRET=shop-secret
SOKETI_DEFAULT_APP_ENABLE_CLIENT_MESSAGES=true
SOKETI_DEFAULT_APP_MAX_BACKEND_EVENTS_PER_SEC=100
SOKETI_DEFAULT_APP_WEBHOOKS='[{"url":"https://shop.example/h","event_types":["client_event"]}]'
SOKETI_EVENT_MAX_SIZE_IN_KB=10
SOKETI_ADAPTER_DRIVER=redis
SOKETI_DB_REDIS_HOST=cache
SOKETI_DB_REDIS_PASSWORD=p@ss
SOKETI_QUEUE_DRIVER=redis
SOKETI_DEFAULT_APP_MAX_CONNECTIONS=500
UNRELATED=1
""",
    )
    (app,) = plan.apps
    assert (app.id, app.settings["client_events"], app.settings["max_data_bytes"]) == ("shop-1", "true", "10240")
    assert app.webhooks[0]["events"] == ["client_event"]
    assert plan.server == {
        "host": "127.0.0.1",
        "port": 6_010,
        "control_port": 9_602,
        "path_prefix": "/ws",
        "shutdown_grace_s": 5.0,
        "redis_url": "redis://:p%40ss@cache:6379/0",
        "trigger_rate_per_minute": 6_000,
    }
    assert not any("p@ss" in f"{row.ours}{row.value}" or "p%40ss" in row.ours for row in plan.rows)
    # A variable that soketi doesn't know either.
    assert set(without(plan)) >= {"SOKETI_QUEUE_DRIVER", "SOKETI_DEFAULT_APP_MAX_CONNECTIONS"}


def test_keys_and_passwords_that_look_like_numbers_stay_as_they_are(tmp_path):
    plan = plan_of(
        tmp_path,
        """
SOKETI_DEFAULT_APP_ID=007
SOKETI_DEFAULT_APP_KEY=12345678901234567e89
SOKETI_DEFAULT_APP_SECRET=true
SOKETI_DEFAULT_APP_MAX_CONNS=-1
SOKETI_DEFAULT_APP_ENABLE_CLIENT_MESSAGES=false
SOKETI_ADAPTER_DRIVER=redis
SOKETI_DB_REDIS_PASSWORD=1.50
""",
    )
    (app,) = plan.apps
    assert (app.id, app.key, app.secret) == ("007", "12345678901234567e89", "true")
    assert (app.settings["max_connections"], app.settings["client_events"]) == ("0", "false")
    assert plan.server["redis_url"] == "redis://:1.50@127.0.0.1:6379/0"


def test_table_of_apps_with_the_spelling_of_a_database(tmp_path):
    row = {
        "id": 7,
        "key": "k",
        "secret": "s",
        "max_connections": 10,
        "enable_client_messages": 1,
        "max_backend_events_per_sec": -1,
        "max_client_events_per_sec": 30,
        "max_read_req_per_sec": 5,
        "webhooks": "[]",
        "max_event_payload_in_kb": None,
    }
    plan = plan_of(tmp_path, [row, {"AppId": "b", "AppKey": "kb", "AppSecret": "sb", "MaxConnections": 3}])
    assert [(app.id, app.settings["max_connections"]) for app in plan.apps] == [("7", "10"), ("b", "3")]
    assert plan.apps[0].settings["client_events"] == "true"
    assert plan.server == {"trigger_rate_per_minute": 0, "client_events_per_second": 30}
    assert "maxReadRequestsPerSecond" in without(plan)


@pytest.mark.parametrize(
    ("rates", "limit"),
    [
        # An app without a limit isn't slowed down below the default.
        ((1, -1), 10),
        ((-1, 1), 10),
        ((30, -1), 30),
        ((1, 30), 30),
        ((30, 1), 30),
        ((1, 2), 2),
        ((0.3, 0.4), 1),
    ],
)
def test_limit_of_client_events_is_that_of_the_fastest_app(tmp_path, rates, limit):
    apps = [
        {"id": str(at), "key": f"k{at}", "secret": "s", "enableClientMessages": True, "maxClientEventsPerSecond": rate}
        for at, rate in enumerate(rates)
    ]
    # Its clients send no events, so its limit doesn't count.
    apps.append({"id": "off", "key": "off", "secret": "s", "maxClientEventsPerSecond": 500})
    plan = plan_of(tmp_path, {"appManager.array.apps": apps})
    assert plan.server["client_events_per_second"] == limit
    rows = {(row.app, row.theirs): row for row in plan.rows}
    for at, rate in enumerate(rates):
        if rate > 0:
            row = rows["", f"maxClientEventsPerSecond of {at}"]
            assert (row.ours, bool(row.note)) == (f"client_events_per_second={limit}", rate != limit)
        else:
            row = rows[str(at), "maxClientEventsPerSecond"]
            assert row.note == f"redpoll allows {limit} a second and connection: client_events_per_second"
    assert rows["off", "maxClientEventsPerSecond"].note == "the app has no client events"


def test_without_limits_of_client_events_none_is_recommended(tmp_path):
    plan = plan_of(tmp_path, [APP | {"enableClientMessages": True}])
    assert "client_events_per_second" not in plan.server
    assert "redpoll allows 10 a second" in without(plan)["maxClientEventsPerSecond"]


@pytest.mark.parametrize(
    "source",
    [
        {"webhooks": {"batching": {"enabled": True, "duration": 50}}},
        {"webhooks.batching.enabled": True, "webhooks.batching.duration": 50},
        "SOKETI_WEBHOOKS_BATCHING=1\nSOKETI_WEBHOOKS_BATCHING_DURATION=50\n",
    ],
)
def test_batched_webhooks_stay_batched(tmp_path, source):
    webhooks = [{"url": "https://x.example/", "event_types": ["client_event"]}]
    if isinstance(source, str):
        rows = {"ID": "7", "KEY": "k", "SECRET": "s", "WEBHOOKS": json.dumps(webhooks)}
        source += "".join(f"SOKETI_DEFAULT_APP_{name}={value}\n" for name, value in rows.items())
    else:
        source = {**source, "appManager.array.apps": [APP | {"webhooks": webhooks}]}
    plan = plan_of(tmp_path, source)
    (webhook,) = plan.apps[0].webhooks
    assert webhook["batch"] is True
    assert without(plan)["webhooks.batching.duration"] == "redpoll joins the events of a second"
    assert "webhooks.batching.enabled" not in without(plan)


def test_what_has_no_counterpart_is_listed_with_the_reason(tmp_path):
    webhooks = [
        {"lambda_function": "f", "event_types": ["client_event"]},
        {
            "url": "https://x.example/",
            "event_types": ["client_event"],
            "headers": {"X-A": "1"},
            "filter": {"channel_name_ends_with": "-x"},
        },
        {"url": "https://y.example/", "event_types": ["future_event"]},
    ]
    source = {
        "debug": True,
        "cors.origin": ["https://a.example"],
        "adapter": {"driver": "nats", "nats": {"servers": ["n:4222"]}},
        "appManager.array.apps": [APP | {"webhooks": webhooks, "maxChannelNameLength": 500, "enableStatistics": True}],
    }
    plan = plan_of(tmp_path, source)
    found = without(plan)
    assert set(found) == {
        "debug",
        "cors.origin",
        "adapter.nats.servers",
        "webhook",
        "headers of webhook https://x.example/",
        "filter of webhook https://x.example/",
        "webhook https://y.example/",
        "maxChannelNameLength",
        "enableStatistics",
    }
    assert all(found.values())
    assert [webhook["url"] for webhook in plan.apps[0].webhooks] == ["https://x.example/"]


def test_value_beyond_our_limit_becomes_the_limit_with_a_note(tmp_path):
    plan = plan_of(tmp_path, {"appManager.array.apps": [APP | {"maxEventPayloadInKb": 1_000}]})
    assert plan.apps[0].settings["max_data_bytes"] == "262144"
    (row,) = [row for row in plan.rows if row.theirs == "maxEventPayloadInKb"]
    assert "262144" in row.note


def test_certificate_makes_the_port_one_of_tls(tmp_path):
    given = {"port": 443, "ssl": {"certPath": "/c.pem", "keyPath": "/k.pem", "passphrase": "x"}}
    plan = plan_of(tmp_path, given | {"appManager.array.apps": [APP]})
    assert {name: plan.server[name] for name in ("tls_port", "tls_cert", "tls_key", "port")} == {
        "tls_port": 443,
        "tls_cert": "/c.pem",
        "tls_key": "/k.pem",
        "port": 0,
    }
    assert "ssl.passphrase" in without(plan)


@pytest.mark.parametrize(
    ("apps", "fault"),
    [
        ([], "has no apps"),
        ([APP | {"secret": None}], "no secret"),
        ([APP | {"id": "a b"}], "app id 'a b' can't be kept"),
        ([APP | {"key": "a/b"}], "key of app shop-1 can't be kept"),
        ([APP | {"secret": 'a"b'}], "secret of app shop-1 can't be kept"),
        ([APP, APP], "two apps"),
        (["x"], "app 0 is not an object"),
        ([APP | {"maxEventBatchSize": "many"}], "not a number"),
    ],
)
def test_apps_that_can_not_be_kept_refuse_the_import(tmp_path, apps, fault):
    with pytest.raises(SourceError, match=fault):
        plan_of(tmp_path, {"appManager.array.apps": apps})


def test_passwords_of_what_is_not_taken_over_are_not_shown(tmp_path):
    source = {
        "appManager.array.apps": [APP | {"webhookSecret": "hunter2"}],
        "database": {"redis": {"host": "cache", "password": "hunter2"}, "mysql": {"password": "hunter2"}},
        "database.redis.sentinels": [{"host": "s", "password": "hunter2"}],
        "queue.redis.url": "redis://:hunter2@cache:6379",
    }
    environment = "".join(f"SOKETI_DEFAULT_APP_{name.upper()}={value}\n" for name, value in APP.items())
    environment += "SOKETI_DB_MYSQL_PASSWORD=hunter2\nSOKETI_DB_REDIS_SENTINEL_PASSWORD=hunter2\n"
    for content in (source, environment):
        rows = plan_of(tmp_path, content).rows
        assert not any("hunter2" in str(row) for row in rows)
        assert sum(row.value == "…" for row in rows) >= 2


@pytest.mark.parametrize(
    "webhooks",
    [
        "null",
        None,
        "{}",
        '"text"',
        "7",
        [None],
        [{"url": "https://x.example/", "event_types": None}],
        [{"url": "https://x.example/", "event_types": [["client_event"]]}],
    ],
)
def test_webhooks_of_another_shape_are_left_out(tmp_path, webhooks):
    assert plan_of(tmp_path, [APP | {"webhooks": webhooks}]).apps[0].webhooks == []


def test_filters_and_headers_of_another_shape_are_left_out(tmp_path):
    webhook = {"url": "https://x.example/", "event_types": ["client_event"], "filter": ["x"], "headers": 7}
    (app,) = plan_of(tmp_path, [APP | {"webhooks": [webhook]}]).apps
    assert app.webhooks == [{"url": "https://x.example/", "events": ["client_event"], "channels": []}]


def test_a_null_leaves_what_paths_say_below_it(tmp_path):
    pair = {"ssl.certPath": "/c.pem", "ssl.keyPath": "/k.pem"}
    for given in ({"ssl": None} | pair, pair | {"ssl": None}):
        assert plan_of(tmp_path, given | {"appManager.array.apps": [APP]}).server["tls_cert"] == "/c.pem"


def test_a_path_below_a_value_without_fields_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"has ssl\.certPath, but also a value for ssl that has no fields"):
        plan_of(tmp_path, {"ssl": True, "ssl.certPath": "/c.pem", "appManager.array.apps": [APP]})
