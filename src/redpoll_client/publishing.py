"""What both publishers share: their settings, the requests that they make, and what needs no server."""

from __future__ import annotations

import copy
import hmac
import json
import secrets
import ssl as ssl_module
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from redpoll_client import names
from redpoll_client.calls import Answer, Attempts, Call
from redpoll_client.encryption import channel_key, encrypt, master_key
from redpoll_client.errors import Unavailable
from redpoll_client.grants import mint_grant
from redpoll_client.settings import Endpoint, endpoint_of
from redpoll_client.signatures import hex_hmac, sign_channel, sign_user, to_json
from redpoll_client.streams import Text

__all__ = ["History", "Message", "PublisherBase"]

# Seconds that a read of a stream may take beyond `timeout`: the server answers after 15 s without a message.
_LONG_POLL_S = 20.0
# `validate_webhook` refuses older ones, as `pusher` does.
_WEBHOOK_MAX_AGE_MS = 300_000


@dataclass(frozen=True)
class Message:
    """One message of a channel's history. `offset` rises within an epoch, with gaps; `time_ms` is Unix milliseconds."""

    offset: int
    event: str
    data: str
    time_ms: int


@dataclass(frozen=True)
class History:
    """A page of a channel's history. `next` is the `cursor` of the following page, of older messages unless `since` was
    given, and None after the last one. Offsets of another `epoch` mean nothing: the history was lost or cleared between
    them."""

    epoch: str
    messages: tuple[Message, ...]
    next: str | None


