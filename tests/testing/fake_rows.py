"""Which tests that were written for the server run over the fake too, which don't apply, and why.

`python tests/testing/fake_rows.py` writes the tables of src/redpoll/testing/README.md again. Not a test.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from clients import (
    test_app_ids,
    test_browser_module,
    test_growing_texts,
    test_laravel_echo,
    test_one_port,
    test_order,
    test_publishers,
    test_pusher_js,
    test_server_libraries,
)
from failures import test_hostile_input
from matrix.features import ROWS
from matrix.libraries import COLUMNS

README = Path(__file__).parents[2] / "src" / "redpoll" / "testing" / "README.md"

# Each with the settings of the fake server that its tests want. All their tests pass, except those of WITHOUT.
MODULES: dict[ModuleType, dict[str, str]] = {
    test_pusher_js: {},
    test_laravel_echo: {},
    test_server_libraries: {},
    test_order: {},
    test_app_ids: {"app_id": "My_app.1-x", "app_key": "my-key.1", "app_secret": "base64/+=="},
    test_browser_module: {},
    test_growing_texts: {},
    test_one_port: {},
    test_publishers: {},
    test_hostile_input: {},
}
# History rules by module: prefixes, and the arguments of `keep_history`.
RULES: dict[ModuleType, dict[str, dict[str, Any]]] = {
    test_browser_module: {"stored-": {"keep": 1000}, "presence-stored-": {"keep": 1000}, "short-": {"keep": 2}},
    test_growing_texts: {"chat.": {"keep": 5000, "replay": 50, "max_rate": 20, "join": "delta", "by": "message_id"}},
}
_PROCESS = "it starts another process"
_TRANSPORTS = "the fake doesn't have pusher-js' HTTP transports: they need the compiled engine"
_MEMORY = "it measures the memory of a worker"
WITHOUT = {
    "test_python_library_with_a_wrong_clock": "it changes the clock of this process, which is the fake's too",
    "test_node_driver_reports_what_a_library_throws": "it is about the test's own driver",
    "test_php_itself": _PROCESS + ", PHP",
    "test_curl": _PROCESS + ", curl",
    "test_keep_alive_through_a_proxy": _PROCESS + ", nginx or HAProxy",
    "test_a_websocket_and_libraries_through_a_proxy": _PROCESS + ", nginx or HAProxy",
    "test_the_413_says_how_to_raise_the_limit": "it changes the app by the command line",
    "test_endless_message_is_closed_before_it_is_buffered": _MEMORY,
    "test_half_open_sockets_cost_little_and_delay_no_client": _MEMORY,
    "test_silent_and_slow_connections_are_closed_in_time": "the fake has no time-out for a request's head",
    "test_bodies_of_strangers_are_refused_by_the_head_alone": "the fake reads a body before it checks the signature",
}
WHOLE_MODULES_WITHOUT = {
    "durable_streams": "the fake has no channels over HTTP: its readers need compiled modules",
    "library_requests": "it counts in the metrics of the processes",
    "migration": "it starts servers of other kinds",
    "readme": "it starts the programs of README.md",
    "redpoll_js": "it reads channels over HTTP",
    "tls": "the fake has no TLS",
    "trace": "the fake has no event log",
    "worker_ready": "the fake has no workers",
}
# Rows of the matrix.
ROWS_WITHOUT = {
    "xhr_streaming": _TRANSPORTS,
    "xhr_polling": _TRANSPORTS,
    "tls": "the fake has no TLS",
    "code-4000": "the fake has no TLS to come back by",
    "history-resumed": "the fake doesn't have `user_resume_s`",
}


def short(module: ModuleType) -> str:
    return module.__name__.rpartition("test_")[2]


def tests_of(module: ModuleType) -> Iterator[Callable[..., Any]]:
    """The test functions of a module that apply."""
    for name, function in inspect.getmembers(module, inspect.iscoroutinefunction):
        if name.startswith("test_") and name not in WITHOUT and function.__module__ == module.__name__:
            yield function


def is_long(function: Callable[..., Any]) -> bool:
    """Whether a test isn't in the suite: it has a process of Node, or sends thousands of events."""
    return inspect.getmodule(function) is test_order or bool(
        {"node", "page"} & inspect.signature(function).parameters.keys()
    )


def parameters_of(function: Callable[..., Any]) -> list[dict[str, Any]]:
    """The arguments of each run of a test."""
    sets: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
            sets = [
                {**known, **dict(zip(names, values if len(names) > 1 else (values,), strict=True))}
                for known in sets
                for values in mark.args[1]
            ]
    return sets


def _words(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def table() -> str:
    """The tables of README.md."""
    lines = ["| tests | pass over the fake | of these in the suite | don't apply |", "|---|---|---|---|"]
    for module in MODULES:
        functions = list(tests_of(module))
        absent = sum(name in WITHOUT for name in vars(module))
        inside = sum(not is_long(function) for function in functions)
        folder = module.__name__.rpartition(".")[0].rpartition(".")[2]
        lines.append(f"| `{folder}/test_{short(module)}` | {len(functions)} | {inside} | {absent or ''} |")
    cells = [(row, column) for row in ROWS for column in COLUMNS if callable(row.cells[column.id])]
    over = [(row, column) for row, column in cells if row.id not in ROWS_WITHOUT and column.id != "chromium"]
    inside = sum(column.id in ("pusher_js", "pypi") for _, column in over)
    lines += [
        f"| `matrix`, cells | {len(over)} | {inside} | {len(cells) - len(over)} |",
        "",
        "| doesn't apply | why |",
        "|---|---|",
        *(f"| {_words(name)} | {why} |" for name, why in WITHOUT.items()),
        *(f"| `clients/test_{name}` | {why} |" for name, why in WHOLE_MODULES_WITHOUT.items()),
        *(f"| matrix, row `{name}` | {why} |" for name, why in ROWS_WITHOUT.items()),
        "| matrix, webhooks by pull | the fake hands none out, and has no leases: a test reads them from `webhooks` |",
        "| matrix, column Chromium | it is the pusher-js of another column, in another process |",
    ]
    return "\n".join(lines)


def with_table(text: str) -> str:
    return re.sub(
        r"(<!-- rows -->\n).*?(\n<!-- end -->)", lambda found: found[1] + table() + found[2], text, flags=re.S
    )


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
