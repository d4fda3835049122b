"""Sets up logging. Our log lines and those of libraries have one format and go to stderr.

Stdout carries only what a person or a script asked for: the ready line, the credentials of the first start (in a
terminal), the output of a command.
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from redpoll.config.settings import Settings
from redpoll.text import json_text

__all__ = ["configure"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(settings: Settings, process: str) -> None:
    """Sets up logging for this process. `process` (`supervisor`, `control`, `worker 0`) appears in every line.

    A `text` line is `TIME LEVEL PROCESS EVENT key=value …`, with times in UTC; a traceback follows on its own lines. A
    `json` line is one object with `time`, `level`, `process`, `event`, the keys and, for a traceback, `exception`.
    """

    def name_process(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["process"] = process
        return event

    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        name_process,
    ]
    render = _json_line if settings.log_format == "json" else _text_line
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            render,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[settings.log_level])
    # At INFO these libraries log every statement, migration and request, which no operator acts on.
    for library in ("alembic", "sqlalchemy", "aiohttp", "aiosqlite", "asyncio"):
        logging.getLogger(library).setLevel(max(logging.WARNING, _LEVELS[settings.log_level]))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _text_line(_logger: Any, _method: str, event: Mapping[str, Any]) -> str:
    fields = dict(event)
    traceback = fields.pop("exception", None)
    head = [str(fields.pop(name)) for name in ("time", "level", "process", "event")]
    head[1] = f"{head[1]:<7}"
    line = " ".join(head + [f"{name}={_value(value)}" for name, value in fields.items()])
    return f"{line}\n{traceback}" if traceback else line


def _value(value: Any) -> str:
    text = str(value)
    plain = text.isprintable() and not set(text) & set(' "=')
    return text if text and plain else json_text.compact(text).decode()


def _json_line(_logger: Any, _method: str, event: Mapping[str, Any]) -> str:
    return json_text.compact(dict(event)).decode()
