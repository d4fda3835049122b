"""The site's page "Python reference", from the docstrings of redpoll-client and redpoll.testing.

griffe reads the source and imports nothing, so no framework needs to be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import griffe

__all__ = ["python_reference"]

SOURCE: Final = Path(__file__).parents[1] / "src"
_HEAD: Final = """# Python reference

What `redpoll-client` and `redpoll.testing` offer, from their docstrings. The quick starts show how it is used:
[scripts](quickstart/python.md), [Django](quickstart/django.md), [FastAPI](quickstart/fastapi.md),
[Flask](quickstart/flask.md), [tests](python-testing.md).
"""
# Headings, modules, and the names of each. None: all that the package exports.
_SECTIONS: Final[tuple[tuple[str, str, tuple[str, ...] | None], ...]] = (
    ("redpoll_client", "redpoll_client", None),
    ("redpoll_client.rules", "redpoll_client.rules", ("Rules",)),
    ("redpoll_client.django", "redpoll_client.django.publishing", ("publish_on_commit", "store")),
    ("redpoll_client.fastapi", "redpoll_client.fastapi", ("Realtime",)),
    ("redpoll_client.starlette", "redpoll_client.starlette", ("Realtime",)),
    ("redpoll_client.flask", "redpoll_client.flask", ("Realtime",)),
    ("redpoll_client.celery", "redpoll_client.celery", ("progress",)),
    ("redpoll.testing", "redpoll.testing.fake_server", ("FakeServer",)),
    ("", "redpoll.testing.server", ("Server",)),
    ("", "redpoll.testing.recorder", ("Published",)),
    ("", "redpoll.testing.webhooks", ("Webhook",)),
    ("", "redpoll.testing.plugin", ("RedpollApp",)),
)
# The subscriber calls them.
_INTERNAL: Final = {
    "Channel": {"put", "succeeded", "moved_to", "end", "ended"},
    "Members": {"replace"},
    "SignedIn": {"put", "end"},
    "Realtime": {"answer", "auth", "user_auth", "webhook"},
}


def python_reference() -> str:
    """The page, in Markdown."""
    loader = griffe.GriffeLoader(search_paths=[SOURCE], allow_inspection=False)
    packages = {name: loader.load(name) for name in ("redpoll_client", "redpoll")}
    loader.resolve_aliases()
    parts = [_HEAD]
    for heading, path, names in _SECTIONS:
        top, _, rest = path.partition(".")
        module = packages[top][rest] if rest else packages[top]
        if heading:
            parts.append(f"## {heading}\n")
        chosen = names if names is not None else [str(name) for name in module.exports or ()]
        for name in chosen:
            if not name.startswith("__"):
                parts += _object(name, module[name])
    return "\n".join(parts)


def _object(name: str, thing: griffe.Object | griffe.Alias) -> Iterator[str]:
    """A class with its methods, or a function."""
    yield f"### {name}\n"
    if thing.is_class:
        yield from _bases(thing)
        yield _text(thing)
        members = thing.all_members
        if (init := members.get("__init__")) is not None and init.docstring is not None:
            yield from _function(f"{name}()", init)
        for member, item in members.items():
            public = not member.startswith("_") and member not in _INTERNAL.get(name, ())
            if public and item.docstring is not None:
                if item.is_function:
                    yield from _function(f"{name}.{member}", item)
                else:
                    yield f"#### {name}.{member}\n\n{_text(item)}"
    else:
        yield f"    {_signature(name, thing)}\n\n{_text(thing)}"


def _bases(thing: griffe.Object | griffe.Alias) -> Iterator[str]:
    bases = [str(base).rpartition(".")[2] for base in thing.bases]
    shown = [base for base in bases if base not in ("PublisherBase", "Expectations")]
    if shown:
        yield f"A {', '.join(f'`{base}`' for base in shown)}.\n"


def _function(heading: str, function: griffe.Object | griffe.Alias) -> Iterator[str]:
    name = heading.rpartition(".")[2].removesuffix("()")
    yield f"#### {heading}\n\n    {_signature(name, function)}\n\n{_text(function)}"


def _signature(name: str, function: griffe.Object | griffe.Alias) -> str:
    """On one line, or with one line for each parameter."""
    target = function.final_target if isinstance(function, griffe.Alias) else function
    assert isinstance(target, griffe.Function)
    prefix = "async " if "async" in target.labels else ""
    shown = target.signature(return_type=target.name != "__init__")
    text = prefix + shown.replace(target.name, name, 1)
    if len(text) <= 100:
        return text
    opening, _, rest = text.partition("(")
    inner, _, result = rest.rpartition(")")
    lines = [f"        {part}," for part in _split(inner)]
    return "\n".join([f"{opening}(", *lines, f"    ){result}"])


def _split(parameters: str) -> Iterator[str]:
    """The parts between the commas outside of brackets."""
    depth, start = 0, 0
    for index, character in enumerate(parameters):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            yield parameters[start:index].strip()
            start = index + 1
    yield parameters[start:].strip()


def _text(thing: griffe.Object | griffe.Alias) -> str:
    """The docstring. A tree drawn in one is code already, as indented text."""
    return "" if thing.docstring is None else thing.docstring.value.strip() + "\n"
