"""Events that wait become fewer, and nothing that was published is missing from them."""

import json
import random

import pytest

from redpoll.protocol.apps import App, HistoryRule, history_fault
from redpoll.protocol.joining import Joiner, LastJoined, Pace, Pacer, Part, path_of

TEXT = Pace(20, join=("delta",), by=("message_id",))
NEWEST = Pace(20)


def delta(text: str, message: str = "m", event: str = "text", pace: Pace = TEXT, **more) -> Part:
    data = json.dumps({"type": "text_delta", "message_id": message, "delta": text})
    return Part(pace, event.encode(), data.encode(), **more)


def texts(joined, pace: Pace = TEXT) -> list[str]:
    return [json.loads(one.data(pace))["delta"] for one in joined]


def joined_of(parts, pace: Pace = TEXT, neighbours: bool = False):
    joiner = Joiner(pace, neighbours)
    for part in parts:
        joiner.add(part)
    return joiner.take()


def test_texts_of_one_message_are_joined_and_the_rest_is_the_last_ones():
    first = Part(TEXT, b"text", b'{"message_id":"m","delta":"Hel","usage":1}')
    last = Part(TEXT, b"text", b'{"message_id":"m","delta":"lo","usage":2.0,"end":null}')
    (joined,) = joined_of([first, last])
    assert joined.data(TEXT) == b'{"message_id":"m","delta":"Hello","usage":2.0,"end":null}'
    assert joined.parts == 2


def test_a_part_alone_keeps_its_bytes():
    data = b' { "delta" : "a\\u00e9\\/" , "message_id":"m" } '
    (joined,) = joined_of([Part(TEXT, b"text", data)])
    assert joined.data(TEXT) == data


def test_escapes_stay_as_they_are_within_a_joined_text():
    parts = [
        Part(TEXT, b"t", b'{"message_id":1,"delta":"%b"}' % text) for text in (b"\\u00e9\\n", b"\\\\", b"n\xc3\xa9")
    ]
    (joined,) = joined_of(parts)
    assert joined.data(TEXT) == b'{"message_id":1,"delta":"\\u00e9\\n\\\\n\xc3\xa9"}'
    assert json.loads(joined.data(TEXT))["delta"] == "é\n\\né"


def test_two_messages_are_not_mixed():
    taken = joined_of([delta("a1"), delta("b1", "n"), delta("a2"), delta("b2", "n"), delta("x", event="other")])
    assert texts(taken) == ["a1a2", "b1b2", "x"]


def test_only_neighbours_are_joined_for_clients_that_recover():
    parts = [delta(text, text[0], offset=at + 1, prev=at) for at, text in enumerate(("a1", "a2", "b1", "a3"))]
    taken = joined_of(parts, neighbours=True)
    assert texts(taken) == ["a1a2", "b1", "a3"]
    assert [(one.prev, one.offset) for one in taken] == [(0, 2), (2, 3), (3, 4)]


def test_what_cannot_be_joined_passes_after_all_that_came_before_it():
    data = [
        b"plain",
        b'{"message_id":"m"}',
        b'{"message_id":"m","delta":7}',
        b'{"delta":"no message"}',
        b'["delta"]',
        b'{"delta":"\\ud83d","message_id":"m"}',
        b"[" * 5000,
        b"",
    ]
    passing = [Part(TEXT, b"text", one) for one in data]
    assert [part.key for part in passing] == [None] * len(data)
    for part in passing:
        taken = joined_of([delta("a"), delta("b"), part, delta("c")])
        assert [one.data(TEXT) for one in taken][1] == part.data
        assert texts([taken[0], taken[2]]) == ["ab", "c"]


def test_senders_and_skipped_sockets_stay_apart():
    taken = joined_of(
        [delta("a", user=b"1"), delta("b", user=b"2"), delta("c", skip=(1, 2)), delta("d", skip=(1, 3)), delta("e")]
    )
    assert texts(taken) == ["a", "b", "c", "d", "e"]
    newest = [Part(NEWEST, b"cursor", b"%d" % at, user=b"%d" % (at % 2)) for at in range(6)]
    assert [one.last.data for one in joined_of(newest, NEWEST)] == [b"4", b"5"]


