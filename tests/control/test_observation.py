"""What is kept of calls, by the settings."""

from types import SimpleNamespace

from redpoll.cluster.nodes import NodesView
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import NodeSurvey
from redpoll.config.settings import Settings
from redpoll.control.observation import Observation
from redpoll.store.eventlog import EventLog


def answered(survey):
    return {kind.__name__ for kind in survey.answerers._table}


async def test_without_an_event_log_there_is_no_tracer_and_other_nodes_are_answered_about_usage_only(tmp_path):
    link, keys = Link("unix:///nowhere/redis.sock"), Keys()
    start = SimpleNamespace(settings=Settings(), run="0123456789ab")
    survey = NodeSurvey(link, keys, NodesView(start.run))
    without = Observation(start, link, keys, survey, None, None)
    assert (without.tracer, without.cluster_log, without.otlp, without.spans) == (None, None, None, None)
    assert answered(survey) == {"FindUsage"}
    event_log = await EventLog.open(tmp_path / "events.sqlite", 100, 3_600)
    kept = Observation(start, link, keys, survey, event_log, None)
    assert kept.tracer is not None
    assert kept.cluster_log is not None
    assert answered(survey) == {"FindUsage", "FindCalls", "FindTrace"}
    await event_log.close()
