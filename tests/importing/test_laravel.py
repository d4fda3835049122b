"""Reverb's and laravel-websockets' configurations, as environment files and in PHP."""

import pytest

from redpoll.importing import documents, laravel
from redpoll.importing.plan import SourceError

REVERB_ENV = """
APP_NAME=Shop
BROADCAST_CONNECTION=reverb

REVERB_APP_ID=my-app
REVERB_APP_KEY=w1u8kq
REVERB_APP_SECRET=ahb2kq
REVERB_HOST="ws.shop.example"
REVERB_PORT=443
REVERB_SCHEME=https
REVERB_SERVER_HOST=127.0.0.1
REVERB_SERVER_PORT=8080

VITE_REVERB_APP_KEY="${REVERB_APP_KEY}"
VITE_REVERB_HOST="${REVERB_HOST}"
"""
REVERB_PHP = """<?php

return [
    'default' => env('REVERB_SERVER', 'reverb'),
    'servers' => ['reverb' => [
        'host' => env('REVERB_SERVER_HOST', '0.0.0.0'),
        'port' => env('REVERB_SERVER_PORT', 8080),
        'path' => '/live/',
        'max_request_size' => 250_000,
        'options' => ['tls' => ['local_cert' => '/c.pem', 'local_pk' => '/k.pem']],
        'scaling' => ['enabled' => true, 'server' => ['host' => 'cache', 'password' => env('REDIS_PASSWORD')]],
    ]],
    'apps' => ['provider' => 'config', 'apps' => [
        [
            'app_id' => env('REVERB_APP_ID'),
            'key' => env('REVERB_APP_KEY'),
            'secret' => env('REVERB_APP_SECRET'),
            'options' => ['useTLS' => env('REVERB_SCHEME', 'https') === 'https'],
            'allowed_origins' => ['shop.example', '*.shop.example', 'localhost:5173', 'app-*.example'],
            'ping_interval' => 60,
            'activity_timeout' => 30,
            'max_connections' => 500,
            'max_message_size' => 100_000,
            'accept_client_events_from' => 'none',
            'rate_limiting' => ['enabled' => true, 'max_attempts' => 10, 'decay_seconds' => 1],
        ],
        ['app_id' => 'b', 'key' => 'kb', 'secret' => 'sb', 'allowed_origins' => explode(',', env('ORIGINS', '*')),
         'max_connections' => $many],
    ]],
];
"""
WEBSOCKETS_PHP = """<?php

use BeyondCode\\LaravelWebSockets\\Dashboard\\Http\\Middleware\\Authorize;

return [
    'dashboard' => ['port' => env('LARAVEL_WEBSOCKETS_PORT', 6001), 'middleware' => ['web', Authorize::class]],
    'apps' => [[
        'id' => env('PUSHER_APP_ID'),
        'name' => env('APP_NAME'),
        'key' => env('PUSHER_APP_KEY'),
        'secret' => env('PUSHER_APP_SECRET'),
        'path' => env('PUSHER_APP_PATH'),
        'capacity' => null,
        'enable_client_messages' => true,
        'enable_statistics' => true,
        'allowed_origins' => [
            //
        ],
    ]],
    'max_request_size_in_kb' => 250,
];
"""


# What new apps get where theirs has no limit; laravel-websockets has neither batches nor cache channels.
UNLIMITED_MEMBERS = {"max_presence_members": "240", "max_user_info_bytes": "2048"}
UNLIMITED_REVERB = {**UNLIMITED_MEMBERS, "max_batch": "100", "cache_ttl_s": "604800"}


def written(tmp_path, text, env=None):
    path = tmp_path / "file"
    path.write_text(text)
    env_path = None
    if env is not None:
        env_path = tmp_path / "env"
        env_path.write_text(env)
    return documents.load(path, env_path)


def test_env_of_a_laravel_application_with_reverb(tmp_path):
    plan = laravel.read_reverb(written(tmp_path, REVERB_ENV))
    (app,) = plan.apps
    assert (app.id, app.key, app.secret) == ("my-app", "w1u8kq", "ahb2kq")
    assert app.settings == {"max_connections": "0", "client_events": "true"}
    assert app.defaults == UNLIMITED_REVERB
    assert plan.server == {
        "host": "127.0.0.1",
        "port": 8080,
        "public_url": "https://ws.shop.example:443",
        "trigger_rate_per_minute": 0,
    }


