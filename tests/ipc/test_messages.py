"""The messages of the child pipe: each kind's line, and what its receiver refuses."""

import msgspec
import pytest
from structlog.testing import capture_logs

from redpoll.cluster.membership.connection_state import Reach
from redpoll.cluster.nodes import Fitness, KnownNode
from redpoll.ipc.messages import (
    FROM_CHILD,
    TO_CONTROL,
    TO_WORKER,
    BeginStop,
    Evacuate,
    FitnessReport,
    Inbox,
    Lead,
    Message,
    NodesChanged,
    Ping,
    ReachChanged,
    Reload,
    SettingsChanged,
    ShardKey,
    Stop,
    encode,
)

NODE = KnownNode(
    run="0" * 12,
    alive=False,
    name="one",
    version="1",
    store="s",
    started=1.5,
    workers=[1, 2],
    greatest=2,
    control=True,
    beat=7,
    without_clients=[2],
    fitness=Fitness.WITHOUT_STORE,
)


@pytest.mark.parametrize(
    ("inbox", "message"),
    [
        (TO_WORKER, Evacuate(30.0, None)),
        (TO_WORKER, ShardKey("aa")),
        (TO_WORKER, SettingsChanged({"log_level": "debug", "trusted_proxies": ["::1"]})),
        (TO_CONTROL, NodesChanged([NODE], None)),
        (TO_CONTROL, Lead(None)),
        (TO_CONTROL, Stop()),
        (FROM_CHILD, ReachChanged(Reach.CONNECTING)),
        (FROM_CHILD, FitnessReport(Fitness.UNFIT)),
        (FROM_CHILD, Ping()),
    ],
)
def test_message_arrives_as_it_was_sent(inbox: Inbox, message: Message):
    line = encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert inbox.decode(line) == message


def test_type_of_a_message_is_the_name_of_its_struct():
    assert msgspec.json.decode(encode(BeginStop())) == {"type": "BeginStop"}


@pytest.mark.parametrize(
    ("inbox", "line", "reason"),
    [
        (FROM_CHILD, b"not JSON", "malformed"),
        (FROM_CHILD, b'{"type":"Sing"}', "Invalid value 'Sing'"),
        (FROM_CHILD, b'{"type":"ReachChanged","reach":"far"}', "Invalid enum value 'far'"),
        (TO_WORKER, b'{"type":"ShardKey"}', "missing required field `key`"),
        (TO_WORKER, b'{"type":"Stop","max_per_s":"all"}', "Expected `float | null`"),
        (TO_WORKER, b'{"type":"Stop","within_s":1}', "unknown field `within_s`"),
        # Messages for others.
        (TO_WORKER, encode(Lead(1)), "Invalid value 'Lead'"),
        (TO_CONTROL, encode(Reload()), "Invalid value 'Reload'"),
    ],
)
def test_malformed_and_unknown_messages_are_refused_with_the_reason(inbox: Inbox, line: bytes, reason: str):
    with capture_logs() as logs:
        assert inbox.decode(line) is None
    (entry,) = logs
    assert entry["event"] == "message on the child pipe refused"
    assert reason in entry["reason"]