class PublisherBase:
    """The part of `Publisher` and `AsyncPublisher` that does no I/O."""

    def __init__(
        self,
        app_id: str | None = None,
        key: str | None = None,
        secret: str | None = None,
        ssl: bool = True,
        host: str | None = None,
        port: int | None = None,
        timeout: float = 5,
        cluster: str | None = None,
        *,
        url: str | None = None,
        prefix: str = "",
        encryption_master_key_base64: str | None = None,
        json_encoder: type[json.JSONEncoder] | None = None,
        json_decoder: type[json.JSONDecoder] | None = None,
        idempotency: bool = False,
        attempts: int = 4,
        connections: int = 16,
        total_timeout: float | None = None,
        max_data_bytes: int = names.MAX_DATA_BYTES,
        ssl_context: ssl_module.SSLContext | None = None,
    ) -> None:
        """The first eight arguments are those of `pusher.Pusher`, in its order. Without app_id, key, secret and url,
        the URL is read from REDPOLL_URL or PUSHER_URL. Raises ValueError for an argument that is missing or wrong.

        - `url`: `http[s]://KEY:SECRET@HOST[:PORT][/PREFIX]/apps/APP_ID`.
        - `prefix`: a path before `/apps`, such as `/realtime`, which a proxy in front of the server keeps.
        - `timeout`: seconds for each of: a free connection, opening it, sending, the next bytes of the answer.
        - `total_timeout`: seconds for a whole call with all its attempts and waits, also if the answer comes byte by
          byte; by default three times `timeout`. Each part of a long batch is a call. Not within it are the system's
          resolver, and `timeout` for each further address that a host's name has.
        - `idempotency`: the app compares correlation ids (`redpoll app set ID idempotency=true`). Only then is a
          publish repeated that may have been delivered already.
        - `attempts`: how often a request is tried at most, with random waits of up to 0.1, 0.2, 0.4, … 2 s between.
        - `connections`: the size of the pool. A request that finds all of them busy waits up to `timeout`.
        - `max_data_bytes`: the server's limit of an event's data. Raise it together with the server's.
        - `encryption_master_key_base64`: 32 bytes in base64, for encrypted channels.
        - `ssl_context`: for a private CA or a client certificate. By default the system's CAs are trusted.
        """
        total = 3 * timeout if total_timeout is None else total_timeout
        if not (timeout > 0 and total > 0) or attempts < 1 or connections < 1 or max_data_bytes < 1:
            raise ValueError("timeout, total_timeout, attempts, connections and max_data_bytes must be positive")
        self.endpoint: Endpoint = endpoint_of(app_id, key, secret, ssl, host, port, cluster, url=url, prefix=prefix)
        self.timeout = timeout
        self.total_timeout = total
        # For the next bytes of an answer.
        self._answer_s = timeout
        self.idempotency = idempotency
        self.max_data_bytes = max_data_bytes
        self._attempts = attempts
        self._connections = connections
        self._ssl_context = ssl_context
        self._json_encoder = json_encoder
        self._json_decoder = json_decoder
        self._master_key = None if encryption_master_key_base64 is None else master_key(encryption_master_key_base64)
        self._closed = False
        # Those of `publish_stream` that are under way.
        self._texts: set[Text] = set()
        self._base = f"/apps/{self.endpoint.app_id}"
        self._prepare()

    def _prepare(self) -> None:
        """Makes what the transport needs. It opens no connection."""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """A publisher for the app of this URL. The options are the arguments of the class."""
        return cls(url=url, **options)

    @classmethod
    def from_env(cls, env: str = "PUSHER_URL", **options: Any) -> Self:
        """A publisher for the app of the URL in this environment variable. Raises ValueError if it isn't set."""
        import os

        url = os.environ.get(env)
        if not url:
            raise ValueError(f"the environment variable {env} isn't set")
        return cls(url=url, **options)

    # -- without the server

    def authenticate(
        self, channel: str, socket_id: str, custom_data: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """What an auth endpoint answers when this socket may join this channel; `custom_data` is the member on presence
        channels. An empty one is ignored, as in `pusher`. See `sign_channel`, which has the argument's order of the
        protocol."""
        return sign_channel(
            self.endpoint.key,
            self.endpoint.secret,
            socket_id,
            channel,
            custom_data or None,
            master_key=self._master_key,
            json_encoder=self._json_encoder,
        )

    def grant(
        self, channels: Sequence[str], user_id: str | None, user_info: Any, lasts_s: int
    ) -> tuple[str, dict[str, str]]:
        """One grant for these channels, with what signatures of them would allow, and the `shared_secret` of each
        encrypted one. Raises ValueError as `mint_grant`."""
        shared = {
            name: self.authenticate(name, "0.0")["shared_secret"] for name in channels if names.is_encrypted(name)
        }
        auth = mint_grant(
            self.endpoint.key,
            self.endpoint.secret,
            channels,
            user_id=user_id,
            user_info=user_info,
            client_events=True,
            lasts_s=lasts_s,
        )
        return auth, shared

    def authenticate_user(self, socket_id: str, user_data: Mapping[str, Any]) -> dict[str, str]:
        """What a sign-in endpoint answers when this socket is this user's. See `sign_user`."""
        return sign_user(self.endpoint.key, self.endpoint.secret, socket_id, user_data, json_encoder=self._json_encoder)

    def validate_webhook(self, key: str, signature: str, body: str | bytes) -> Any:
        """The parsed body of a webhook in Pusher's format, or None if it isn't this app's or is more than 5 minutes
        old, as in `pusher`. `verify_webhook` says why, knows both formats and gives typed events."""
        raw = body.encode() if isinstance(body, str) else body
        expected = hex_hmac(self.endpoint.secret, raw).encode()
        right = hmac.compare_digest(expected, signature.encode(errors="replace"))
        if not (hmac.compare_digest(self.endpoint.key.encode(), key.encode(errors="replace")) and right):
            return None
        try:
            document = json.loads(raw, cls=self._json_decoder)
            age_ms = time.time() * 1000 - document["time_ms"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return document if abs(age_ms) <= _WEBHOOK_MAX_AGE_MS else None

    def encoded(self, channel: str, event_name: str, data: Any) -> str:
        """The data of an event as it would be sent: JSON, and on encrypted channels ciphertext. Raises ValueError for
        what the server would refuse. To be stored now and published later with `already_encoded`."""
        names.check_target(channel)
        names.check_event(event_name)
        return self._data(channel, data)

    def prepare(
        self,
        channels: str | Sequence[str],
        event_name: str,
        data: Any,
        socket_id: str | None = None,
        *,
        correlation_id: str | None = None,
    ) -> Call:
        """The request of a `trigger`, checked and encoded now, to be sent later with `send`; more than once sends the
        same correlation id."""
        return self._trigger(channels, event_name, data, socket_id, (), correlation_id, False)

    # -- requests

    def _tries(self, call: Call) -> Attempts:
        if self._closed:
            raise RuntimeError("this publisher is closed")
        return Attempts(self.endpoint, call, self._attempts, self.total_timeout, idempotent=self.idempotency)

    def _path(self, *parts: str) -> str:
        return "/".join((self._base, *(quote(part, safe="=@,;") for part in parts)))

    def _data(self, channel: str, data: Any, publish_id: str | None = None) -> str:
        """An event's data as it is sent. Strings are sent as they are, everything else as JSON. On encrypted channels
        the ciphertext is the same for the same `publish_id`."""
        text = data if isinstance(data, str) else to_json(data, self._json_encoder)
        if names.is_encrypted(channel):
            if self._master_key is None:
                raise ValueError(f"{channel} is encrypted: encryption_master_key_base64 is needed")
            text = encrypt(text, channel_key(channel, self._master_key), publish_id)
        return names.check_data(text, self.max_data_bytes)

    def _trigger(
        self,
        channels: str | Sequence[str],
        event_name: str,
        data: Any,
        socket_id: str | None,
        info: Iterable[str],
        correlation_id: str | None,
        already_encoded: bool,
        end: bool = False,
    ) -> Call:
        targets = [channels] if isinstance(channels, str) else list(channels)
        if isinstance(channels, Mapping) or not 1 <= len(targets) <= names.MAX_CHANNELS:
            raise ValueError(f"{len(targets)} channels; a name, or a list of 1 to {names.MAX_CHANNELS} is allowed")
        for name in targets:
            names.check_target(name)
        encrypted = next((name for name in targets if names.is_encrypted(name)), None)
        if encrypted is not None and len(set(targets)) > 1:
            raise ValueError(f"{encrypted} is encrypted and has a key of its own: publish to it alone")
        chosen = _chosen(correlation_id)
        text = names.check_data(data, self.max_data_bytes) if already_encoded else self._data(targets[0], data, chosen)
        body: dict[str, Any] = {"name": names.check_event(event_name), "channels": targets, "data": text}
        if socket_id:
            body["socket_id"] = names.check_socket_id(socket_id)
        if attributes := _joined(info):
            body["info"] = attributes
        if end:
            body["end"] = True
        return self._publish("events", body, chosen)

    def _publish(self, path: str, body: dict[str, Any], correlation_id: str, part: str = "") -> Call:
        """`part` is the end of the id that a part of a batch carries. The caller gets the batch's, to repeat it."""
        body["correlation_id"] = names.check_correlation_id(correlation_id + part)
        encoded = to_json(body).encode()
        if len(encoded) > names.MAX_BODY_BYTES:
            raise ValueError(f"the request has {len(encoded)} bytes; at most {names.MAX_BODY_BYTES} are allowed")
        return Call("POST", f"{self._base}/{path}", body=encoded, correlation_id=correlation_id)

    def _batch_parts(
        self, batch: Iterable[Mapping[str, Any]], already_encoded: bool, correlation_id: str | None
    ) -> list[tuple[int, Call]]:
        """The requests of a batch, in order, each with its number of events. All are checked before the first is
        sent."""
        chosen = _chosen(correlation_id)
        items = [self._item(index, item, already_encoded, f"{chosen}-{index}") for index, item in enumerate(batch)]
        parts = list(_parts(items))
        return [
            (
                len(part),
                self._publish("batch_events", {"batch": part}, chosen, "" if len(parts) == 1 else f"-{number + 1}"),
            )
            for number, part in enumerate(parts)
        ]

    def _item(self, index: int, item: Mapping[str, Any], already_encoded: bool, publish_id: str) -> dict[str, Any]:
        try:
            channel = names.check_target(item["channel"])
            data = item["data"] if already_encoded else self._data(channel, item["data"], publish_id)
            if not isinstance(data, str):
                raise ValueError("data must be a string when already_encoded is set")
            event: dict[str, Any] = {"channel": channel, "name": names.check_event(item["name"]), "data": data}
            names.check_data(data, self.max_data_bytes)
            if item.get("socket_id"):
                event["socket_id"] = names.check_socket_id(item["socket_id"])
            if item.get("info"):
                event["info"] = _joined(item["info"])
            if item.get("end"):
                event["end"] = True
        except KeyError as error:
            raise ValueError(f"batch[{index}] has no {error}") from None
        except ValueError as error:
            raise ValueError(f"batch[{index}]: {error}") from None
        return event

    def _channels_info(self, prefix_filter: str | None, attributes: Iterable[str]) -> Call:
        params = {"filter_by_prefix": prefix_filter} if prefix_filter else {}
        return Call("GET", self._path("channels"), _with_info(params, attributes))

    def _channel_info(self, channel: str, attributes: Iterable[str]) -> Call:
        return Call("GET", self._path("channels", names.check_target(channel)), _with_info({}, attributes))

    def _users_info(self, channel: str) -> Call:
        if not names.check_channel(channel).startswith("presence-"):
            raise ValueError(f"{channel} is no presence channel, and has no users")
        return Call("GET", self._path("channels", channel, "users"))

    def _terminate(self, user_id: str) -> Call:
        return Call("POST", self._path("users", names.check_signed_in_id(user_id), "terminate_connections"), body=b"{}")

    def _history(
        self,
        channel: str,
        limit: int,
        direction: str,
        cursor: str | None,
        since: str | int | None,
        until: str | int | None,
    ) -> Call:
        if not 1 <= limit <= 1000:
            raise ValueError(f"limit {limit} is not between 1 and 1000")
        if direction not in ("forwards", "backwards"):
            raise ValueError(f"direction {direction!r:.40} is neither forwards nor backwards")
        params = {"limit": str(limit), "direction": direction}
        optional = {"cursor": cursor, "since": since, "until": until}
        params.update({name: str(value) for name, value in optional.items() if value is not None})
        return Call("GET", self._path("channels", names.check_channel(channel), "history"), params)

    def _delete_history(self, channel: str) -> Call:
        return Call("DELETE", self._path("channels", names.check_channel(channel), "history"))

    def _unsubscribe(self, channel: str, user_id: str | None, socket_id: str | None) -> Call:
        if not names.needs_signature(names.check_channel(channel)):
            raise ValueError(f"{channel}: only private- and presence- channels can be closed to someone")
        if (user_id is None) == (socket_id is None):
            raise ValueError("give user_id or socket_id, and not both")
        whom = {"socket_id": names.check_socket_id(socket_id)} if socket_id is not None else {"user_id": user_id}
        return Call("POST", self._path("channels", channel, "unsubscribe"), body=to_json(whom).encode())

    def _revoke_grants(self, user_id: str | None, jti: str | None) -> Call:
        if (user_id is None) == (jti is None):
            raise ValueError("give user_id or jti, and not both")
        whom = {"jti": jti} if jti is not None else {"sub": user_id}
        return Call("POST", self._path("grants", "revoke"), body=to_json(whom).encode())

    def _for_reading(self, channel: str, offset: str) -> tuple[Self, Callable[[str, bool, str], Call]]:
        """A publisher with one connection that waits for long polls, and what makes the requests of a reader."""
        path = self._path("channels", names.check_channel(channel), "stream")
        if not isinstance(offset, str) or not offset:
            raise ValueError(f"offset {offset!r:.80} must be -1 for the beginning, now, or a reader's position")
        if self._closed:
            raise RuntimeError("this publisher is closed")
        reader = copy.copy(self)
        reader._connections = 1
        # As many as there is time for.
        reader._attempts = sys.maxsize
        reader._answer_s = self.timeout + _LONG_POLL_S
        reader.total_timeout = self.total_timeout + _LONG_POLL_S
        reader._prepare()

        def call(position: str, live: bool, cursor: str) -> Call:
            params = {"offset": position}
            if live:
                params["live"] = "long-poll"
            if cursor:
                params["cursor"] = cursor
            return Call("GET", path, params, stream=True)

        return reader, call

    def _trace(self, trace_id: str) -> Call:
        if not trace_id.isalnum() or len(trace_id) > 64:
            raise ValueError(f"trace id {trace_id!r:.80} is not like X-Service-Trace-Id: 32 hex digits")
        return Call("GET", self._path("trace", trace_id))

    def _usage(self, days: int) -> Call:
        if not 1 <= days <= 400:
            raise ValueError(f"days {days} is not between 1 and 400")
        return Call("GET", self._path("usage"), {"days": str(days)})


def history_of(answer: Answer) -> History:
    """The page in an answer. Raises Unavailable if it has another shape, which only another kind of server sends."""
    try:
        messages = tuple(Message(m["offset"], m["event"], m["data"], m["time_ms"]) for m in answer["messages"])
        return History(answer["epoch"], messages, answer.get("next"))
    except (KeyError, TypeError):
        raise Unavailable("the server's answer is no page of a history; only redpoll has histories") from None


def _chosen(correlation_id: str | None) -> str:
    return secrets.token_hex(16) if correlation_id is None else names.check_correlation_id(correlation_id)


def _joined(attributes: Iterable[str]) -> str:
    return attributes if isinstance(attributes, str) else ",".join(attributes)


def _with_info(params: dict[str, str], attributes: Iterable[str]) -> dict[str, str]:
    joined = _joined(attributes)
    return {**params, "info": joined} if joined else params


def _parts(items: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """At most ten events and 1 MiB each."""
    part: list[dict[str, Any]] = []
    size = 0
    for item in items:
        # JSON escapes a control character as six; beside the data an item has less than 2 kB.
        bound = 6 * len(item["data"].encode()) + 2048
        exact = bound if bound < names.MAX_BODY_BYTES // names.MAX_BATCH else len(to_json(item).encode()) + 1
        if part and (len(part) == names.MAX_BATCH or size + exact > names.MAX_BODY_BYTES - 1024):
            yield part
            part, size = [], 0
        part.append(item)
        size += exact
    if part:
        yield part