def test_reverb_configuration_in_php(tmp_path):
    plan = laravel.read_reverb(written(tmp_path, REVERB_PHP, REVERB_ENV + "REDIS_PASSWORD=p:w\n"))
    app, other = plan.apps
    assert (app.id, other.id) == ("my-app", "b")
    assert app.settings == {
        "max_connections": "500",
        "allowed_origins": "shop.example,*.shop.example,localhost:5173",
        "client_events": "false",
        "max_data_bytes": "250000",
    }
    assert other.settings == {"max_connections": "0", "client_events": "true", "max_data_bytes": "250000"}
    assert plan.server == {
        "host": "127.0.0.1",
        "tls_port": 8080,
        "tls_cert": "/c.pem",
        "tls_key": "/k.pem",
        "port": 0,
        "path_prefix": "/live",
        "max_message_bytes": 100_000,
        "activity_timeout_s": 30.0,
        "redis_url": "redis://:p%3Aw@cache:6379/0",
        "trigger_rate_per_minute": 0,
    }
    without = {row.theirs: row for row in plan.rows if not row.ours}
    assert set(without) == {
        "allowed_origins",
        "ping_interval",
        "rate_limiting",
        "max_connections",
        "rate of client events",
    }
    assert without["allowed_origins"].value == "app-*.example"
    assert without["max_connections"].value == "$many"


def test_laravel_websockets_in_php(tmp_path):
    env = "APP_NAME='My shop'\nPUSHER_APP_ID=app-1\nPUSHER_APP_KEY=k\nPUSHER_APP_SECRET=s\n"
    plan = laravel.read_laravel_websockets(written(tmp_path, WEBSOCKETS_PHP, env))
    (app,) = plan.apps
    assert (app.id, app.name) == ("app-1", "My shop")
    assert app.settings == {"max_connections": "0", "client_events": "true", "max_data_bytes": "256000"}
    assert app.defaults == UNLIMITED_MEMBERS
    assert plan.server == {"port": 6001, "trigger_rate_per_minute": 0}
    assert [row.theirs for row in plan.rows if not row.ours] == ["rate of client events", "enable_statistics"]


def test_laravel_websockets_as_environment_file(tmp_path):
    env = "PUSHER_APP_ID=1\nPUSHER_APP_KEY=k\nPUSHER_APP_SECRET=s\nLARAVEL_WEBSOCKETS_PORT=6005\n"
    plan = laravel.read_laravel_websockets(written(tmp_path, env))
    assert plan.apps[0].settings["client_events"] == "false"
    assert plan.server["port"] == 6005


def test_table_of_laravel_websockets_apps(tmp_path):
    rows = '[{"id":"a","key":"k","secret":"s","name":"n","capacity":5,"allowed_origins":"x.example,y.example"}]'
    (app,) = laravel.read_laravel_websockets(written(tmp_path, rows)).apps
    assert (app.settings["max_connections"], app.settings["allowed_origins"]) == ("5", "x.example,y.example")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("APP_NAME=x", "no id and no key and no secret"),
        ("<?php return ['apps' => ['apps' => loaded()]];", "loaded\\(\\)"),
        ("<?php return ['apps' => ['apps' => ['x']]];", "id, key and secret"),
        ("<?php return ['apps' => ['apps' => [['app_id' => env('A'), 'key' => 'k', 'secret' => 's']]]];", "no id"),
    ],
)
def test_reverb_files_without_an_app_are_refused(tmp_path, text, fault):
    with pytest.raises(SourceError, match=fault):
        laravel.read_reverb(written(tmp_path, text))


def test_a_file_whose_env_was_not_found_says_how_to_name_it(tmp_path):
    """Reverb's own config/reverb.php, copied without the application around it."""
    sought = "env() found no REVERB_APP_ID, REVERB_APP_KEY, REVERB_APP_SECRET: --env names the .env that has them"
    with pytest.raises(SourceError) as refused:
        laravel.read_reverb(written(tmp_path, REVERB_PHP))
    assert str(refused.value).endswith(f"app 0: no id and no key and no secret of the app found; {sought}")
    with pytest.raises(SourceError, match=r"no secret of the app found; env\(\) found no REVERB_APP_SECRET: --env"):
        laravel.read_reverb(written(tmp_path, REVERB_PHP, "REVERB_APP_ID=a\nREVERB_APP_KEY=k\n"))
    with pytest.raises(SourceError, match=r"no secret of the app found$"):
        laravel.read_reverb(written(tmp_path, "REVERB_APP_ID=a\nREVERB_APP_KEY=k\n"))


def test_words_of_an_environment_file_are_read_as_laravel_does(tmp_path):
    words = "REVERB_SCALING_ENABLED=(true)\nREDIS_HOST=cache\nREDIS_PASSWORD=null\nREDIS_USERNAME=(empty)\n"
    words += "REVERB_SERVER_PATH=(null)\nREVERB_APP_RATE_LIMITING_ENABLED=(false)\n"
    plan = laravel.read_reverb(written(tmp_path, REVERB_ENV + words))
    assert plan.server["redis_url"] == "redis://cache:6379/0"
    assert "path_prefix" not in plan.server
    assert not any(row.theirs == "rate_limiting" for row in plan.rows)
    env = "PUSHER_APP_ID=1\nPUSHER_APP_KEY=k\nPUSHER_APP_SECRET=s\nAPP_NAME=null\nPUSHER_APP_PATH=empty\n"
    (app,) = laravel.read_laravel_websockets(written(tmp_path, env)).apps
    assert app.name == "1"
    assert not any(row.theirs == "path" for row in app.rows)


