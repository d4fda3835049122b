"""What tests of replays share: frames as clients read them, and a history whose pages wait."""

import json
from typing import Any

SUCCEEDED = "pusher_internal:subscription_succeeded"
RECOVER = "&recover=1"


def data_of(frame: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(frame["data"])
    return data


def position_of(frame: dict[str, Any]) -> dict[str, Any]:
    """`since` of a later subscribe, from a success frame or a pusher:position."""
    data = data_of(frame)
    return {"epoch": data["epoch"], "offset": data["offset"]}


class Withheld:
    """A worker's history that holds its pages back until the test releases them."""

    def __init__(self, worker: Any) -> None:
        self._pages = worker.hub.replayer.pages
        self.history = self._pages.history
        self.waiting: list[tuple[Any, ...]] = []
        self._pages.history = self

    def page(self, *args: Any) -> None:
        self.waiting.append(args)

    def let_one(self) -> None:
        self.history.page(*self.waiting.pop(0))

    def locate(self, *args: Any, **kwargs: Any) -> None:
        self.history.locate(*args, **kwargs)

    def go_on(self) -> None:
        self._pages.history = self.history
        for args in self.waiting:
            self.history.page(*args)


async def continuing(bench: Any, worker: Any, channel: str, count: int) -> tuple[Any, dict[str, Any], Withheld]:
    """A client that joins again where `count` messages are to be replayed, its position, and the pages that it waits
    for."""
    first = await bench.client(worker, query=RECOVER)
    since = position_of(await first.subscribe(channel))
    await bench.publish_numbers(channel, range(count))
    await first.events(count)
    withheld = Withheld(worker)
    client = await bench.client(worker, query=RECOVER)
    await client.ask(channel, since=since)
    await bench.settled(worker, lambda: withheld.waiting)
    return client, since, withheld
