"""Pages of a history, and what gets them in place of a connection."""

from redpoll.cluster.envelopes import event_tail
from redpoll.cluster.history import Page, Row


class Sink:
    """What a replay needs of a connection."""

    def __init__(self, sid: tuple[int, int] = (1, 2)) -> None:
        self.sid_hi, self.sid_lo = sid
        self.sent: list[bytes] = []

    def send(self, frame: bytes) -> bool:
        self.sent.append(frame)
        return True


def page_of(*offsets: int, more: bool = False, skip: str | None = None, event: str = "n") -> Page:
    """Messages of epoch `e` whose data is their offset; the first one follows offset 9."""
    rows = [
        Row(offset, prev, event_tail(event, str(offset), skip=skip))
        for offset, prev in zip(offsets, (9, *offsets), strict=False)
    ]
    return Page("e", offsets[-1] if offsets else 9, rows, more)
