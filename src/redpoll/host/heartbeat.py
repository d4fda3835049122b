"""The heartbeat of this node: once a second the supervisor writes to Redis that the node lives and what it runs.

The reply names all nodes and the leader. So this module also finds out which nodes are dead, whether this one leads,
and whether a node with another record store uses the same keys. The supervisor sends it, because it has no load that
could stall it, and it knows at once which of its processes live (cluster/README.md "Nodes and the leader").
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Protocol

import hiredis
import structlog
from msgspec import structs

from redpoll.cluster.nodes import UNDRAINED, Node, Nodes, entries_of, lead_call
from redpoll.cluster.redis.cluster_link import open_link
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.redis.scripts import LEAD, REFUSED, WRITE
from redpoll.ipc.messages import NodesChanged

__all__ = ["Heartbeat", "Listener"]

log = structlog.get_logger()

_EVERY_S: Final = 1.0
# A heartbeat without an answer for this long closes the connection, and a new one is made.
_ANSWER_WITHIN_S: Final = 5.0
_LEAVE_WITHIN_S: Final = 2.0
# A leader gives the lead up when another node has been fitter for this many heartbeats. If the record store fails for
# all nodes, all notice it within less.
_OUTDONE_BEATS: Final = 0.9
# In a Cluster, a node that lacks a master counts as cut off after as many heartbeats over which another one lacks none.
# The two may notice the same failure 12 s apart (cluster_link.py), and say so 3 s later.
_MAX_LACKING: Final = 20
# After a break, publishes on all nodes wait for a sign of life of each node (control/publish/publish_gate.py). So the
# supervisor connects soon, and its first heartbeats come four times as often.
_MAX_DELAY_S: Final = 0.2
_QUICK_BEATS: Final = 4


class Listener(Protocol):
    """What the supervisor does with the replies."""

    def joined(self) -> None:
        """Called once: the node may use these keys."""

    def refused(self, sentence: str) -> None:
        """The node may not use these keys. Called at every heartbeat until it may."""

    def nodes_changed(self, message: NodesChanged) -> None:
        """Called when a node came, died, or says something else about itself, and when another one leads."""

    def term_changed(self, term: int | None) -> None:
        """This node leads with this term, or doesn't lead (None)."""

    def drain_changed(self, within_s: float | None) -> None:
        """An operator drains this node: its connections are closed within this time. None: it serves again."""


