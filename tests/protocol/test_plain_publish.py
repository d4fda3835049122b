"""What a request publishes is the same in plain Python and in the compiled `_publish`: random calls get both."""

import importlib.util
import random
import sys

import pytest

from redpoll import _publish
from redpoll.protocol import messages, plain_publish
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.errors import ApiError

HISTORY = (
    HistoryRule(id="abcdef", name="stored-", prefix=True, keep=5, seconds=60, era="1"),
    HistoryRule(id="abcde0", name="news", keep=5, seconds=60, era="1"),
)
APPS = [
    App(id="7", name="seven", keys=(), history=HISTORY, max_channels=3, max_event_name_chars=5, max_data_bytes=10),
    App(id="8", name="eight", keys=(), cache_ttl_s=0),
]
CHANNELS = [
    *("a", "b", "news", "newsletter", "stored-x", "stored", "cache-a", "private-cache-b", "private-encrypted-c"),
    *("#server-to-user-1", "#server-to-user-", "private-redpoll.x", "", "b c", "caf\u00e9", "#a", "x" * 164, "x" * 165),
]
NAMES = [None, "", "e", "fuenf", "sechs6", "\u00e9\u00e9\u00e9\u00e9\u00e9", "\U0001f600" * 6, "svc:a", "pusher:x"]
DATA = [None, "", "d", "x" * 10, "x" * 11, "\u00e9" * 5, "\u00e9" * 6]
SOCKET_IDS = [None, "1.2", "01.2", "9" * 19 + ".1", "", "1", "1.", ".1", "1.2.3", "1.2\n", "\u0661.2", "0.0"]


@pytest.fixture(scope="module")
def plain():
    """A copy of `messages` as it is where the engine isn't built."""
    found = importlib.util.find_spec(messages.__name__)
    copy = importlib.util.module_from_spec(found)
    compiled, sys.modules["redpoll._publish"] = _publish, None
    try:
        found.loader.exec_module(copy)
    finally:
        sys.modules["redpoll._publish"] = compiled
    assert copy.Call is plain_publish.Call
    return copy


def said(module, app, events):
    """What a call of these events says after each step."""
    call = module.Call(module.limits_of(app), len(events) > 1)
    found = []
    for event in events:
        call.add(*event)
        refusals = [int(call.refusal_of_channels()), int(call.refusal_of_event())]
        found.append([refusals, call.refused_channel if refusals[0] > 1 else None])
        if any(refusals):
            return found
    return [*found, call.events_of(), call.count, call.needs(), call.is_plain, call.describe(), call.app]


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_get_the_same_from_both(plain, seed):
    chance = random.Random(seed)
    for _ in range(2_000):
        app = chance.choice(APPS)
        events = [
            (
                chance.choices(CHANNELS[: chance.choice((7, 99))], k=chance.choice((1, 1, 2, 4))),
                *(chance.choice(values[1 : chance.choice((3, 99))]) for values in (NAMES, DATA)),
                chance.choice(SOCKET_IDS),
            )
            for _ in range(chance.choice((1, 1, 3)))
        ]
        if chance.random() < 0.1:
            events[-1] = (events[-1][0], chance.choice(NAMES), chance.choice(DATA), None)
        assert said(plain, app, events) == said(messages, app, events), events


def test_both_have_the_same_refusals():
    refusals = {name: int(value) for name, value in _publish.Refusal.__members__.items()}
    assert {name: int(value) for name, value in plain_publish.Refusal.__members__.items()} == refusals
    assert (plain_publish.CACHED, plain_publish.RULED) == (_publish.CACHED, _publish.RULED)


def test_lone_surrogates_are_no_text(plain):
    call = plain.Call(plain.limits_of(APPS[0]))
    with pytest.raises(UnicodeEncodeError):
        call.add(["a"], "e", "\ud800", None)


def test_a_body_is_read_and_refused_with_the_same_words(plain):
    for body in (
        b'{"name":"e","data":"d","channels":["a","b","a"],"socket_id":"01.2"}',
        b'{"name":"e","data":"12345678901","channels":["a"]}',
        b'{"name":"sechs6","data":"d","channels":["a"]}',
        b'{"name":"e","data":"d","channels":["a","private-encrypted-b"]}',
        b'{"name":"e","data":"d","channels":["b c"]}',
    ):
        found = []
        for module in (plain, messages):
            try:
                found.append(module.decode_event(body, {}, APPS[0]).events_of())
            except ApiError as refused:
                found.append((refused.code, refused.message))
        assert found[0] == found[1]