COMPUTED_PHP = """<?php return [
    'default' => config('reverb'),
    'servers' => ['reverb' => [
        'host' => gethostname(), 'port' => 8000 + 80, 'path' => '/' . 'live', 'max_request_size' => 1024 * 64,
        'pulse_ingest_interval' => 5 * 3,
        'options' => ['tls' => ['local_cert' => storage_path('c.pem'), 'local_pk' => '/k.pem',
                                'verify_peer' => env('APP_ENV') === 'production']],
        'scaling' => ['enabled' => true, 'server' => ['host' => 'cache', 'password' => decrypt('hunter2')]],
    ]],
    'apps' => ['apps' => [
        ['app_id' => 'a', 'key' => 'ka', 'secret' => 'sa', 'options' => ['host' => 'h.example', 'port' => 400 + 43],
         'allowed_origins' => array_filter(explode(',', env('ORIGINS', '')))],
        ['app_id' => 'b', 'key' => 'kb', 'secret' => 'sb', 'allowed_origins' => ['b.example', $other]],
    ]],
];
"""


def test_what_only_php_can_compute_in_a_server_of_reverb_is_not_taken_over(tmp_path):
    plan = laravel.read_reverb(written(tmp_path, COMPUTED_PHP))
    assert plan.server == {"redis_url": "redis://cache:6379/0", "trigger_rate_per_minute": 0}
    assert [app.settings.get("allowed_origins") for app in plan.apps] == [None, "b.example"]
    without = [(row.app, row.theirs, row.value) for row in plan.rows if not row.ours]
    assert without == [
        ("", "default", "config('reverb')"),
        ("", "servers.reverb.host", "gethostname()"),
        ("", "servers.reverb.port", "8000 + 80"),
        ("", "servers.reverb.path", "'/' . 'live'"),
        ("", "servers.reverb.max_request_size", "1024 * 64"),
        ("", "servers.reverb.options.tls.local_cert", "storage_path('c.pem')"),
        ("", "servers.reverb.scaling.server.password", "…"),
        ("a", "allowed_origins", "array_filter(explode(',', env('ORIGINS', '')))"),
        ("a", "rate of client events", "none"),
        ("", "options.port", "400 + 43"),
        ("b", "allowed_origins", "$other"),
        ("b", "rate of client events", "none"),
        ("", "tls.local_pk", "/k.pem"),
    ]
    assert not any(row.theirs == "allowed_origins" and row.note == "all hosts" for row in plan.rows)


def test_what_only_php_can_compute_in_laravel_websockets_is_not_taken_over(tmp_path):
    php = """<?php return [
        'dashboard' => ['port' => 6000 + 1], 'max_request_size_in_kb' => 10 * 25, 'allowed_origins' => origins(),
        'ssl' => ['local_cert' => storage_path('c.pem'), 'passphrase' => decrypt('hunter2')],
        'replication' => ['mode' => mode()],
        'apps' => [['id' => 'a', 'key' => 'k', 'secret' => 's']],
    ];"""
    plan = laravel.read_laravel_websockets(written(tmp_path, php))
    assert plan.server == {"trigger_rate_per_minute": 0}
    assert {row.theirs: row.value for row in plan.rows if not row.ours} == {
        "dashboard.port": "6000 + 1",
        "max_request_size_in_kb": "10 * 25",
        "allowed_origins": "origins()",
        "ssl.local_cert": "storage_path('c.pem')",
        "ssl.passphrase": "…",
        "replication.mode": "mode()",
    }
    assert plan.apps[0].settings.keys() == {"max_connections", "client_events"}


@pytest.mark.parametrize(
    ("accepts", "on_public", "is_limited"),
    [("members", True, True), ("all", True, True), ("none", False, False)],
)
def test_limits_that_reverb_does_not_have_are_named(tmp_path, accepts, on_public, is_limited):
    env = f"{REVERB_ENV}REVERB_APP_ACCEPT_CLIENT_EVENTS_FROM={accepts}\n"
    rows = {row.theirs: row for row in laravel.read_reverb(written(tmp_path, env)).apps[0].rows}
    assert "max_unsent_bytes" in rows["members of a presence channel"].note
    assert ("not on public channels" in rows["accept_client_events_from"].note) == on_public
    assert ("rate of client events" in rows) == is_limited
    if is_limited:
        assert "redpoll allows 10 a second and connection" in rows["rate of client events"].note


@pytest.mark.parametrize("are_on", [True, False])
def test_limits_that_laravel_websockets_does_not_have_are_named(tmp_path, are_on):
    table = f'[{{"id":"a","key":"k","secret":"s","enable_client_messages":{int(are_on)}}}]'
    rows = {row.theirs: row for row in laravel.read_laravel_websockets(written(tmp_path, table)).apps[0].rows}
    assert "max_unsent_bytes" in rows["members of a presence channel"].note
    assert ("not on public channels" in rows["enable_client_messages"].note) == are_on
    assert ("rate of client events" in rows) == are_on
