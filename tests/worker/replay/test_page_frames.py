"""Which messages of a page a connection gets, as frames that are made once; on channels with a rate, joined."""

import json
from types import SimpleNamespace

from redpoll.cluster.envelopes import cached_envelope, event_tail
from redpoll.cluster.history import Page, Row
from redpoll.protocol.joining import Pace
from redpoll.worker.replay.page_frames import PageFrames
from worker.replay.replay_pages import Sink, page_of


def test_a_page_says_whether_something_is_missing_before_it():
    page_frames = PageFrames(page_of(10, 20, 30), b"c")
    assert [page_frames.unbroken(at) for at in (8, 9, 15, 20, 30, 31)] == [False, True, False, True, True, False]


def test_a_page_does_not_know_what_follows_it():
    page_frames = PageFrames(page_of(10, 20, more=True), b"c")
    assert page_frames.unbroken(10) is True
    assert page_frames.unbroken(20) is None


def test_frames_are_joined_and_made_once_for_all():
    page_frames = PageFrames(page_of(10, 20, 30), b"c")
    (plain,) = page_frames.frames(Sink(), 1, 3, False)
    assert page_frames.frames(Sink((3, 4)), 1, 3, False)[0] is plain
    assert plain.count(b'"channel":"c"') == 2
    (with_offsets,) = page_frames.frames(Sink(), 1, 3, True)
    assert b'"offset":20' in with_offsets
    assert b'"offset":30' in with_offsets


def test_an_excluded_socket_gets_the_other_messages():
    page = page_of(10, 20)
    excluding = page._replace(rows=[page.rows[0], Row(20, 10, event_tail("n", "20", skip="1.2"))])
    page_frames = PageFrames(excluding, b"c")
    assert len(page_frames.frames(Sink((1, 2)), 0, 2, False)) == 1
    assert b"".join(page_frames.frames(Sink((3, 4)), 0, 2, False)).count(b'"event":"n"') == 2


def test_client_events_and_server_events_are_distinguished():
    cached = cached_envelope(event_tail("client-n", "20"))
    said, published = PageFrames(page_of(10, 20, event="client-n"), b"c"), PageFrames(page_of(10, 20), b"c")
    assert published.has_server_event(1, 2, cached)
    assert not said.has_server_event(0, 1, cached)
    # A server published an event with such a name.
    assert said.has_server_event(0, 2, cached)


def test_messages_are_joined_once_for_all_with_the_parts_of_each():
    pacing = SimpleNamespace(pace=Pace(5, join=("t",), by=("id",), max_data_bytes=40))
    texts = [("a", "1"), ("b", "2"), ("a", "3"), ("a", "4" * 20), ("", "5")]
    data = [json.dumps({"id": of, "t": text}) if of else "{}" for of, text in texts]
    rows = [Row(at, at - 1, event_tail("e", one)) for at, one in enumerate(data, 1)]
    page_frames = PageFrames(Page("e", 5, rows, False), b"c")
    joined = page_frames.joined(pacing, False)
    assert [[part.offset for part in parts] for _, parts in joined] == [[2], [1, 3], [4], [5]]
    assert [one.parts for one, _ in joined] == [1, 2, 1, 1]
    assert page_frames.joined(pacing, False) is joined
    neighbours = page_frames.joined(pacing, True)
    assert [[part.offset for part in parts] for _, parts in neighbours] == [[1], [2], [3], [4], [5]]