def test_ciphertext_is_never_joined():
    rule = HistoryRule(id="0a0b0c", name="private-", prefix=True, max_rate=5, join="ciphertext")
    app = App(id="1", name="", keys=(), history=(rule,))
    pace = app.pace("private-encrypted-a")
    assert pace is not None
    assert app.pace("news") is None
    data = b'{"nonce":"bg==","ciphertext":"YQ=="}'
    assert Part(pace, b"e", data).key is None
    assert Part(app.pace("private-a"), b"e", data).key is not None


def test_a_number_in_a_path_is_a_place_in_a_list():
    pace = Pace(1, join=path_of("choices.0.delta.content"), by=("id",))
    chunk = '{"id":"c","choices":[{"index":0,"delta":{"content":"%s"}},1.50]}'
    (joined,) = joined_of([Part(pace, b"chunk", (chunk % text).encode()) for text in ("a", "b")], pace)
    assert joined.data(pace) == (chunk % "ab").encode()
    assert Part(pace, b"chunk", b'{"id":"c","choices":[]}').key is None


def test_a_joined_event_has_no_more_bytes_than_an_event_may():
    pace = Pace(20, join=("delta",), by=("message_id",), max_data_bytes=200)
    parts = [delta("é" * 5 + str(at), pace=pace) for at in range(100)]
    taken = joined_of(parts, pace)
    assert max(len(one.data(pace)) for one in taken) <= 200
    assert "".join(texts(taken, pace)) == "".join("é" * 5 + str(at) for at in range(100))
    # A part that is larger by itself stays one event.
    assert len(joined_of([delta("x" * 500, pace=pace), delta("y", pace=pace)], pace)) == 2


def test_the_newest_of_each_name_is_sent_in_the_order_of_publishing():
    parts = [Part(NEWEST, name, b"%d" % at) for at, name in enumerate((b"a", b"b", b"a", b"c", b"b"))]
    assert [one.last.data for one in joined_of(parts, NEWEST)] == [b"2", b"3", b"4"]


def test_traces_name_what_was_joined_and_what_was_replaced():
    (joined,) = joined_of([delta("a", trace=b"1"), delta("b"), delta("c", trace=b"3")])
    assert joined.traces == [b"1", b"3"]
    (newest,) = joined_of([Part(NEWEST, b"a", b"", trace=b"%d" % at) for at in range(3)], NEWEST)
    assert (newest.traces, newest.replaced) == ([b"2"], [b"0", b"1"])


def test_the_first_event_is_sent_at_once_and_the_last_is_never_lost():
    pacer = Pacer(Pace(10))
    assert len(pacer.add(Part(NEWEST, b"a", b"0"), 100.0)) == 1
    assert pacer.due is None
    for at in range(1, 5):
        assert pacer.add(Part(NEWEST, b"a", b"%d" % at), 100.0 + at / 100) == []
    assert pacer.due == pytest.approx(100.1)
    assert [one.last.data for one in pacer.take(100.1)] == [b"4"]
    assert pacer.due is None
    assert pacer.free_at == pytest.approx(100.2)


def test_several_names_share_the_rate():
    pacer = Pacer(Pace(10))
    pacer.add(Part(NEWEST, b"a", b""), 0.0)
    pacer.add(Part(NEWEST, b"a", b""), 0.01)
    pacer.add(Part(NEWEST, b"b", b""), 0.02)
    assert len(pacer.take(0.1)) == 2
    assert pacer.free_at == pytest.approx(0.3)


def test_what_passes_is_not_delayed_and_takes_along_what_waits():
    pacer = Pacer(TEXT)
    assert texts(pacer.add(delta("a"), 0.0)) == ["a"]
    assert pacer.add(delta("b"), 0.001) == []
    taken = pacer.add(Part(TEXT, b"end", b"{}"), 0.002)
    assert [one.last.event for one in taken] == [b"text", b"end"]


