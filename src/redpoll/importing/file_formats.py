"""The formats of the file of `redpoll apply`: TOML, YAML or JSON, and the line of each value."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from redpoll.importing.plan import SourceError

__all__ = ["FORMATS", "Fault", "format_of", "read"]

FORMATS: Final = ("toml", "yaml", "json")
# A YAML file may name one value many times. So many values may be repeated, counting what is in them.
_MAX_REPEATED: Final = 100_000
# The file itself needs 5. libyaml's composer calls itself for each level, and would overflow the stack.
_MAX_YAML_DEPTH: Final = 50
# Fields that are texts, though people write numbers and dates in them without quotes.
_TEXTS: Final = ("id", "key")
_WRITTEN_AS_TEXT: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")


class Fault(NamedTuple):
    """What is wrong, and the path of its place: `apps[0].key`, or "" for the file."""

    where: str
    text: str


def format_of(name: str, text: str) -> Literal["toml", "yaml", "json"]:
    """The format by the file's ending; without a known one by its first character."""
    ending = Path(name).suffix.lower()
    if ending in (".yaml", ".yml"):
        return "yaml"
    if ending == ".json" or (ending != ".toml" and text.lstrip().startswith("{")):
        return "json"
    return "toml"


def read(kind: str, text: str, lines: dict[str, int], faults: list[Fault]) -> Any:
    """The document in one of FORMATS. Fills `lines` with the lines of paths, and adds to `faults`. Raises SourceError,
    whose text may begin with a line (":3: …"), if the text isn't of this format, and RecursionError."""
    reader = {"toml": _read_toml, "yaml": _read_yaml, "json": _read_json}[kind]
    return reader(text, lines, faults)


def _read_toml(text: str, lines: dict[str, int], _faults: list[Fault]) -> Any:
    try:
        data = tomllib.loads(text)
    except ValueError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise SourceError(f"{':' + line[1] if line else ''}: not valid TOML: {error}") from None
    _lines_of_toml(text, lines)
    return data


_TOML_TABLE: Final = re.compile(r"\s*\[(\[)?\s*([A-Za-z0-9_.\- ]+?)\s*\]")
_TOML_NAME: Final = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


def _lines_of_toml(text: str, lines: dict[str, int]) -> None:
    """The lines of tables and of the names in them. Values in one line have the line of their name."""
    counts: dict[str, int] = {}
    here = ""
    for number, line in enumerate(text.split("\n"), 1):
        if (table := _TOML_TABLE.match(line)) is not None:
            here = ""
            parts = [part.strip() for part in table[2].split(".")]
            for at, part in enumerate(parts):
                here = f"{here}.{part}" if here else part
                if at == len(parts) - 1 and table[1]:
                    counts[here] = counts.get(here, -1) + 1
                if here in counts:
                    here = f"{here}[{counts[here]}]"
            lines.setdefault(here, number)
        elif (name := _TOML_NAME.match(line)) is not None:
            lines.setdefault(f"{here}.{name[1]}" if here else name[1], number)


def _read_json(text: str, lines: dict[str, int], faults: list[Fault]) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            faults.append(Fault("", f"an object has the name {twice!r} twice"))
        return mapping

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise SourceError(f"{line}: not valid JSON: {error}") from None
    _lines_of_json(text, lines)
    return data


def _lines_of_json(text: str, lines: dict[str, int]) -> None:
    """The line of each app. The text is valid JSON."""
    start = re.search(r'"apps"\s*:\s*\[\s*', text)
    if start is None:
        return
    decoder, at, line, counted, number = json.JSONDecoder(), start.end(), 1, 0, 0
    while at < len(text) and text[at] not in "]":
        line += text.count("\n", counted, at)
        counted = at
        lines[f"apps[{number}]"] = line
        try:
            _, end = decoder.raw_decode(text, at)
        except ValueError:
            return
        following = re.compile(r"\s*,?\s*").match(text, end)
        at = following.end() if following is not None else len(text)
        number += 1


def _read_yaml(text: str, lines: dict[str, int], faults: list[Fault]) -> Any:
    try:
        import yaml
    except ImportError:
        raise SourceError(": YAML needs PyYAML: pip install 'redpoll[yaml]', or write TOML or JSON") from None
    loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader = loader_class(text)
    try:
        _check_yaml_depth(yaml.parse(text, Loader=loader_class))
        node = loader.get_single_node()
        return None if node is None else _Yaml(loader, lines, faults).value(node, "")
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise SourceError(f"{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    finally:
        loader.dispose()


def _check_yaml_depth(events: Iterable[Any]) -> None:
    depth = 0
    for event in events:
        name = type(event).__name__
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        if depth > _MAX_YAML_DEPTH:
            raise SourceError(f":{event.start_mark.line + 1}: values are nested too deeply")


class _Yaml:
    """Turns nodes into values, with the line of each."""

    def __init__(self, loader: Any, lines: dict[str, int], faults: list[Fault]) -> None:
        self._loader = loader
        self._lines = lines
        self._faults = faults
        self._seen: set[int] = set()
        self._repeated = 0

    def value(self, node: Any, path: str) -> Any:
        self._repeated += id(node) in self._seen
        self._seen.add(id(node))
        if self._repeated > _MAX_REPEATED:
            raise SourceError(f": its aliases stand for more than {_MAX_REPEATED} values")
        self._lines[path] = node.start_mark.line + 1
        if node.id == "sequence":
            return [self.value(one, f"{path}[{number}]") for number, one in enumerate(node.value)]
        if node.id == "mapping":
            mapping: dict[str, Any] = {}
            for name_node, value_node in node.value:
                name = str(name_node.value) if name_node.id == "scalar" else "?"
                where = f"{path}.{name}" if path else name
                if name in mapping:
                    self._faults.append(Fault(where, "this name is here twice"))
                mapping[name] = self.value(value_node, where)
                if name in _TEXTS and value_node.tag in _WRITTEN_AS_TEXT:
                    # YAML reads 0123 as 83, and 12:30:45 as 45045.
                    mapping[name] = str(value_node.value)
                self._lines[where] = name_node.start_mark.line + 1
            return mapping
        return self._loader.construct_object(node)