class Heartbeat:
    """`describe(store, beat)` returns what the node says about itself now. Call `start`, and `know_store` as soon as
    the control process knows its record store; nothing is written before. Create it inside the running loop.

    `link` is its connection to Redis. `alone` is as in `Nodes`: this node has started the Redis for itself."""

    def __init__(
        self,
        redis_url: str,
        prefix: str,
        run: str,
        describe: Callable[[str, int], Node],
        listener: Listener,
        *,
        every_s: float = _EVERY_S,
        alone: bool = False,
    ) -> None:
        self.term: int | None = None
        self.drain_within_s: float | None = None
        self._run = run
        self._describe = describe
        self._listener = listener
        self._every_s = every_s
        self.link = open_link(redis_url, max_delay_s=_MAX_DELAY_S)
        self._keys = Keys(prefix, sharded=self.link.sharded)
        self._nodes = Nodes(run, every_s, alone=alone)
        self._answered_at = float("-inf")
        self._store: str | None = None
        self._stored_term = 0
        self._beat = 0
        self._joined = False
        # What `nodes_changed` said last.
        self.message: NodesChanged | None = None
        self._namesakes: set[str] = set()
        self._wake = asyncio.Event()
        # Something changed since the last heartbeat that the other nodes should learn at once.
        self._has_news = False
        # Over how many heartbeats this node has lacked a master of a Cluster, and another one hasn't; when the last of
        # them was counted.
        self._lacking = 0
        self._lacking_at = float("-inf")
        # Since when another node is fitter than this one, which leads.
        self._outdone_at: float | None = None
        # How many of the next heartbeats come soon.
        self._quick = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def answered_s_ago(self) -> float:
        """How long ago Redis last answered a heartbeat; infinite while there is no connection. In a Cluster also while
        a master can't be reached, unless other nodes reach it."""
        counts = self.link.up or (self._lacking >= _MAX_LACKING and self.link.is_usable(0))
        return self.link.clock() - self._answered_at if counts else float("inf")

    @property
    def connects(self) -> int:
        """How many connections to Redis were made."""
        return self.link.connects

    def start(self) -> None:
        """Starts to connect to Redis."""
        self.link.start(on_up=self._connected, on_push=self._news_received)
        self._task = asyncio.get_running_loop().create_task(self._run_forever(), name="heartbeat")

    def know_store(self, store: str, term: int) -> None:
        """The id of the node's record store, and the greatest term that this store has seen."""
        self._store = store
        self._stored_term = term
        self._wake.set()

    def beat_now(self) -> None:
        """Sends a heartbeat at once, because the node now says something else about itself. The others read it at
        once: the leader removes the members of a worker that died."""
        self._has_news = True
        self._wake.set()

    def _connected(self) -> None:
        self._lacking = 0
        self.link.subscribe([self._keys.news])
        self._quick = _QUICK_BEATS
        self._wake.set()

    def _news_received(self, topic: bytes, run: bytes) -> None:
        if run != self._run.encode():
            self._wake.set()

    async def leave(self) -> None:
        """Removes the node from Redis, so that another one may lead at once. Waits at most 2 s."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._joined:
            call = lead_call(self._keys, self._run, None, may_lead=False, replaces="", seen_term=0, dead=())
            with contextlib.suppress(LinkDown, hiredis.ReplyError, TimeoutError):
                async with asyncio.timeout(_LEAVE_WITHIN_S):
                    await self.link.execute(LEAD, *call)
        await self.link.close()

    async def _run_forever(self) -> None:
        while True:
            if not self.link.is_usable(0):
                await self.link.wait_up()
            if self._store is not None:
                try:
                    async with asyncio.timeout(_ANSWER_WITHIN_S):
                        await self._send()
                except TimeoutError:
                    self.link.drop_connection(0, f"a heartbeat was unanswered for {_ANSWER_WITHIN_S:g} s")
                except LinkDown:
                    # The link logs it and reconnects.
                    pass
                except hiredis.ReplyError as error:
                    log.warning("heartbeat not written", reason=str(error))
            pause_s = self._every_s / 4 if self._quick else self._every_s
            self._quick = max(0, self._quick - 1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()

    async def _send(self) -> None:
        assert self._store is not None
        nodes = self._nodes
        self._beat += 1
        has_news, self._has_news = self._has_news, False
        node = structs.replace(self._describe(self._store, self._beat), reaches_all=self.link.up)
        replaces = nodes.replaceable(node.name, node.started)
        gives_up = self._gives_up(node)
        call = lead_call(
            self._keys,
            self._run,
            node,
            may_lead=node.serves,
            replaces=replaces,
            seen_term=max(self._stored_term, nodes.greatest_term),
            dead=nodes.dead,
            gives_up=gives_up,
        )
        status, leader, flat, drained, known = await self.link.execute(LEAD, *call)
        self._answered_at = self.link.clock()
        nodes.read(leader, entries_of(flat), self._answered_at, lost=self._joined and not known)
        self._count_lacking()
        if status == REFUSED:
            self._refuse(self._store)
            return
        if has_news or gives_up:
            self.link.call(self._keys.publish, self._keys.news, self._run)
        if not self._joined:
            self._joined = True
            self._listener.joined()
        self._report(node.name)
        self._take_drain(drained)
        if node.serves and not replaces and nodes.replaceable(node.name, node.started):
            # The leader is dead, or an earlier run of this node. It can be replaced at once.
            self._wake.set()

    def _count_lacking(self) -> None:
        if self.link.up or not self._nodes.others_reach_all():
            self._lacking = 0
        elif self._answered_at - self._lacking_at > 0.8 * self._every_s:
            # Heartbeats that are sent at once don't count.
            self._lacking += 1
            self._lacking_at = self._answered_at

    def _gives_up(self, node: Node) -> bool:
        """Whether this node leads, and another one has been fitter for a while."""
        fitter = self._nodes.fitter(node.fitness) if self.term is not None else []
        if not fitter:
            self._outdone_at = None
            return False
        now = self.link.clock()
        if self._outdone_at is None:
            self._outdone_at = now
        if now - self._outdone_at < _OUTDONE_BEATS * self._every_s:
            return False
        log.warning("lead given up, another node can do more", fitness=node.fitness.name, fitter=fitter)
        return True

    def _refuse(self, store: str) -> None:
        self._lead(None)
        for run, node in self._nodes.others(store):
            # Until its entry changes, it may be a node that was killed.
            if run in self._nodes.changed:
                since = datetime.fromtimestamp(node.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                self._listener.refused(
                    f"the server {node.name}, up since {since}, has another record store and uses the same Redis and "
                    f"redis_prefix: give both servers the same database_url, or this one another redis_prefix"
                )
                return

    def _report(self, name: str) -> None:
        nodes = self._nodes
        leader = nodes.leader
        message = NodesChanged(nodes.known(), leader.run if leader.run in nodes.by_run else None)
        if message != self.message:
            self.message = message
            self._listener.nodes_changed(message)
        self._lead(leader.term if leader.run == self._run else None)
        namesakes = set(nodes.namesakes(name))
        if namesakes - self._namesakes:
            log.error("another server has the same node_name", node_name=name, runs=sorted(namesakes))
        self._namesakes = namesakes

    def _take_drain(self, entry: bytes) -> None:
        """Takes the node's entry in `drained`; empty if it was never drained, or if Redis has lost it."""
        if not entry:
            if self.drain_within_s is not None:
                self.link.run(WRITE, (self._keys.drained,), (b"HSET", self._run, f"{self.drain_within_s:g}"))
            return
        within_s = None if entry == UNDRAINED else float(entry)
        if within_s != self.drain_within_s:
            self.drain_within_s = within_s
            log.info("node drained" if within_s is not None else "node no longer drained", within_s=within_s)
            self._listener.drain_changed(within_s)

    def _lead(self, term: int | None) -> None:
        if term != self.term:
            self.term = term
            log.info("node leads" if term is not None else "node no longer leads", term=term)
            self._listener.term_changed(term)
