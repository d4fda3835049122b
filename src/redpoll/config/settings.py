"""Every setting: its name, type, bounds, unit, default and explanation.

setting_table.py derives the CLI flags, the environment variables and deploy/redpoll.toml from this. config.py reads the
values and checks them.
"""

import base64
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from redpoll.config.app_names import APP_ID_RULE, APP_KEY_RULE, APP_SECRET_RULE
from redpoll.config.redis_url import with_tls_files

__all__ = ["Alias", "Settings"]


@dataclass(frozen=True)
class Alias:
    """An environment variable of another server that sets one of our settings. `per_unit` of its units are one of
    ours."""

    variable: str
    per_unit: int = 1


def _about(
    text: str,
    unit: str = "",
    *,
    aliases: tuple[Alias, ...] = (),
    flag: bool = True,
    secret: bool = False,
    live: bool = False,
    was: str = "",
    one: bool = False,
    **bounds: Any,
) -> Meta:
    """`live`: a reload applies it. `was`: an earlier name, which is refused with a sentence that names this one. `one`:
    a list of one element may be written as a string in the file."""
    extra = {"unit": unit, "aliases": aliases, "flag": flag and not secret, "secret": secret, "live": live, "was": was}
    return Meta(description=text, extra=extra | {"one": one}, **bounds)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, with its type, bounds, unit, default and explanation.

    A field's name is the name in the TOML file; the flag (`--data-dir`) and the environment variable
    (`REDPOLL_DATA_DIR`) are derived from it. Times are in seconds, sizes in bytes. Aliases are variables of
    soketi, Reverb and Pusher's libraries. None is written as an empty string. A list is an array in the file and
    comma-separated elsewhere.
    """

    host: Annotated[
        str,
        _about(
            "Listen address of the public port (WebSocket and HTTP API). `::` listens on IPv6 and IPv4.",
            aliases=(Alias("SOKETI_HOST"), Alias("REVERB_SERVER_HOST")),
        ),
    ] = "0.0.0.0"
    port: Annotated[
        int,
        _about(
            "The public port. 0 picks a free port, which the ready line prints.",
            aliases=(Alias("SOKETI_PORT"), Alias("REVERB_SERVER_PORT")),
            ge=0,
            le=65535,
        ),
    ] = 6001
    path_prefix: Annotated[
        str,
        _about(
            "Path before `/apps` in the HTTP API, such as `/ws`, for back ends that were configured with one. Paths "
            "without it stay valid. Clients may put any path before `/app`.",
            aliases=(Alias("SOKETI_PATH_PREFIX"), Alias("REVERB_SERVER_PATH")),
            live=True,
        ),
    ] = ""
    tls_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        _about(
            "A second public port, with TLS: `wss://` and the HTTP API over https. Empty: no TLS port. "
            "0 picks a free port."
        ),
    ] = None
    tls_cert: Annotated[
        tuple[str, ...],
        _about(
            "PEM files with the certificates of the TLS port, each followed by its intermediates, and folders with "
            "certificates and keys: `NAME.crt` or `NAME.pem` with `NAME.key`, and `fullchain.pem` with `privkey.pem` "
            "there or in subfolders. The client's SNI name chooses; the first one is for all other names. Of RSA and "
            "ECDSA for one name, the client's abilities choose.",
            aliases=(Alias("SOKETI_SSL_CERT"),),
            live=True,
            one=True,
        ),
    ] = ()
    tls_key: Annotated[
        tuple[str, ...],
        _about(
            "PEM files with the private keys of the files in `tls_cert`, in the same order, without a passphrase. A "
            "folder in `tls_cert` needs none here.",
            aliases=(Alias("SOKETI_SSL_KEY"),),
            live=True,
            one=True,
        ),
    ] = ()
    tls_ocsp: Annotated[
        tuple[str, ...],
        _about(
            "Files with OCSP responses (DER) for these certificates, and folders with `*.ocsp`. Those beside a "
            "certificate, `NAME.ocsp`, are found without it. Served to clients that ask for one, until it expires.",
            live=True,
            one=True,
        ),
    ] = ()
    tls_client_ca: Annotated[
        str,
        _about(
            "PEM file with authorities. If it is set, the control port has TLS with the certificates of `tls_cert`, "
            "and refuses clients that show no certificate of these authorities. Empty: no TLS on the control port."
        ),
    ] = ""
    trusted_proxies: Annotated[
        tuple[str, ...],
        _about(
            "Addresses and networks (`10.0.0.0/8`) of trusted reverse proxies. The client's address and scheme are "
            "taken from their X-Forwarded-For and X-Forwarded-Proto headers and, with `proxy_protocol`, PROXY headers."
        ),
    ] = ()
    proxy_protocol: Annotated[
        bool,
        _about(
            "Expect a PROXY protocol header (version 1 or 2) at the start of each connection to the public port and "
            "the TLS port: from `trusted_proxies`, or from every address if that is empty."
        ),
    ] = False
    control_host: Annotated[
        str,
        _about("Listen address of the control port: dashboard, metrics, health and the HTTP API. Keep it private."),
    ] = "127.0.0.1"
    control_port: Annotated[
        int,
        _about(
            "The control port. 0 picks a free port.",
            aliases=(Alias("SOKETI_METRICS_SERVER_PORT"),),
            ge=0,
            le=65535,
        ),
    ] = 9601
    control_names: Annotated[
        tuple[str, ...],
        _about(
            "Host names at which browsers and scrapers reach the control port, such as `redpoll.example.com` or "
            "`*.internal`. The dashboard and /metrics refuse other names, so that no website can read them by DNS "
            "rebinding. IP addresses, `localhost`, this machine's name, and the hosts in `control_host` and "
            "`public_url` are always allowed.",
            live=True,
        ),
    ] = ()
    manage_on_public_port: Annotated[
        bool,
        _about(
            "Serve the management of apps (`/api/v1/apps`, with a token of the scope `manage`) on the public port too. "
            "Off: only on the control port.",
            live=True,
        ),
    ] = False
    workers: Annotated[int, _about("Number of worker processes. 0: one per available CPU.", ge=0, le=1024)] = 0
    expected_connections: Annotated[
        int,
        _about(
            "The number of connections that this machine is meant to carry. At its start redpoll checks descriptors, "
            "the backlog, ports, TCP memory, the kernel's table of connections, memory and CPUs against it, and logs "
            "what won't suffice and what to write where. It limits nothing. 0: no check.",
            ge=0,
            le=100_000_000,
        ),
    ] = 0
    redis_url: Annotated[
        str,
        _about(
            "Redis or Valkey 7 or newer: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]`, `rediss://…` with TLS, "
            "`unix:///PATH`, `redis+sentinel://HOST[:PORT],HOST…/SERVICE` or `redis+cluster://HOST[:PORT],HOST…`, both "
            "with user, password and TLS as before. "
            "Empty: redpoll starts its own Redis, with its data in the data folder.",
            aliases=(Alias("REDIS_URL"),),
        ),
    ] = ""
    redis_ca_file: Annotated[
        str,
        _about(
            "PEM file with the authorities that may have issued the certificate of Redis, for `rediss://`. Empty: "
            "those of the system."
        ),
    ] = ""
    redis_cert_file: Annotated[
        str,
        _about(
            "PEM file with the certificate that redpoll shows to Redis, if Redis asks for one (`tls-auth-clients`)."
        ),
    ] = ""
    redis_key_file: Annotated[
        str, _about("PEM file with the private key of that certificate, without a passphrase.")
    ] = ""
    database_url: Annotated[
        str,
        _about(
            "PostgreSQL database of the records: `postgresql://USER:PASSWORD@HOST[:PORT]/DATABASE`, with libpq's "
            "parameters (`?sslmode=verify-full&sslrootcert=FILE`). Needs `pip install redpoll[postgres]`. Empty: the "
            "records are in a file in the data folder. Has no flag.",
            secret=True,
        ),
    ] = ""
    redis_prefix: Annotated[
        str,
        _about(
            "Prefix of every key and topic in Redis. Servers with the same Redis and the same prefix form one cluster.",
            pattern=r"^[A-Za-z0-9_.-]{1,32}\Z",
        ),
    ] = "rp"
    redis_appendfsync: Annotated[
        Literal["no", "always"],
        _about(
            "When the embedded Redis flushes to disk. `no`: acknowledged changes survive killed processes, and a power "
            "loss may lose about the last 30 s. `always`: they survive a power loss too, and each change waits for the "
            "disk. Ignored when `redis_url` is set."
        ),
    ] = "no"
    redis_maxmemory: Annotated[
        int,
        _about(
            "Memory of the embedded Redis, from which on it refuses to store more: publishes that store something get "
            "503, while leaves and joins still work. 0: half of the machine's memory, or of the limit of its container "
            "or systemd unit. Ignored when `redis_url` is set.",
            "MiB",
            ge=0,
        ),
    ] = 0
    node_name: Annotated[
        str,
        _about(
            "Name of this server in `redpoll node list`. It must differ between the servers of a cluster. Empty: the "
            "name of the host.",
            pattern=r"^[A-Za-z0-9_.-]{0,64}\Z",
        ),
    ] = ""
    data_dir: Annotated[
        str,
        _about(
            "Folder of the records (apps, keys, webhooks; unless `database_url` is set), of the event log and of the "
            "embedded Redis. Created with mode 0700.",
            min_length=1,
        ),
    ] = "./redpoll-data"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _about("Minimum log level.", live=True)] = "info"
    log_format: Annotated[
        Literal["text", "json"], _about("Format of log lines on stderr: `text` for people, `json` for log collectors.")
    ] = "text"
    http_fallback: Annotated[
        bool,
        _about(
            "Serve pusher-js' HTTP transports `xhr_streaming` and `xhr_polling`, which it uses where WebSockets are "
            "blocked. Its sessions count as connections everywhere.",
            live=True,
        ),
    ] = True
    activity_timeout_s: Annotated[
        float,
        _about(
            "The server pings a connection that has been silent for this long. Clients get this value too and ping by "
            "it.",
            "s",
            ge=1,
            le=3600,
        ),
    ] = 120.0
    pong_timeout_s: Annotated[
        float,
        _about(
            "A connection that stays silent for this long after the server's ping is closed with 4201.",
            "s",
            gt=0,
            le=600,
        ),
    ] = 30.0
    head_timeout_s: Annotated[
        float,
        _about("A connection that has not sent a complete request head after this time is closed.", "s", gt=0, le=600),
    ] = 10.0
    max_message_bytes: Annotated[
        int,
        _about(
            "Maximum size of a message from a client. A larger one closes the connection with 1009.",
            "bytes",
            ge=1024,
            le=64 * 1024 * 1024,
            live=True,
        ),
    ] = 65_536
    max_unsent_bytes: Annotated[
        int,
        _about(
            "Maximum of data queued for one connection that does not read. Beyond it the connection is closed with "
            "4100.",
            "bytes",
            was="max_owed_bytes",
            ge=64 * 1024,
            le=1024 * 1024 * 1024,
        ),
    ] = 1_048_576
    max_channels_per_connection: Annotated[
        int, _about("Maximum number of channels that one connection may subscribe to.", ge=1, le=1_000_000, live=True)
    ] = 1_000
    max_connections_per_address: Annotated[
        int,
        _about(
            "Maximum number of WebSockets that one client address (IPv6: one /64) may have open with each worker. More "
            "are closed with 4100. Counts addresses that redpoll knows: public addresses that connect directly, and "
            "what `trusted_proxies` name. While `trusted_proxies` is empty, a public address may have ten times as "
            "many with an X-Forwarded-For or Forwarded header, because it may be a proxy's. Once it is set, every "
            "other address counts as a client's own; without a proxy, set it to `127.0.0.1`. 0: no limit.",
            ge=0,
            live=True,
        ),
    ] = 2_000
    max_pending_per_address: Annotated[
        int,
        _about(
            "What one client address (IPv6: one /64) may have under way at once with each worker without a right "
            "credential: handshakes, incomplete requests, requests that wait for their answer, answers that it doesn't "
            "read. More get 503 or are closed. While `trusted_proxies` is empty, private addresses may have ten times "
            "as many, because a proxy may be there; trusted proxies have no limit, and the clients that they name "
            "count. 0: no limit.",
            ge=0,
            live=True,
        ),
    ] = 256
    trigger_rate_per_minute: Annotated[
        int,
        _about(
            "Maximum number of publish requests (single or batch) per client address (IPv6: /64) and minute. More are "
            "refused with 429. 0: no limit.",
            "1/min",
            ge=0,
        ),
    ] = 300
    auth_failures_per_minute: Annotated[
        int,
        _about(
            "Maximum number of HTTP requests with wrong credentials per client address (IPv6: /64) and minute that are "
            "answered with 401. More get 429; right credentials are accepted all the same. 0: no limit.",
            "1/min",
            ge=0,
            live=True,
        ),
    ] = 300
    client_events_per_second: Annotated[
        int, _about("Maximum rate of client events per connection. More are refused with 4301.", "1/s", ge=1, live=True)
    ] = 10
    subscribes_per_second: Annotated[
        int,
        _about(
            "Maximum rate at which one connection may replace subscriptions: each unsubscribe, and each subscribe that "
            "is repeated or refused by Redis, uses one up. As many as `max_channels_per_connection` may come at once. "
            "Further subscribes are refused with LimitReached, and a client that continues is closed with 4100. "
            "0: no limit.",
            "1/s",
            ge=0,
            live=True,
        ),
    ] = 50
    subscribes_per_second_per_address: Annotated[
        int,
        _about(
            "Maximum rate of subscribes of one client address (IPv6: one /64) with each worker, over all its "
            "connections. Those of a minute may come at once. Further ones are refused with LimitReached. Counts the "
            "addresses that `max_connections_per_address` counts. 0: no limit.",
            "1/s",
            ge=0,
            live=True,
        ),
    ] = 1_000
    event_log_calls: Annotated[
        int,
        _about(
            "Maximum number of publish requests that the event log stores. Beyond it, the app with the most requests "
            "loses its oldest. A request takes about 200 bytes, with its stages 1 kB, and with many channels more. The "
            "file has at most 1 kB for each request of this number, or 16 MB if that is more; beyond that, the app "
            "that takes the most of it loses its oldest. 0: no event log.",
            ge=0,
            le=100_000_000,
        ),
    ] = 500_000
    event_log_keep_s: Annotated[
        float, _about("How long the event log stores a publish request.", "s", ge=60, le=31_536_000)
    ] = 604_800.0
    trace_calls_per_second: Annotated[
        int,
        _about(
            "Number of publish requests per second whose stages are recorded for the event trace, and for each worker "
            "of client events that webhooks want. Further ones have a row in the event log but no stages.",
            "1/s",
            ge=0,
        ),
    ] = 100
    otel_endpoint: Annotated[
        str,
        _about(
            "URL of an OpenTelemetry collector that takes OTLP over HTTP, such as `http://localhost:4318`. The stages "
            "of traced publishes are sent to it as spans, and webhook deliveries get a `traceparent` header. Needs "
            "`pip install redpoll[otel]`. Empty: off.",
            aliases=(Alias("OTEL_EXPORTER_OTLP_ENDPOINT"),),
        ),
    ] = ""
    oidc_issuer: Annotated[
        str,
        _about(
            "Issuer of an OpenID Connect provider, such as `https://login.example.com/realms/main`: users of the "
            "dashboard may log in there. Register `/dashboard/sso/callback` of each address of the dashboard with it. "
            "Local users can log in too. Needs `pip install redpoll[oidc]` and `oidc_client_id`. Empty: off.",
        ),
    ] = ""
    oidc_client_id: Annotated[str, _about("The id that the provider of `oidc_issuer` has given to redpoll.")] = ""
    oidc_client_secret: Annotated[
        str,
        _about(
            "The secret that belongs to `oidc_client_id`. Empty: redpoll is a public client. Has no flag.", secret=True
        ),
    ] = ""
    oidc_scope: Annotated[
        str, _about("What is asked for at the provider; some providers send roles only for a scope of their own.")
    ] = "openid profile email"
    oidc_role_claim: Annotated[
        str,
        _about(
            "Claim of the ID token with the user's roles, a string or a list. Dots lead into objects: "
            "`realm_access.roles`."
        ),
    ] = "roles"
    oidc_admin_role: Annotated[str, _about("Role of the provider that makes a user an admin.")] = "redpoll_admin"
    oidc_viewer_role: Annotated[str, _about("Role of the provider that makes a user a viewer.")] = "redpoll_viewer"
    oidc_apps_claim: Annotated[
        str,
        _about(
            "Claim of the ID token with the ids of the apps that a viewer may see, a list or a string with commas. A "
            "viewer without this claim sees all apps, an admin always does."
        ),
    ] = "redpoll_apps"
    webhook_retry_after_s: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=86_400)], ...],
        _about(
            "Delays between the attempts of a webhook delivery: the first is the delay after the first failed "
            "attempt. A delivery that fails after the last delay becomes a dead letter.",
            "s",
            max_length=20,
        ),
    ] = (10.0, 60.0, 300.0)
    webhook_acknowledge_within_s: Annotated[
        float,
        _about(
            "Time in which a back end acknowledges a webhook delivery that it has pulled. Without that, the delivery "
            "is handed out again, after this time or the delay of webhook_retry_after_s, whichever is longer.",
            "s",
            ge=1,
            le=3_600,
        ),
    ] = 60.0
    webhook_max_dead_letters: Annotated[
        int,
        _about(
            "Maximum number of dead letters of an endpoint. Beyond it the oldest are deleted, because clients "
            "can cause events without end by subscribing and leaving. A dead letter takes about 1 to 5 kB.",
            ge=100,
            le=10_000_000,
        ),
    ] = 10_000
    webhook_max_waiting: Annotated[
        int,
        _about(
            "Maximum number of deliveries that wait for an endpoint, with bodies of 1 KiB on average. Beyond it new "
            "ones are dropped and counted; those of public channels beyond half of it, because anybody can cause "
            "these. A waiting delivery takes about 1 kB of the record store, and its body.",
            ge=1_000,
            le=10_000_000,
        ),
    ] = 100_000
    webhook_debounce_s: Annotated[
        float,
        _about(
            "How long `channel.vacated` and `member.removed` wait for the subscriber to return. If it does, webhooks "
            "get neither its leaving nor its return.",
            "s",
            ge=0,
            le=300,
        ),
    ] = 3.0
    webhook_allow_http: Annotated[
        bool, _about("Allow webhook endpoints at `http://`. For tests and intranets: the payload is not encrypted.")
    ] = False
    webhook_allow_addresses: Annotated[
        tuple[str, ...],
        _about(
            "Private addresses and networks (`10.1.0.0/16`), and this machine's own addresses, that webhooks may be "
            "sent to. Others are refused, so that people who create endpoints can't reach services on this machine or "
            "in its network."
        ),
    ] = ()
    webhook_ca_file: Annotated[
        str,
        _about(
            "PEM file with additional certificate authorities for webhook endpoints, besides those that the system "
            "trusts."
        ),
    ] = ""
    public_url: Annotated[
        str,
        _about(
            "URL at which clients reach the public port, such as `https://ws.example.com`. The dashboard uses it in "
            "its setup examples and its console. Clients with this origin pass each app's `allowed_origins`: some "
            "libraries send the address that they connect to. Empty: the host of the dashboard's own URL, and the "
            "public port."
        ),
    ] = ""
    admin_password: Annotated[
        str,
        _about(
            "Password of the dashboard user `admin`, set at the first start. Empty: a random one, which "
            "`redpoll first-login` shows. Ignored once a user exists. Has no flag.",
            secret=True,
            max_length=200,
        ),
    ] = ""
    shutdown_grace_s: Annotated[
        float,
        _about(
            "How long workers may take to close their connections when the server stops, before they are killed.",
            "s",
            aliases=(Alias("SOKETI_SHUTDOWN_GRACE_PERIOD", per_unit=1000),),
            ge=0,
            le=3600,
            live=True,
        ),
    ] = 10.0
    app_id: Annotated[
        str,
        _about(
            f"Id of an app that is created or updated at every start: {APP_ID_RULE}. Set all three of `app_id`, "
            "`app_key` and `app_secret`, or none; with none, the first start creates an app, "
            "which `redpoll first-login` shows.",
            aliases=(Alias("SOKETI_DEFAULT_APP_ID"), Alias("REVERB_APP_ID"), Alias("PUSHER_APP_ID")),
            flag=False,
        ),
    ] = ""
    app_key: Annotated[
        str,
        _about(
            f"Key of that app: {APP_KEY_RULE}.",
            aliases=(Alias("SOKETI_DEFAULT_APP_KEY"), Alias("REVERB_APP_KEY"), Alias("PUSHER_APP_KEY")),
            flag=False,
        ),
    ] = ""
    app_secret: Annotated[
        str,
        _about(
            f"Secret of that app: {APP_SECRET_RULE}. Has no flag, because other users can read command lines.",
            aliases=(Alias("SOKETI_DEFAULT_APP_SECRET"), Alias("REVERB_APP_SECRET"), Alias("PUSHER_APP_SECRET")),
            secret=True,
        ),
    ] = ""
    encryption_master_key: Annotated[
        str,
        _about(
            "32 bytes in base64 (`openssl rand -base64 32`) from which `/auth` derives the shared secret of each "
            "encrypted channel. Use the same key in your back end. It is one key for all apps: leave it empty if your "
            "apps have different owners. Empty: `/auth` returns no shared secret. Has no flag.",
            secret=True,
        ),
    ] = ""

    def full_redis_url(self) -> str:
        """`redis_url` with the names of the TLS files (redis_url.py). Empty if `redis_url` is."""
        if not self.redis_url:
            return ""
        return with_tls_files(self.redis_url, self.redis_ca_file, self.redis_cert_file, self.redis_key_file)

    def changed_by(self, changes: dict[str, Any]) -> "Settings":
        """These settings with `changes`, values by name as JSON has them."""
        return msgspec.convert({**msgspec.to_builtins(self), **changes}, Settings)

    def master_key(self) -> bytes | None:
        """The 32 bytes of `encryption_master_key`, or None if it is empty. Raises ValueError if it is malformed."""
        if not self.encryption_master_key:
            return None
        key = base64.b64decode(self.encryption_master_key, validate=True)
        if len(key) != 32:
            raise ValueError(f"it has {len(key)} bytes")
        return key
