"""What a replay reads is joined across pages, and sent as soon as nothing can be joined to it."""

import json
from types import SimpleNamespace

from redpoll.protocol.joining import Pace, Part
from redpoll.worker.replay.gathering import Gathering, Located

PACE = Pace(5, join=("delta",), by=("id",), max_data_bytes=60)
CONNECTION = SimpleNamespace(sid_hi=1, sid_lo=2)


def part(text: str, offset: int, of: str = "m", event: bytes = b"text", **more) -> Part:
    return Part(PACE, event, json.dumps({"id": of, "delta": text}).encode(), offset=offset, prev=offset - 1, **more)


def texts(frames: list[bytes]) -> list[tuple[str, int | None]]:
    # Each begins with a head of two bytes, or of four.
    shown = [json.loads(frame[frame.index(b"{") :]) for frame in frames]
    return [(json.loads(one["data"]).get("delta", one["event"]), one.get("offset")) for one in shown]


def test_a_full_event_is_sent_and_the_rest_waits_for_the_next_page():
    gathering = Gathering(PACE, b"chat", CONNECTION, True)
    for at in range(1, 10):
        gathering.add(part("0123456789", at))
    assert texts(gathering.finished()) == [("0123456789" * 3, 3), ("0123456789" * 3, 6)]
    assert gathering.finished() == []
    gathering.add(Part(PACE, b"end", b"{}", offset=10, prev=9))
    assert texts(gathering.finished()) == [("0123456789" * 3, 9), ("end", 10)]
    assert gathering.take() == []


def test_what_was_published_with_its_socket_id_is_left_out():
    gathering = Gathering(PACE, b"chat", CONNECTION, False)
    gathering.add(part("mine", 1, skip=(1, 2)))
    gathering.add(part("others", 2, skip=(1, 3)))
    assert texts(gathering.take()) == [("others", None)]


def test_parts_of_events_that_were_not_asked_for_are_left_out():
    gathering = Gathering(PACE, b"chat", CONNECTION, False)
    gathering.located = Located(0, frozenset({part("", 1).key}), 3)
    for offset, of in enumerate("mnnmn", 1):
        gathering.add(part(str(offset), offset, of))
    assert texts(gathering.take()) == [("14", None), ("5", None)]
