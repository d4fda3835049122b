"""Log lines for people and for log collectors."""

import json
import logging

import pytest
import structlog

from redpoll.config.config import Settings
from redpoll.text import logs


@pytest.fixture(autouse=True)
def logging_restored():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_a_line_has_time_level_process_event_and_fields(capsys):
    logs.configure(Settings(), "worker 0")
    structlog.get_logger().info("child ended", code=-9, reason="it was killed", empty="")
    assert capsys.readouterr().out == ""
    logs.configure(Settings(), "worker 0")
    structlog.get_logger().info("child ended", code=-9, reason='it "was" killed', empty="")
    time, level, rest = capsys.readouterr().err.split(maxsplit=2)
    assert time.endswith("Z")
    assert level == "info"
    assert rest == 'worker 0 child ended code=-9 reason="it \\"was\\" killed" empty=""\n'


def test_a_line_break_in_a_value_makes_no_second_line(capsys):
    logs.configure(Settings(), "control")
    structlog.get_logger().warning("refused", name="a\nb")
    assert capsys.readouterr().err.endswith(' control refused name="a\\nb"\n')


def test_libraries_log_in_the_same_form(capsys):
    logs.configure(Settings(), "control")
    logging.getLogger("some.library").warning("disk %s", "full")
    logging.getLogger("alembic.runtime.migration").info("Running upgrade")
    assert capsys.readouterr().err.endswith(" warning control disk full\n")


def test_a_traceback_follows_its_line(capsys):
    logs.configure(Settings(), "control")
    try:
        raise ValueError("no")
    except ValueError:
        structlog.get_logger().exception("command failed", verb="app create")
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.endswith('control command failed verb="app create"')
    assert second == "Traceback (most recent call last):"


def test_json_lines_are_one_object_each(capsys):
    logs.configure(Settings(log_format="json"), "supervisor")
    try:
        raise ValueError("no")
    except ValueError:
        structlog.get_logger().exception("child ended", code=1)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["event"], found["level"], found["process"], found["code"]) == (
        "child ended",
        "error",
        "supervisor",
        1,
    )
    assert "ValueError: no" in found["exception"]


def test_lines_below_the_level_are_not_written(capsys):
    logs.configure(Settings(log_level="warning"), "control")
    structlog.get_logger().info("chatter")
    structlog.get_logger().warning("news")
    assert "chatter" not in (text := capsys.readouterr().err)
    assert "news" in text
