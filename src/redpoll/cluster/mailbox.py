"""Messages from one worker to another: a topic for each worker process, RUN.K.

Redis says with each message how many read it, so a sender learns at once that a worker is gone. Messages of one sender
arrive in order. While the link is down they are lost, and `on_lost` is called; the parts that use this give up then
what depended on them (worker/fallback/README.md).
"""

from collections.abc import Callable
from typing import Any, Final

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link

__all__ = ["Mailbox"]


def _ignore(payload: bytes) -> None:
    pass


def _nothing() -> None:
    pass


class Mailbox:
    """One per worker. Call `connected` on each new connection to Redis and `connection_lost` when it breaks.

    `topics` has who reads the messages of each topic. `start` says who reads this worker's."""

    def __init__(self, link: Link, keys: Keys, run: str, k: int) -> None:
        self.address: Final = f"{run}.{k}"
        self.topics: dict[bytes, Callable[[bytes], None]] = {}
        self._link = link
        self._keys = keys
        self._on_message: Callable[[bytes], None] = _ignore
        self._on_up: Callable[[], None] = _nothing
        self._on_lost: Callable[[], None] = _nothing

    def start(
        self, on_message: Callable[[bytes], None], on_up: Callable[[], None], on_lost: Callable[[], None]
    ) -> None:
        """`on_message` is called with each message, `on_up` when messages can be sent again, `on_lost` when some may
        be lost."""
        self._on_message, self._on_up, self._on_lost = on_message, on_up, on_lost

    @property
    def up(self) -> bool:
        return self._link.up

    def connected(self) -> None:
        run, _, k = self.address.rpartition(".")
        topic = self._keys.mailbox(run, int(k))
        self.topics[topic] = self._received
        self._link.subscribe([topic])
        self._on_up()

    def connection_lost(self) -> None:
        self._on_lost()

    def _received(self, payload: bytes) -> None:
        self._on_message(payload)

    def send(self, address: str, message: bytes, done: Callable[[bool], None]) -> None:
        """Send to the worker process RUN.K. `done(arrived)` is called later; False: nobody reads there, or it isn't
        known."""
        run, _, k = address.rpartition(".")

        def answered(reply: Any) -> None:
            done(not isinstance(reply, Exception) and int(reply) > 0)

        self._link.call(self._keys.publish, self._keys.mailbox(run, int(k)), message, done=answered)

    def are_there(self, address: str, done: Callable[[bool], None]) -> None:
        """Whether the worker process RUN.K reads its messages; True also if Redis doesn't say."""
        run, _, k = address.rpartition(".")

        def answered(reply: Any) -> None:
            done(isinstance(reply, Exception) or int(reply[1]) > 0)

        self._link.call(
            b"PUBSUB",
            b"SHARDNUMSUB" if self._link.sharded else b"NUMSUB",
            self._keys.mailbox(run, int(k)),
            done=answered,
        )
