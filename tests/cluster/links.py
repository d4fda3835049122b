"""Links to Redis for tests, and what they are connected with. Not a test."""

from collections.abc import Callable
from typing import Any

import pytest

from redpoll.cluster.bus import ask_within
from redpoll.cluster.idempotency import Idempotency
from redpoll.cluster.membership.join import Stage
from redpoll.cluster.membership.registry import LocalChannel, Registry
from redpoll.cluster.quota import Quota
from redpoll.cluster.redis.cluster_link import ClusterLink
from redpoll.cluster.redis.link import Link
from redpoll.cluster.roll_call import RollCall
from redpoll.cluster.shared_rate import SharedRate


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has a minute to answer, on the slowest machine. A test of the limit passes its own, or sets it with
    `confirm_within`."""
    for kind in (Idempotency, Quota, SharedRate):
        monkeypatch.setitem(kind.__init__.__kwdefaults__, "confirm_s", 60.0)
    monkeypatch.setitem(RollCall.__init__.__kwdefaults__, "redis_answers_s", 60.0)
    for kind in (Link, ClusterLink):
        monkeypatch.setitem(kind.__init__.__kwdefaults__, "max_unanswered_looks", 60)
    confirm_within(monkeypatch, 60.0)


def confirm_within(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The limit of what reads and clears histories and cached events."""
    monkeypatch.setattr(ask_within, "__defaults__", (seconds,))


def quick_link(url: str) -> Link:
    """The link for any URL, which reconnects within 50 ms."""
    if url.startswith("redis+cluster:"):
        return ClusterLink(url, first_delay_s=0.01)
    return Link(url, first_delay_s=0.01, max_delay_s=0.05)


def transports(link: Link) -> list[Any]:
    """Those of the link's present connections: one, or one to each master of a Cluster."""
    links = link.links.values() if isinstance(link, ClusterLink) else (link,)
    return [part.connection.transport for part in links if part.connection is not None]


def note_holds(registry: Registry, note: Callable[[str], None]) -> None:
    """Calls `note(channel)` before each later call of `hold`, in its long or short form."""
    agenda = registry.sync.agenda
    move = agenda.move

    def note_and_move(local_channel: LocalChannel, stage: Stage) -> None:
        if stage is Stage.SENDING:
            note(local_channel.channel)
        move(local_channel, stage)

    agenda.move = note_and_move


def deafen(link: Link) -> None:
    """Stops reading from Redis, which still carries out commands."""
    for transport in transports(link):
        transport.pause_reading()


def hear(link: Link) -> None:
    """Ends `deafen`."""
    for transport in transports(link):
        transport.resume_reading()
