"""Who may join which channel, in one place: rules by channel name, and the answers of auth endpoints made from them.

    rules = Rules()

    @rules.channel("private-order-{order_id:int}")
    def order(user, order_id):
        return Order.objects.filter(pk=order_id, owner=user).exists()

    @rules.channel("presence-room-{room}")
    async def room(user, room):
        return {"name": user.name}

The modules for Django, Starlette, FastAPI and Flask have the routes. A name without a rule, a name that doesn't fit,
nobody logged in and a function that raises are answered alike, with 403 and without a signature; the log says which it
was.

`Rules(grant_s=3600)` lets pages ask for one signed grant in place of many signatures (redpoll only).
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl
from uuid import UUID

from redpoll_client.grants import MAX_GRANT_S
from redpoll_client.names import MAX_NAME_CHARS, check_channel, check_socket_id, is_encrypted
from redpoll_client.publishing import PublisherBase

__all__ = [
    "MAX_AUTH_BYTES",
    "AuthRequest",
    "BadAuthRequest",
    "Rules",
    "authorize",
    "authorize_sync",
    "grant",
    "grant_sync",
    "parse_auth",
    "sign_in",
    "sign_in_sync",
]

_log = logging.getLogger("redpoll_client")
# The body of a request to an auth endpoint, and the channels that it may name.
MAX_AUTH_BYTES = 64 * 1024
_MAX_CHANNELS = 100
_PART = re.compile(r"\{([a-z_][a-z0-9_]*)(?::([a-z]+))?\}")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = "0123456789"


@dataclass(frozen=True)
class _Kind:
    """What a part of a name may be: a pattern, the characters that it uses, and what the function gets."""

    pattern: str
    characters: frozenset[str]
    convert: Callable[[str], Any]


_KINDS = {
    # Without a hyphen, which separates parts. So a name can be split in one way only.
    "str": _Kind(r"[A-Za-z0-9_=@,.;]+", frozenset(_LETTERS + _DIGITS + "_=@,.;"), str),
    # Without leading zeros, so that a number has one name.
    "int": _Kind(r"(?:0|[1-9][0-9]{0,17})", frozenset(_DIGITS), int),
    "uuid": _Kind(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", frozenset("0123456789abcdef-"), UUID),
    "any": _Kind(r"[A-Za-z0-9_=@,.;-]+", frozenset(_LETTERS + _DIGITS + "_=@,.;-"), str),
}

# Gets the user and the parts of the name. Returns True, False, or on presence channels the member's info.
Rule = Callable[..., Any]
F = TypeVar("F", bound=Rule)


class _Pattern:
    """A channel name with parts in braces. It fits encrypted channels only if it begins as they do: a signature for one
    comes with its key, which a rule such as `private-{a}-{b}` isn't meant to hand out."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._encrypted = is_encrypted(text)
        # Each item is one character, or one or more of a set.
        self.items: list[tuple[frozenset[str], bool]] = []
        self.converters: dict[str, Callable[[str], Any]] = {}
        expression = ""
        at = 0
        for match in _PART.finditer(text):
            expression += self._literal(text[at : match.start()])
            name, kind = match[1], match[2] or "str"
            if kind not in _KINDS or name in self.converters:
                raise ValueError(
                    f"{text}: {match[0]}: each part needs a name of its own, and a kind of {', '.join(_KINDS)}"
                )
            self.converters[name] = _KINDS[kind].convert
            self.items.append((_KINDS[kind].characters, True))
            expression += f"(?P<{name}>{_KINDS[kind].pattern})"
            at = match.end()
        expression += self._literal(text[at:])
        self._match = re.compile(expression).fullmatch

    def _literal(self, text: str) -> str:
        if text:
            check_channel(text)
        self.items += [(frozenset(character), False) for character in text]
        return re.escape(text)

    def parts(self, channel: str) -> dict[str, Any] | None:
        match = self._match(channel) if is_encrypted(channel) == self._encrypted else None
        if match is None:
            return None
        return {name: self.converters[name](value) for name, value in match.groupdict().items()}

    def overlaps(self, other: _Pattern) -> bool:
        """Whether one name may fit both: a walk through both at once. A kind counts as any text of its characters."""
        if self._encrypted != other._encrypted:
            return False
        todo, seen = [(0, 0)], {(0, 0)}
        while todo:
            mine, theirs = todo.pop()
            if mine == len(self.items) and theirs == len(other.items):
                return True
            if mine == len(self.items) or theirs == len(other.items):
                continue
            if not self.items[mine][0] & other.items[theirs][0]:
                continue
            steps = {(mine + 1, theirs + 1)}
            if self.items[mine][1]:
                steps.add((mine, theirs + 1))
            if other.items[theirs][1]:
                steps.add((mine + 1, theirs))
            todo += steps - seen
            seen |= steps
        return False


