"""The parts between an accepted event and Redis, which are opened and closed together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redpoll.cluster.bus import Bus
from redpoll.cluster.quota import Quota
from redpoll.control.publish.daily_limit import DailyLimit
from redpoll.control.publish.publish_gate import PublishGate
from redpoll.control.publish.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable

    from redpoll.cluster.nodes import NodesView
    from redpoll.cluster.redis.keys import Keys
    from redpoll.cluster.redis.link import Link
    from redpoll.control.records.records import Records

__all__ = ["Publishing"]


class Publishing:
    """`leads()`: this node leads, and the record store knows it. Call `link_up` and `link_down` as they happen, and
    `received` with each message of Redis."""

    def __init__(self, link: Link, keys: Keys, view: NodesView, records: Records, leads: Callable[[], bool]) -> None:
        self.bus = Bus(link, keys)
        self._gate = PublishGate(link, keys, view)
        self.publisher = Publisher(self.bus, self._gate.wait, lambda: link.kept_shards)
        self.daily = DailyLimit(Quota(link, keys), records, lambda: link.kept_shards, leads=leads)

    def start(self) -> None:
        self.daily.start()

    def link_up(self) -> None:
        self.publisher.link_up()
        self.daily.link_up()

    def link_down(self) -> None:
        self.publisher.link_down()
        self.daily.link_down()

    def received(self, topic: bytes, payload: bytes) -> None:
        self._gate.received(topic, payload)

    async def finish(self) -> None:
        self.publisher.close()
        await self.daily.finish()
