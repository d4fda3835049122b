"""Reads the array that a Laravel configuration file returns, without running PHP.

Understood are literals, nested arrays, comments, casts, `env()` and `explode()`. Anything else becomes an `Expression`
with its text, so that the import can report it instead of guessing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from redpoll.importing.plan import SourceError

__all__ = ["Expression", "env_value", "parse"]


class Expression(NamedTuple):
    """A value that only PHP can compute."""

    text: str


_TOKEN = re.compile(
    r"""\s+ | //[^\n]* | \#[^\n]* | /\*(?:.*?\*/|.*)
    # Possessive: a string that doesn't end is given up at once. The rest of the file is one token then.
    | (?P<string> '(?:[^'\\]++|\\.)*+' | "(?:[^"\\]++|\\.)*+" )
    | (?P<open> ['"].* )
    | (?P<number> -?[0-9][0-9_]*(?:\.[0-9]+)? )
    | (?P<word> \\?[$A-Za-z_][A-Za-z0-9_\\]*(?:::[A-Za-z_]+)? )
    | (?P<sign> => | === | !== | == | \?\? | -> | . )""",
    re.VERBOSE | re.DOTALL,
)
_CASTS = {"int", "string", "bool", "float", "array"}
_WORDS = {"true": True, "false": False, "null": None}
# What Laravel's env() makes of these texts, also in parentheses.
_ENV_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "empty": ""}
_ENV_WORD = re.compile(r"\((true|false|null|empty)\)|(true|false|null|empty)", re.IGNORECASE)
_MAX_DEPTH = 50
_MAX_DIGITS = 30
_END = "end of file"


def parse(text: str, env: Mapping[str, str], unset: dict[str, None] | None = None) -> Any:
    """The value that the file returns: a dict (a list if PHP's array is one), with `env()` looked up in `env`.

    The names of variables that have neither a value there nor a default are added to `unset`. Raises SourceError.
    """
    tokens = [
        (match.lastgroup, match[0], match.start())
        for match in _TOKEN.finditer(text, text.index("<?php") + len("<?php"))
        if match.lastgroup
    ]
    for at, (_, word, _) in enumerate(tokens):
        if word == "return":
            return _Reader(text, tokens, at + 1, env, {} if unset is None else unset).value(0)
    raise SourceError("the PHP file returns no configuration")


def env_value(text: str) -> Any:
    """What Laravel's env() makes of a variable's text: `null` is None, `true` is True, `empty` is ""."""
    word = _ENV_WORD.fullmatch(text)
    return text if word is None else _ENV_WORDS[(word[1] or word[2]).lower()]


class _Reader:
    """Reads values from a list of tokens: kind, text, offset."""

    def __init__(
        self, text: str, tokens: list[tuple[str, str, int]], at: int, env: Mapping[str, str], unset: dict[str, None]
    ) -> None:
        self._text = text
        self._tokens = tokens
        self._at = at
        self._env = env
        self._unset = unset

    def value(self, depth: int, *, after_key: bool = False) -> Any:
        """The next value, up to the `,` `]` `)` or `;` that ends it, or the `=>` if it may be a key."""
        if depth > _MAX_DEPTH:
            raise SourceError("the PHP file nests its arrays too deeply")
        start = self._at
        simple = self._simple(depth)
        ends = (",", ";", _END) if after_key else (",", ";", "=>", _END)
        if self._next()[1] in (*ends, "]", ")"):
            return simple
        return self._expression(start, ends)

    def _next(self) -> tuple[str, str, int]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("sign", _END, len(self._text))

    def _token(self) -> tuple[str, str, int]:
        token = self._next()
        self._at += 1
        return token

    def _simple(self, depth: int) -> Any:
        kind, text, _ = self._token()
        if kind == "string":
            return _string(text)
        if kind == "number":
            plain = text.replace("_", "")
            if len(plain) > _MAX_DIGITS:
                raise SourceError(f"the PHP file has a number of more than {_MAX_DIGITS} digits")
            return float(plain) if "." in plain else int(plain)
        if kind == "open":
            raise SourceError("the PHP file has a text without an end")
        if text == "[":
            return self._array("]", depth)
        if kind == "word":
            return self._word(text, depth)
        if text == "(":
            _, cast, _ = self._token()
            if cast in _CASTS and self._next()[1] == ")":
                self._at += 1
                if depth > _MAX_DEPTH:
                    raise SourceError("the PHP file nests its casts too deeply")
                return _cast(cast, self._simple(depth + 1))
        return Expression(text)

    def _word(self, word: str, depth: int) -> Any:
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        if self._next()[1] != "(":
            return Expression(word)
        start = self._tokens[self._at - 1][2]
        self._at += 1
        arguments = self._array(")", depth)
        if word == "array":
            return arguments
        if isinstance(arguments, list) and arguments and not any(isinstance(item, Expression) for item in arguments):
            if word == "env":
                return self._env_value(*arguments[:2])
            if word == "explode" and len(arguments) == 2:
                return [part.strip() for part in str(arguments[1] or "").split(str(arguments[0])) if part.strip()]
        return Expression(" ".join(self._text[start : self._next()[2]].split()))

    def _env_value(self, name: Any, default: Any = None) -> Any:
        value = self._env.get(str(name))
        if value is None:
            if default is None:
                self._unset[str(name)] = None
            return default
        return env_value(value)

    def _array(self, end: str, depth: int) -> Any:
        """The items up to `end`: a list, or a dict if one of them has a key."""
        items: dict[Any, Any] = {}
        has_keys = False
        while self._next()[1] != end:
            value = self.value(depth + 1)
            if self._next()[1] == "=>":
                self._at += 1
                has_keys = True
                items[value if isinstance(value, str | int) else str(value)] = self.value(depth + 1, after_key=True)
            else:
                items[len(items)] = value
            if self._next()[1] == ",":
                self._at += 1
            elif self._next()[1] != end:
                raise SourceError(f"the PHP file has {self._next()[1]!r} where , or {end} belongs")
        self._at += 1
        return items if has_keys else list(items.values())

    def _expression(self, start: int, ends: tuple[str, ...]) -> Expression:
        """Skips to the end of the value that begins at the token `start`."""
        open_brackets = 0
        self._at = start
        while (text := self._next()[1]) != _END:
            if text in "([{":
                open_brackets += 1
            elif text in ")]}":
                if not open_brackets:
                    break
                open_brackets -= 1
            elif text in ends and not open_brackets:
                break
            self._at += 1
        return Expression(" ".join(self._text[self._tokens[start][2] : self._next()[2]].split()))


def _string(text: str) -> Any:
    inner = text[1:-1]
    if text[0] == '"' and re.search(r"(?<!\\)\$|\{\$", inner):
        return Expression(text)
    return re.sub(r"\\(.)", lambda match: match[1] if match[1] in "\\'\"$" else match[0], inner, flags=re.DOTALL)


def _cast(cast: str, value: Any) -> Any:
    if isinstance(value, Expression) or value is None:
        return value
    try:
        if cast == "int":
            return int(float(value))
        if cast == "float":
            return float(value)
    except (TypeError, ValueError, OverflowError):
        return Expression(f"({cast}) {value!r}")
    if cast == "bool":
        # PHP takes the text "0" for false.
        return bool(value) and value != "0"
    return str(value) if cast == "string" else value