def test_what_waits_is_bounded():
    pacer = Pacer(Pace(1))
    pacer.add(Part(NEWEST, b"first", b""), 0.0)
    sent = waiting = 0
    for at in range(200):
        taken = pacer.add(Part(NEWEST, b"%d" % at, b"x" * 10_000), 0.001)
        waiting = 0 if taken else waiting + 1
        assert waiting <= 27
        sent += len(taken)
    assert sent + len(pacer.take(1.0)) == 200


def test_events_without_data_count_too():
    pacer = Pacer(Pace(1))
    pacer.add(Part(NEWEST, b"first", b""), 0.0)
    assert any(pacer.add(Part(NEWEST, b"%d" % at, b""), 0.001) for at in range(2_000))
    joiner = Joiner(NEWEST)
    for at in range(10):
        joiner.add(Part(NEWEST, b"%d" % (at % 3), b"x" * at))
    assert joiner.size == sum(joined.weight for joined in joiner._waiting)
    joiner.take_finished()
    assert joiner.size == sum(joined.weight for joined in joiner._waiting)


def test_joining_what_was_joined_gives_the_same_text():
    choice = random.Random(7)
    parts = [delta(str(at) + " ", choice.choice("mn"), offset=at + 1, prev=at) for at in range(300)]
    again = Joiner(TEXT)
    while parts:
        size = choice.randint(1, 20)
        for one in joined_of(parts[:size]):
            again.add_joined(one)
        del parts[:size]
    taken = again.take()
    assert sum(one.parts for one in taken) == 300
    assert sorted(" ".join(texts(taken)).split(), key=int) == [str(at) for at in range(300)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("pace", [TEXT, NEWEST], ids=["join", "latest"])
def test_the_last_events_of_a_history_are_those_of_the_whole(pace: Pace, neighbours: bool, seed: int):
    """What is read from where LastJoined says is the end of what would be sent of the whole history."""
    choice = random.Random(seed)
    parts = []
    for at in range(choice.randint(1, 60)):
        if choice.random() < 0.1:
            parts.append(Part(pace, b"mark", b"{}", offset=at + 1, prev=at))
        else:
            parts.append(delta(str(at), choice.choice("mno"), pace=pace, offset=at + 1, prev=at))
    whole = joined_of(parts, pace, neighbours)
    for count in (1, 2, 3, 5, 100):
        last = LastJoined(pace, count, neighbours)
        last.add(reversed(parts))
        rest = [
            part
            for part in parts
            if part.offset > last.since and (part.offset > last.mixed_until or part.key in last.keys)
        ]
        taken = joined_of(rest, pace, neighbours)
        assert [one.data(pace) for one in taken] == [one.data(pace) for one in whole[-count:]]


@pytest.mark.parametrize(
    "text", ["", ".", "a.", ".a", "a..b", "a b", 'a"b', "a\n", "a" * 101, "a.b.c.d.e.f.g.h.i", "a\\b"]
)
def test_what_is_no_path(text: str):
    with pytest.raises(ValueError, match="is no path"):
        path_of(text)


def test_contradictions_of_rules():
    def fault(**fields) -> str:
        return history_fault(HistoryRule(id="0a0b0c", name="a-", prefix=True, **fields)) or ""

    assert fault(max_rate=5, latest=True) == ""
    assert fault(keep=10, seconds=60, replay=10, max_rate=1000, join="a.0.b", by="id") == ""
    assert "either latest or join, not both" in fault(max_rate=5, latest=True, join="delta")
    assert "either latest or join" in fault(max_rate=5)
    assert "give max_rate" in fault(latest=True)
    assert "give max_rate" in fault(join="delta")
    assert "between 1 and 1000" in fault(max_rate=0, latest=True)
    assert "between 1 and 1000" in fault(max_rate=1001, latest=True)
    assert "'a..b' is no path" in fault(max_rate=5, join="a..b")
    assert "'.' is no path" in fault(max_rate=5, join="a", by=".")
    assert "two paths" in fault(max_rate=5, join="a", by="a")
    assert "by belongs to join" in fault(max_rate=5, latest=True, by="a")
    assert "nothing is stored" in fault(max_rate=5, latest=True, replay=5)
