"""The table of settings: name, type, bounds, unit, default and explanation of each, and the sample file of it.

Flags, environment, TOML file and documentation read it. Where values come from, and what is wrong with them:
config.py. Knows nothing of what the settings do.
"""

import base64
import textwrap
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = ["PREFIX", "TABLE", "Alias", "Setting", "Settings", "sample"]

PREFIX = "REDPOLL_"


@dataclass(frozen=True)
class Alias:
    """Another server's variable that sets one of ours. `per_unit`: how many of its units are one of ours."""

    variable: str
    per_unit: int = 1


def _about(
    text: str,
    unit: str = "",
    *,
    aliases: tuple[Alias, ...] = (),
    flag: bool = True,
    secret: bool = False,
    **bounds: Any,
) -> Meta:
    extra = {"unit": unit, "aliases": aliases, "flag": flag and not secret, "secret": secret}
    return Meta(description=text, extra=extra, **bounds)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting with its type, bounds, unit, default and explanation: the table itself.

    The names are those of the TOML file, of the flags (`--data-dir`) and of the environment
    (`REDPOLL_DATA_DIR`). Times are seconds, sizes bytes. Aliases are the names that soketi and Pusher's own
    libraries use. None is written as an empty string; a list is an array in the file, elsewhere it has commas.
    """

    host: Annotated[
        str,
        _about("Address of the public port, for WebSockets and the HTTP API. `::` listens on IPv4 as well."),
    ] = "0.0.0.0"
    port: Annotated[
        int,
        _about(
            "The public port. 0 takes any free one; the ready line names it.",
            aliases=(Alias("SOKETI_PORT"),),
            ge=0,
            le=65535,
        ),
    ] = 6001
    tls_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        _about(
            "The port that serves the same over TLS, beside the public one: `wss` and the HTTP API. Empty: none. "
            "0 takes any free one."
        ),
    ] = None
    tls_cert: Annotated[
        str,
        _about(
            "PEM file with the certificate of the TLS port, its intermediates behind it. Read again at SIGHUP.",
            aliases=(Alias("SOKETI_SSL_CERT"),),
        ),
    ] = ""
    tls_key: Annotated[
        str,
        _about(
            "PEM file with the private key of that certificate, without a passphrase. Read again at SIGHUP.",
            aliases=(Alias("SOKETI_SSL_KEY"),),
        ),
    ] = ""
    trusted_proxies: Annotated[
        tuple[str, ...],
        _about(
            "Addresses and networks (`10.0.0.0/8`) of the proxies in front. What they say of a client's address and "
            "scheme is believed: X-Forwarded-For, X-Forwarded-Proto and, with `proxy_protocol`, PROXY headers."
        ),
    ] = ()
    proxy_protocol: Annotated[
        bool,
        _about(
            "Expect a PROXY protocol header, version 1 or 2, at the start of each connection to the public and the "
            "TLS port: from `trusted_proxies`, or from everybody where that is empty."
        ),
    ] = False
    control_host: Annotated[
        str,
        _about("Address of the control port: metrics, health and the same HTTP API. Keep it private."),
    ] = "127.0.0.1"
    control_port: Annotated[
        int,
        _about(
            "The control port. 0 takes any free one.",
            aliases=(Alias("SOKETI_METRICS_SERVER_PORT"),),
            ge=0,
            le=65535,
        ),
    ] = 9601
    workers: Annotated[
        int, _about("Worker processes. 0 starts one for each CPU that this process may use.", ge=0, le=1024)
    ] = 0
    redis_url: Annotated[
        str,
        _about(
            "Redis or Valkey 7 or newer: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` or `unix:///PATH`. "
            "Empty: one of our own is started, with its data in the data folder.",
            aliases=(Alias("REDIS_URL"),),
        ),
    ] = ""
    redis_prefix: Annotated[
        str,
        _about(
            "What every key and topic in Redis begins with. Servers that share a Redis and a prefix are one cluster.",
            pattern=r"^[A-Za-z0-9_.-]{1,32}\Z",
        ),
    ] = "rp"
    redis_appendfsync: Annotated[
        Literal["no", "always"],
        _about(
            "When our own Redis asks the disk to keep what it wrote. `no`: what was acknowledged survives "
            "killed processes, a power loss may cost about the last 30 s. `always`: it survives that too, "
            "and each change waits for the disk. Means nothing when `redis_url` is given."
        ),
    ] = "no"
    data_dir: Annotated[
        str,
        _about(
            "Folder of the record store (apps and keys) and of our own Redis. Made with mode 0700.",
            min_length=1,
        ),
    ] = "./redpoll-data"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _about("The least grave lines to log.")] = "info"
    log_format: Annotated[
        Literal["text", "json"], _about("Log lines on stderr: `text` is for people, `json` for collectors.")
    ] = "text"
    activity_timeout_s: Annotated[
        float,
        _about(
            "A connection from which nothing came for so long is pinged. Told to clients, which ping by it as well.",
            "s",
            ge=1,
            le=3600,
        ),
    ] = 120.0
    pong_timeout_s: Annotated[
        float,
        _about(
            "A connection that stays silent for so long after our ping is closed with 4201.",
            "s",
            gt=0,
            le=600,
        ),
    ] = 30.0
    head_timeout_s: Annotated[
        float,
        _about("A connection that has not sent a whole request head by then is closed.", "s", gt=0, le=600),
    ] = 10.0
    max_message_bytes: Annotated[
        int,
        _about(
            "The longest message taken from a client; a longer one closes its connection with 1009.",
            "bytes",
            ge=1024,
            le=64 * 1024 * 1024,
        ),
    ] = 65_536
    max_owed_bytes: Annotated[
        int,
        _about(
            "What one connection may be owed while it does not read; beyond it, it is closed with 4100.",
            "bytes",
            ge=64 * 1024,
            le=1024 * 1024 * 1024,
        ),
    ] = 1_048_576
    max_channels_per_connection: Annotated[
        int, _about("Channels that one connection may be subscribed to.", ge=1, le=1_000_000)
    ] = 1_000
    trigger_rate_per_minute: Annotated[
        int,
        _about(
            "Requests to trigger events, single or batch, that one client address may make in a minute; more are "
            "answered with 429. 0: as many as it likes.",
            "1/min",
            ge=0,
        ),
    ] = 300
    client_events_per_second: Annotated[
        int, _about("Client events that one connection may trigger; more are refused with 4301.", "1/s", ge=1)
    ] = 10
    event_log_calls: Annotated[
        int,
        _about(
            "Trigger calls that the event log keeps, the newest ones; a row takes about 200 bytes. 0: no event log.",
            ge=0,
            le=100_000_000,
        ),
    ] = 500_000
    event_log_keep_s: Annotated[
        float, _about("How long the event log keeps a trigger call.", "s", ge=60, le=31_536_000)
    ] = 604_800.0
    trace_calls_per_second: Annotated[
        int,
        _about(
            "Trigger calls of which the event trace tells every stage. Those beyond it have a row in the event log, "
            "and no stages.",
            "1/s",
            ge=0,
        ),
    ] = 100
    webhook_retry_after_s: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=86_400)], ...],
        _about(
            "How long after each failed attempt of a webhook delivery the next one is made; after the last of them it "
            "is in the dead letter queue.",
            "s",
            max_length=20,
        ),
    ] = (10.0, 60.0, 300.0)
    webhook_debounce_s: Annotated[
        float,
        _about(
            "How long `channel.vacated` and `member.removed` wait for the subscriber's return, after which neither its "
            "leaving nor its return is told to webhooks.",
            "s",
            ge=0,
            le=300,
        ),
    ] = 3.0
    webhook_allow_http: Annotated[
        bool, _about("Take webhook endpoints at `http://` too. For tests and intranets: what is sent can be read.")
    ] = False
    webhook_allow_addresses: Annotated[
        tuple[str, ...],
        _about(
            "Addresses and networks (`10.1.0.0/16`) that webhooks may be sent to although they are not public. Without "
            "it whoever may make an endpoint could reach what only this machine can."
        ),
    ] = ()
    webhook_ca_file: Annotated[
        str,
        _about(
            "PEM file with certificates of authorities that vouch for webhook endpoints, beside those that the system "
            "trusts."
        ),
    ] = ""
    public_url: Annotated[
        str,
        _about(
            "How clients reach the public port from where they are, such as `https://ws.example.com`: the dashboard's "
            "set-up examples and its console say so. Empty: the host that the dashboard was called by, and the port."
        ),
    ] = ""
    admin_password: Annotated[
        str,
        _about(
            "The password of the dashboard's user `admin` at the first start, where one is made up and printed "
            "otherwise. Ignored once there is a user. Has no flag.",
            secret=True,
            max_length=200,
        ),
    ] = ""
    shutdown_grace_s: Annotated[
        float,
        _about(
            "How long the workers may take to close their connections at a stop before they are killed.",
            "s",
            aliases=(Alias("SOKETI_SHUTDOWN_GRACE_PERIOD", per_unit=1000),),
            ge=0,
            le=3600,
        ),
    ] = 10.0
    app_id: Annotated[
        str,
        _about(
            "An app that is created, or brought up to date, at every start: its id, decimal digits. Give all "
            "three of `app_id`, `app_key`, `app_secret` or none; with none, the first start makes an app and "
            "prints it.",
            aliases=(Alias("SOKETI_DEFAULT_APP_ID"), Alias("PUSHER_APP_ID")),
            flag=False,
        ),
    ] = ""
    app_key: Annotated[
        str,
        _about(
            "The key of that app: letters, digits, `-` and `_`.",
            aliases=(Alias("SOKETI_DEFAULT_APP_KEY"), Alias("PUSHER_APP_KEY")),
            flag=False,
        ),
    ] = ""
    app_secret: Annotated[
        str,
        _about(
            "The secret of that app, of the same characters. Has no flag: a command line is there for all to read.",
            aliases=(Alias("SOKETI_DEFAULT_APP_SECRET"), Alias("PUSHER_APP_SECRET")),
            secret=True,
        ),
    ] = ""
    encryption_master_key: Annotated[
        str,
        _about(
            "32 bytes in base64 (`openssl rand -base64 32`), from which `/auth` derives the shared secret of each "
            "encrypted channel. Give the back end the same. Empty: `/auth` gives none. Has no flag.",
            secret=True,
        ),
    ] = ""

    def master_key(self) -> bytes | None:
        """The 32 bytes of `encryption_master_key`, None without one. Raises ValueError where it is no such."""
        if not self.encryption_master_key:
            return None
        key = base64.b64decode(self.encryption_master_key, validate=True)
        if len(key) != 32:
            raise ValueError(f"it has {len(key)} bytes")
        return key


@dataclass(frozen=True)
class Setting:
    """One row of the table, as flags, sample file and documentation want it."""

    name: str
    type: Any
    unit: str
    default: Any
    help: str
    aliases: tuple[Alias, ...]
    has_flag: bool
    is_secret: bool

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)

    @property
    def may_be_none(self) -> bool:
        return self.default is None

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _rows() -> tuple[Setting, ...]:
    hints = typing.get_type_hints(Settings, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(Settings):
        kind, meta = typing.get_args(hints[field.name])
        # Faults are explained by the type of what may be written, and null can't be.
        kinds = [each for each in typing.get_args(kind) if each is not type(None)]
        extra = meta.extra
        rows.append(
            Setting(
                field.name,
                kinds[0] if field.default is None else hints[field.name],
                extra["unit"],
                field.default,
                meta.description,
                extra["aliases"],
                extra["flag"],
                extra["secret"],
            )
        )
    return tuple(rows)


TABLE = _rows()


def sample() -> str:
    """The text of deploy/redpoll.toml: every setting with its explanation and default, commented out."""
    lines = [
        "# redpoll: every setting with its default.",
        "# A flag (--port) wins over the environment (REDPOLL_PORT), that over this file.",
        "# `redpoll check-config --config FILE` explains every fault of a file at once.",
    ]
    for setting in TABLE:
        unit = f" [{setting.unit}]" if setting.unit else ""
        text = f"{setting.help}{unit}"
        lines += ["", *textwrap.wrap(text, 108, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"#{setting.name} = {_toml(setting.default)}")
    return "\n".join(lines) + "\n"


def _toml(value: str | int | float | tuple[str, ...] | None) -> str:
    if value is None:
        value = ""  # TOML has no null
    # JSON's strings, arrays and switches are TOML's as well.
    return msgspec.json.encode(value).decode()
