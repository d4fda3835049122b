"""What redpoll promises to those who build on it (deploy/docs/promises.md), as one file that shows every change of it.

    .venv/bin/python deploy/promised.py            writes deploy/promised.json
    .venv/bin/python deploy/promised.py --check    exit code 1 if it doesn't match the code

Writing fails while CHANGELOG.md, in its part "Unreleased", doesn't name in backquotes each name that is gone or has
changed. Once a release is in the changelog, new names need an entry too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from redpoll.cli import main as commands
from redpoll.config.setting_table import TABLE, Setting
from redpoll.control.api_document import document
from redpoll.control.observe.metrics import catalog
from redpoll.control.webhooks.payloads import EVENTS
from redpoll.protocol.apps import SETTINGS
from redpoll.protocol.errors import HTTP_STATUS, Code
from redpoll.protocol.tokens import MANAGE, SCOPES

__all__ = ["COMMAND", "PATH", "Names", "changes", "promised", "unmentioned"]

ROOT: Final = Path(__file__).parents[1]
PATH: Final = ROOT / "deploy" / "promised.json"
CHANGELOG: Final = ROOT / "CHANGELOG.md"
COMMAND: Final = ".venv/bin/python deploy/promised.py"

# Section -> name -> what is promised of it besides the name.
Names = dict[str, dict[str, str]]


def promised() -> Names:
    """What the code of this tree promises."""
    api = json.loads(document())
    return {
        "http requests": dict(_requests(api)),
        "http bodies": dict(_bodies(api)),
        "http errors": {code: str(status) for code, status in HTTP_STATUS.items()},
        "close codes": {code.name: str(code.value) for code in Code},
        "webhook events": dict.fromkeys(EVENTS, ""),
        "token scopes": dict.fromkeys((*SCOPES, MANAGE), ""),
        "settings": {setting.name: _about(setting) for setting in TABLE},
        "app settings": {name: f"{setting.type}, default {setting.default}" for name, setting in SETTINGS.items()},
        "metrics": dict(_metrics()),
        "commands": dict(_commands(commands, "redpoll")),
    }


def _requests(api: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            query = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "query"]
            body = [_type_of(way["schema"]) for way in operation.get("requestBody", {}).get("content", {}).values()]
            statuses = sorted(status for status in operation["responses"] if status < "300")
            answers = [
                _type_of(way["schema"]) for way in operation["responses"][statuses[0]].get("content", {}).values()
            ]
            parts = [f"query {', '.join(query)}" if query else "", f"body {body[0]}" if body else ""]
            parts += [f"{' '.join(statuses)} {''.join(answers)}".strip()]
            yield f"{method.upper()} {path}", "; ".join(part for part in parts if part)


def _bodies(api: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, schema in api["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            required = ", required" if field in schema.get("required", ()) else ""
            yield f"{name}.{field}", _type_of(about) + required


def _type_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_type_of(part) for part in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    return schema.get("type", "any")


def _about(setting: Setting) -> str:
    default = ", ".join(map(str, setting.default)) if setting.is_list else setting.default
    shown = "empty" if default in (None, "") else default
    ways = [setting.flag] * setting.has_flag + [alias.variable for alias in setting.aliases]
    return "; ".join([f"default {shown}", *ways])


def _metrics() -> Iterator[tuple[str, str]]:
    for metric in catalog():
        labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
        suffix = "_total" if metric.type == "counter" else ""
        yield metric.name + suffix, f"{metric.type} {{{', '.join(labels)}}}"


def _commands(command: click.Command, words: str) -> Iterator[tuple[str, str]]:
    if isinstance(command, click.Group):
        # Commands may be loaded when they are asked for.
        context = click.Context(command)
        for name in sorted(command.list_commands(context)):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from _commands(child, f"{words} {name}")
        return
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    yield words, " ".join(parameter.make_metavar(click.Context(command)) for parameter in arguments)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield f"{words} {parameter.opts[-1]}", "switch" if parameter.is_flag else "value"


def changes(old: Names, new: Names) -> dict[str, list[str]]:
    """`gone`, `changed` and `new`: lines such as "settings: `port`"."""
    result: dict[str, list[str]] = {"gone": [], "changed": [], "new": []}
    for section in dict.fromkeys((*old, *new)):
        before, after = old.get(section, {}), new.get(section, {})
        for name in dict.fromkeys((*before, *after)):
            line = f"{section}: `{name}`"
            if name not in after:
                result["gone"].append(line)
            elif name not in before:
                result["new"].append(line)
            elif before[name] != after[name]:
                result["changed"].append(line)
    return result


def unmentioned(changed: dict[str, list[str]], changelog: str) -> list[str]:
    """Of these changes, the lines that need an entry under "Unreleased" and have none."""
    unreleased, _, released = changelog.partition("Unreleased")[2].partition("\n## ")
    kinds = ("gone", "changed", "new") if re.search(r"^\[?\d", released) else ("gone", "changed")
    lines = [line for kind in kinds for line in changed[kind]]
    return [line for line in lines if line.partition(": ")[2] not in unreleased]


def main() -> None:
    new = promised()
    old: Names = json.loads(PATH.read_text()) if PATH.exists() else new
    differences = changes(old, new)
    lines = [f"{kind:<7} {line}" for kind, items in differences.items() for line in items]
    if "--check" in sys.argv:
        sys.exit("\n".join([*lines, f"deploy/promised.json doesn't match the code: run {COMMAND}"]) if lines else 0)
    print("\n".join(lines) or "nothing has changed")
    if missing := unmentioned(differences, CHANGELOG.read_text()):
        sys.exit("\n".join(['not written: in CHANGELOG.md, the part "Unreleased" needs entries that name', *missing]))
    PATH.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