class Rules:
    """Rules for channels, and optionally what a sign-in knows of the user. Modules add to it when they are imported.

    `grant_s`: how long a grant lasts that the route `/grant` answers with, at most a day; None: that route is off. The
    app needs `redpoll app set ID grants=true`.
    """

    def __init__(self, *, grant_s: int | None = None) -> None:
        if grant_s is not None and not 0 < grant_s <= MAX_GRANT_S:
            raise ValueError(f"grant_s must be 1 to {MAX_GRANT_S} seconds, not {grant_s}")
        self.grant_s = grant_s
        self._rules: list[tuple[_Pattern, Rule]] = []
        self._user_data: Rule | None = None

    def channel(self, pattern: str) -> Callable[[F], F]:
        """Decorates the function that decides who may join the channels of this name.

        Parts in braces are its arguments after the user: `{id}` is text without a hyphen, `{id:int}` a number without
        leading zeros, `{id:uuid}` a UUID in lowercase, `{id:any}` anything. Encrypted channels fit only a name that
        begins with `private-encrypted-`. The function may be a coroutine. It returns True, False, or on presence
        channels the member's info, a dict.

        Raises ValueError for a name that needs no rule, because everybody may join it, and for one that may fit a
        channel of another rule.
        """
        parsed = _Pattern(pattern)
        if not pattern.startswith(("private-", "presence-")):
            raise ValueError(f"{pattern}: only private- and presence- channels have rules; anybody may join others")
        for other, _ in self._rules:
            if parsed.overlaps(other):
                raise ValueError(f"{pattern}: a name may fit {other.text} as well, which has a function already")

        def add(function: F) -> F:
            _check_arguments(function, parsed)
            self._rules.append((parsed, function))
            return function

        return add

    def user(self, function: F) -> F:
        """Decorates the function that returns what a sign-in says of a user beside the id: a dict with `user_info` and
        `watchlist`, both optional. Raises ValueError for a second one."""
        if self._user_data is not None:
            raise ValueError("there is a function for users already")
        self._user_data = function
        return function

    def find(self, channel: str) -> tuple[Rule, dict[str, Any]] | None:
        """The function and the parts for a channel; None if no rule fits."""
        # Longer names aren't channels, and matching takes time that grows faster than their length.
        if len(channel) > MAX_NAME_CHARS:
            return None
        for pattern, function in self._rules:
            parts = pattern.parts(channel)
            if parts is not None:
                return function, parts
        return None

    @property
    def user_data(self) -> Rule | None:
        """The function of `user`."""
        return self._user_data


def _check_arguments(function: Rule, pattern: _Pattern) -> None:
    try:
        inspect.signature(function).bind(None, **dict.fromkeys(pattern.converters))
    except TypeError as error:
        raise ValueError(
            f"{pattern.text}: {getattr(function, '__name__', function)} doesn't take these parts: {error}"
        ) from None


