"""`progress` in real Celery tasks, which run in this process."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import celery
import pytest

import redpoll_client
from helpers.answering import Answering, reply
from redpoll_client import Publisher, Unreachable
from redpoll_client.celery import progress


def states_of(server):
    return [json.loads(asked.json["data"]) for asked in server.asked]


@pytest.fixture
def app():
    app = celery.Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_always_eager = True
    return app


def test_a_tasks_progress_is_published_at_a_bounded_rate(app):
    with Answering(reply(200)) as server, Publisher(url=server.url) as publisher:

        @app.task(bind=True)
        def count(self, steps):
            with progress(self, "private-a", publisher, per_second=0.01) as report:
                for step in range(steps):
                    report(step + 1, steps, text="x")

        result = count.delay(1000)
        published = states_of(server)
        assert [event["state"] for event in published] == ["STARTED", "PROGRESS", "SUCCESS"]
        assert {event["task"] for event in published} == {result.id}
        step = {key: published[1][key] for key in ("done", "total", "text")}
        assert step == {"done": 1000, "total": 1000, "text": "x"}


def test_how_a_task_ends_is_published(app):
    with Answering(reply(200)) as server, Publisher(url=server.url) as publisher:

        @app.task(bind=True, max_retries=1)
        def fails(self):
            with progress(self, "private-a", publisher):
                if not self.request.retries:
                    raise self.retry(countdown=0)
                raise LookupError("secret reason")

        assert isinstance(fails.delay().result, LookupError)
        states = [event["state"] for event in states_of(server)]
        assert sorted(states) == ["FAILURE", "RETRY", "STARTED", "STARTED"]
        assert "secret reason" not in str(states_of(server))


def test_a_server_that_is_away_doesnt_fail_the_task(app, monkeypatch):
    monkeypatch.setattr("redpoll_client.celery._PAUSE_S", 1000.0)
    with Answering(reply(503)) as server, Publisher(url=server.url) as publisher:

        @app.task(bind=True)
        def task(self):
            with progress(self, "private-a", publisher) as report:
                with pytest.raises(ValueError, match=r"NaN|Out of range"):
                    report(float("nan"))
                for step in range(100):
                    report(step)
            return "done"

        assert task.delay().result == "done"
        assert [event["state"] for event in states_of(server)] == ["STARTED", "PROGRESS", "SUCCESS"]


def test_a_step_that_cant_be_published_fails_where_it_is_reported(app):
    with Answering(reply(200)) as server, Publisher(url=server.url) as publisher:

        @app.task(bind=True)
        def task(self):
            with progress(self, "private-a", publisher, per_second=0.01) as report:
                report(1, 2)
                rows = ["good"]
                report(2, 2, rows=rows)
                # With the task's id and name it is above the limit, 10,240 bytes; without them below it.
                with pytest.raises(ValueError, match="10240"):
                    report(2, 2, text="x" * 10_180)
                # What was reported is published, not what became of it.
                rows.append("x" * 10_240)
            return "done"

        assert task.delay().get() == "done"
        published = states_of(server)
        assert [event["state"] for event in published] == ["STARTED", "PROGRESS", "SUCCESS"]
        assert published[1]["rows"] == ["good"]


# A task as celery-types declares it.
TYPED = """
from typing import Any

from redpoll_client import Publisher
from redpoll_client.celery import progress


class Task:
    name: str

    @property
    def request(self) -> dict[str, Any]:
        return {}


def export(task: Task, publisher: Publisher) -> None:
    with progress(task, "private-a", publisher) as report:
        report(1, 2)
"""


def test_type_checkers_accept_a_task(tmp_path):
    program, package = tmp_path / "program.py", Path(redpoll_client.__file__).parent
    program.write_text(TYPED)
    # Only these two files, which takes a second. The others are `Any` in them.
    words = ["--strict", "--follow-imports=skip", "--cache-dir", tmp_path, program, package / "celery.py"]
    command = [sys.executable, "-m", "mypy", *words]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert "2 source files" in checked.stdout, checked.stdout + checked.stderr
    assert "program.py" not in checked.stdout, checked.stdout


def test_a_server_that_doesnt_answer_takes_little_of_the_tasks_time(app, monkeypatch):
    now_s, tried_at = 0.0, []

    def send(*_):
        nonlocal now_s
        tried_at.append(now_s)
        now_s += 15
        raise Unreachable("timed out")

    monkeypatch.setattr("redpoll_client.celery.time", SimpleNamespace(monotonic=lambda: now_s))
    publisher = Publisher(url="http://k:s@127.0.0.1:1/apps/1")
    monkeypatch.setattr(publisher, "send", send)

    @app.task(bind=True)
    def task(self):
        nonlocal now_s
        with progress(self, "private-a", publisher) as report:
            for step in range(320):
                report(step)
                now_s += 1

    task.delay().get()
    # Its beginning, one step, and its end with the last step.
    assert tried_at == [0, 315, 350, 365]
