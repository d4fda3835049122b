"""Reads a configuration file: JSON, a Laravel configuration in PHP, or an environment file (`.env`).

The kind is recognised by the content, because people name these files freely.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from redpoll.importing import php
from redpoll.importing.plan import SourceError

__all__ = ["Document", "load", "parse_env"]

# A configuration has a few kB. The bound keeps a wrong file (a log, a dump) from being parsed.
_MAX_BYTES = 1 << 20

_ENTRY = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*
    (?: "(?P<double>(?:[^"\\]|\\.)*)" | '(?P<single>[^']*)' | (?P<bare>[^\n]*) )""",
    re.MULTILINE | re.VERBOSE | re.DOTALL,
)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class Document(NamedTuple):
    """`data` is the parsed content; for `env` it is the same mapping as `env`. `env` is the environment in which
    the configuration applies: the file itself, or for PHP the file that `env()` reads. `unset` are the variables that
    `env()` didn't find there, and that have no default."""

    path: str
    kind: Literal["json", "php", "env"]
    data: Any
    env: Mapping[str, str]
    unset: Sequence[str] = ()


def load(path: Path, env_path: Path | None = None) -> Document:
    """Reads a file. `env_path` is what `env()` of a PHP file reads; by default the `.env` of its Laravel application.

    Raises SourceError.
    """
    text = _text_of(path)
    start = text.lstrip()[:8]
    if start.startswith("<?php"):
        beside = path.resolve().parent.parent / ".env"
        if env_path is None and beside.is_file():
            env_path = beside
        env = parse_env(_text_of(env_path)) if env_path is not None else {}
        unset: dict[str, None] = {}
        return Document(str(path), "php", php.parse(text, env, unset), env, tuple(unset))
    if start.startswith(("{", "[")):
        try:
            return Document(str(path), "json", json.loads(text), {})
        except RecursionError:
            raise SourceError(f"{path} nests its values too deeply") from None
        except ValueError as error:
            raise SourceError(f"{path} is not valid JSON: {error}") from None
    env = parse_env(text)
    if not env:
        raise SourceError(f"{path} is neither JSON nor PHP, and has no line NAME=VALUE")
    return Document(str(path), "env", env, env)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise SourceError(f"{path} has more than {_MAX_BYTES} bytes; that is no configuration file")
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SourceError(f"{path} is not a text file in UTF-8") from None


def parse_env(text: str) -> dict[str, str]:
    """The variables of an environment file. `${NAME}` stands for an earlier variable, except in single quotes."""
    env: dict[str, str] = {}
    for entry in _ENTRY.finditer(text):
        if entry["single"] is not None:
            value = entry["single"]
        elif entry["double"] is not None:
            value = _expanded(re.sub(r"\\(.)", _unescaped, entry["double"], flags=re.DOTALL), env)
        else:
            value = _expanded(re.split(r"(?:^|[ \t])#", entry["bare"])[0].strip(), env)
        env[entry["name"]] = value
    return env


def _unescaped(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[1], match[1])


def _expanded(value: str, env: Mapping[str, str]) -> str:
    return _REFERENCE.sub(lambda match: env.get(match[1], ""), value)