class BadAuthRequest(Exception):
    """What was posted to an auth endpoint isn't what a Pusher library posts. `status` is the answer's: 400 or 413."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class AuthRequest:
    """`channels` are the names to sign for, none in a sign-in. `several`: the answer is by name. `socket_id` is empty
    if none was posted, as for a grant, which is for no connection."""

    socket_id: str
    channels: tuple[str, ...]
    several: bool


def parse_auth(content_type: str, body: bytes) -> AuthRequest:
    """What pusher-js posts: a form or JSON with `socket_id` and `channel_name`; or several names, as `channel_name[]`,
    `channel_name[0]` or a JSON list, which is what the plugin pusher-js-auth posts. Raises BadAuthRequest."""
    if len(body) > MAX_AUTH_BYTES:
        raise BadAuthRequest(f"at most {MAX_AUTH_BYTES} bytes are allowed", 413)
    try:
        if content_type.partition(";")[0].strip().lower() == "application/json":
            document = json.loads(body)
            socket_id, names = document.get("socket_id"), document.get("channel_name")
        else:
            fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=2 * _MAX_CHANNELS)
            socket_id = dict(fields).get("socket_id")
            listed = [value for name, value in fields if name.startswith("channel_name[")]
            names = listed or dict(fields).get("channel_name")
    except (ValueError, AttributeError, RecursionError):
        raise BadAuthRequest("the body is neither a form nor a JSON object") from None
    several = isinstance(names, list)
    channels = names if isinstance(names, list) else [] if names is None else [names]
    socket_id = "" if socket_id is None else socket_id
    if not isinstance(socket_id, str) or not all(isinstance(name, str) for name in channels):
        raise BadAuthRequest("socket_id and channel_name must be strings")
    if len(channels) > _MAX_CHANNELS:
        raise BadAuthRequest(f"{len(channels)} channels; at most {_MAX_CHANNELS} are allowed")
    try:
        if socket_id:
            check_socket_id(socket_id)
    except ValueError as error:
        raise BadAuthRequest(str(error)) from None
    return AuthRequest(socket_id, tuple(channels), several)


# -- deciding. The steps are a generator, so that blocking and asyncio frameworks share them: it yields a function and
# its arguments to be called, and gets the result.

_Steps = Iterator[Any]


def _decide(rules: Rules, signer: PublisherBase, request: AuthRequest, user: Any, user_id: str | None) -> Any:
    answers: dict[str, Any] = {}
    if not request.channels or not request.socket_id:
        return 400, {"error": "channel_name or socket_id is missing"}
    for channel in dict.fromkeys(request.channels):
        answers[channel] = yield from _one(rules, signer, request.socket_id, channel, user, user_id)
    if not request.several:
        (answer,) = answers.values()
        return (403, _FORBIDDEN) if answer is None else (200, answer)
    refused = {"status": 403, "data": _FORBIDDEN}
    return 200, {
        name: refused if answer is None else {"status": 200, "data": answer} for name, answer in answers.items()
    }


def _one(rules: Rules, signer: PublisherBase, socket_id: str, channel: str, user: Any, user_id: str | None) -> Any:
    """The signature for one channel, or None."""
    try:
        member = yield from _member(rules, channel, user, user_id)
        if member is None:
            return None
        return signer.authenticate(channel, socket_id, member if channel.startswith("presence-") else None)
    except Exception:
        _log.exception("the signature for %.200r failed", channel)
        return None


def _member(rules: Rules, channel: str, user: Any, user_id: str | None) -> Any:
    """Who the user is in a channel that the rules let it join: `user_id`, and `user_info` if its rule gives one. None
    if it may not."""
    rule = rules.find(channel)
    if user is None or user_id is None or rule is None:
        _log.info("no signature for %.200r: %s", channel, "no rule fits" if rule is None else "nobody is logged in")
        return None
    function, parts = rule
    try:
        result = yield function, user, parts
        presence = channel.startswith("presence-")
        if isinstance(result, Mapping) and presence:
            return {"user_id": user_id, "user_info": dict(result)}
        if result is True:
            return {"user_id": user_id}
        if result is not False and result is not None:
            _log.error(
                "the rule of %.200r returned %s, which is neither True nor False", channel, type(result).__name__
            )
        return None
    except Exception:
        _log.exception("the rule of %.200r failed", channel)
        return None


def _grant(rules: Rules, signer: PublisherBase, request: AuthRequest, user: Any, user_id: str | None) -> Any:
    if rules.grant_s is None:
        return 404, {"error": "grants are off here"}
    if not request.channels:
        return 400, {"error": "channel_name is missing"}
    allowed: list[str] = []
    infos: list[Any] = []
    for channel in dict.fromkeys(request.channels):
        member = yield from _member(rules, channel, user, user_id)
        if member is None:
            continue
        if channel.startswith("presence-"):
            info = member.get("user_info")
            if infos and info != infos[0]:
                _log.error("no grant for %.200r: a grant has one user_info, and this channel's is another", channel)
                continue
            infos.append(info)
        allowed.append(channel)
    if not allowed:
        return 403, _FORBIDDEN
    try:
        auth, secrets = signer.grant(allowed, user_id, infos[0] if infos else None, rules.grant_s)
    except ValueError as error:
        _log.error("no grant for user %.200r: %s", user_id, error)
        return 400, {"error": "a grant can't hold these channels: ask for fewer"}
    answer = {"auth": auth, "user_id": user_id, "seconds": rules.grant_s, "channels": allowed}
    return 200, {**answer, "shared_secrets": secrets} if secrets else answer


def _sign_in(rules: Rules, signer: PublisherBase, request: AuthRequest, user: Any, user_id: str | None) -> Any:
    if user is None or user_id is None:
        return 403, _FORBIDDEN
    if not request.socket_id:
        return 400, {"error": "socket_id is missing"}
    try:
        more = (yield rules.user_data, user, {}) if rules.user_data is not None else {}
        return 200, signer.authenticate_user(request.socket_id, {**(more or {}), "id": user_id})
    except Exception:
        _log.exception("the sign-in of user %.200r failed", user_id)
        return 403, _FORBIDDEN


# The same for every reason: a client that tries names learns nothing.
_FORBIDDEN = {"error": "forbidden"}
Answer = tuple[int, dict[str, Any]]
Arguments = tuple[Rules, PublisherBase, AuthRequest, Any, str | None]


def _run_sync(steps: Any, run_async: Callable[[Awaitable[Any]], Any]) -> Answer:
    result = None
    try:
        function, user, parts = next(steps)
        while True:
            try:
                result = function(user, **parts)
                if inspect.isawaitable(result):
                    result = run_async(result)
            except Exception as error:
                function, user, parts = steps.throw(error)
            else:
                function, user, parts = steps.send(result)
    except StopIteration as end:
        answer: Answer = end.value
        return answer


async def _run(steps: Any, run_sync: Callable[..., Awaitable[Any]]) -> Answer:
    try:
        function, user, parts = next(steps)
        while True:
            try:
                if inspect.iscoroutinefunction(function):
                    result = await function(user, **parts)
                else:
                    result = await run_sync(function, user, **parts)
                    if inspect.isawaitable(result):
                        result = await result
            except Exception as error:
                function, user, parts = steps.throw(error)
            else:
                function, user, parts = steps.send(result)
    except StopIteration as end:
        answer: Answer = end.value
        return answer


def authorize_sync(arguments: Arguments, run_async: Callable[[Awaitable[Any]], Any]) -> Answer:
    """The status and the JSON object that answer a request to an auth endpoint. `arguments` are the rules, a publisher
    that signs, the request, the user, and the user's id; user None: nobody is logged in. `run_async` runs
    coroutines."""
    return _run_sync(_decide(*arguments), run_async)


def sign_in_sync(arguments: Arguments, run_async: Callable[[Awaitable[Any]], Any]) -> Answer:
    """As `authorize_sync`, for a sign-in endpoint."""
    return _run_sync(_sign_in(*arguments), run_async)


def grant_sync(arguments: Arguments, run_async: Callable[[Awaitable[Any]], Any]) -> Answer:
    """As `authorize_sync`, with one grant for those of the channels that the user may join: `auth`, the grant's
    `channels`, `user_id`, and `seconds`, how long it lasts. With encrypted channels also `shared_secrets`, by name. 404
    without `Rules(grant_s=…)`.

    A grant has one `user_info`, that of the first presence channel; presence channels with another one are left out.
    """
    return _run_sync(_grant(*arguments), run_async)


async def authorize(arguments: Arguments, run_sync: Callable[..., Awaitable[Any]]) -> Answer:
    """As `authorize_sync`, in asyncio. `run_sync` runs functions that may block, in a thread."""
    return await _run(_decide(*arguments), run_sync)


async def sign_in(arguments: Arguments, run_sync: Callable[..., Awaitable[Any]]) -> Answer:
    """As `authorize`, for a sign-in endpoint."""
    return await _run(_sign_in(*arguments), run_sync)


async def grant(arguments: Arguments, run_sync: Callable[..., Awaitable[Any]]) -> Answer:
    """As `grant_sync`, in asyncio; `run_sync` as in `authorize`."""
    return await _run(_grant(*arguments), run_sync)
