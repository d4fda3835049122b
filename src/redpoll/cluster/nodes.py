"""The nodes of a cluster: what each one says about itself in Redis, which of them are dead, and which one leads.

A node is one running `redpoll serve`, named by its `run`. Its supervisor calls the script `lead` once a second, which
stores the node and returns all others. A node whose entry stays the same over four further reads is dead. The same
rule applies to the leader's entry (cluster/README.md "Nodes and the leader"). On a Redis that a server starts for
itself, the entries that it finds are those of its own earlier runs, which are dead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec
import structlog

from redpoll.cluster.lifecycle import Lifecycle
from redpoll.cluster.redis.keys import Keys

__all__ = [
    "UNDRAINED",
    "Fitness",
    "KnownNode",
    "LeadCall",
    "Leader",
    "Node",
    "Nodes",
    "NodesView",
    "Unchanged",
    "entries_of",
    "lead_call",
]

log = structlog.get_logger(__name__)

UNDRAINED: Final = b"-"
"""A run's entry in `drained` after it was undrained. No entry means nothing: Redis may have lost it."""

_MAX_SAME: Final = 4
# Where `Nodes` counts the reads of the leader's entry. It is no run.
_LEADER: Final = ""


class Fitness(IntEnum):
    """How much of the leader's work a node's control plane can do. The lead goes to the nodes that can do most."""

    UNFIT = 0
    """Control doesn't run, hangs, or gets no answers from Redis."""
    WITHOUT_STORE = 1
    """Control can reap workers and write the directory. It can't reach the record store."""
    FIT = 2


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says about itself.

    `store` is the id of its record store, `started` the Unix time of its start. `workers` are the `k` of its living
    worker processes, `greatest` is the greatest `k` that it ever assigned. `control`: its control process lives.
    `beat` grows with every heartbeat. `accepts_per_s`: how many
    clients per second the node can take over from others.
    """

    name: str
    version: str
    store: str
    started: float
    workers: Sequence[int]
    greatest: int
    control: bool
    beat: int
    # Nodes of earlier versions don't say these. `without_clients` are the `k` of those workers that can't reach Redis,
    # and have closed all their clients and admit none: publishes don't wait for them. `reaches_all`: its supervisor is
    # connected to Redis; in a Cluster, to every master.
    accepts_per_s: int = 1_000
    without_clients: Sequence[int] = ()
    fitness: Fitness = Fitness.FIT
    lifecycle: Lifecycle = Lifecycle.SERVING
    reaches_all: bool = False

    @property
    def serves(self) -> bool:
        return self.lifecycle is Lifecycle.SERVING


class KnownNode(Node, frozen=True, kw_only=True):
    """A node as another one knows it: what it said last, its `run`, and whether it is `alive`. `beat` is 0 while it
    lives, so that equal ones say the same."""

    run: str
    alive: bool


class Leader(NamedTuple):
    """The entry of the leader. `run` is "-" after the leader ended. `term` grows with each new leader."""

    run: str
    term: int
    text: str

    @classmethod
    def parse(cls, text: bytes) -> Leader:
        """From `<run> <term> <beat>`, or b"" if Redis has none."""
        run, term, _ = text.decode().split(" ") if text else ("-", "0", "0")
        return cls(run, int(term), text.decode())


class Unchanged:
    """Counts over how many further reads each value of a table stayed the same. `now` is the reader's own clock.

    By the clock of Redis, a stall of Redis would make every process seem dead. A pause of more than `gap_s` between two
    reads restarts all counts, because the reader may have stalled together with what it watches. A read within
    `min_pause_s` of the last counted one doesn't count.
    """

    def __init__(self, *, gap_s: float, min_pause_s: float = 0.0) -> None:
        self.table: Mapping[str, bytes] = {}
        self._gap_s = gap_s
        self._min_pause_s = min_pause_s
        self._same: dict[str, int] = {}
        self._read_at: float | None = None

    def read(self, table: Mapping[str, bytes], now: float) -> None:
        """Takes the table; `now` is when the reply came."""
        pause_s = None if self._read_at is None else now - self._read_at
        gap = pause_s is None or pause_s > self._gap_s
        more = 0 if pause_s is not None and pause_s < self._min_pause_s else 1
        self._same = {
            name: self._same.get(name, 0) + more if not gap and self.table.get(name) == value else 0
            for name, value in table.items()
        }
        self.table = table
        if more:
            self._read_at = now

    def reads(self, name: str) -> int:
        """Over how many further reads this value stayed the same."""
        return self._same.get(name, 0)


class Nodes:
    """The nodes as of the last reply to `lead`. `run` is the reader's own, which is never dead. Every node sends a
    heartbeat every `every_s`. `alone`: no other node can have been alive before the first reply. Its other entries are
    dead until they change.

    `by_run` has every readable entry, `dead` the runs among them that have ended. `changed` are the runs whose entry
    changed since it was first read, so that they certainly live or lived a moment ago. `greatest_term` is the greatest
    one that was ever read.
    """

    def __init__(self, run: str, every_s: float = 1.0, *, alone: bool = False) -> None:
        self.by_run: dict[str, Node] = {}
        self.dead: set[str] = set()
        self.changed: set[str] = set()
        self.leader = Leader("-", 0, "")
        self.greatest_term = 0
        self._run = run
        self._alone = alone
        # Entries that Redis lost, until their node writes them again or is dead.
        self._lost: dict[str, bytes] = {}
        # Reads that come sooner, because a process died, don't count.
        self._unchanged = Unchanged(gap_s=2 * every_s, min_pause_s=0.8 * every_s)

    def read(self, leader: bytes, entries: Mapping[str, bytes], now: float, *, lost: bool = False) -> None:
        """Takes the reply. `now` is the reader's monotonic clock. `lost`: Redis lost its data. Then the nodes that were
        alive are alive until four further reads show no entry of theirs; publishes wait for their workers meanwhile."""
        before = self._unchanged.table
        if lost:
            self._lost = {run: before[run] for run in self.by_run}
        self._lost = {run: self._lost[run] for run in self._lost.keys() - entries.keys() - self.dead}
        entries = {**self._lost, **entries}
        self.changed = {run for run in entries if run in self.changed or before.get(run, entries[run]) != entries[run]}
        self._unchanged.read({**entries, _LEADER: leader}, now)
        self.leader = Leader.parse(leader)
        self.greatest_term = max(self.greatest_term, self.leader.term)
        self.by_run = {}
        for run, entry in entries.items():
            try:
                self.by_run[run] = msgspec.json.decode(entry, type=Node)
            except msgspec.DecodeError as error:
                log.error("node unreadable", run=run, reason=str(error))
        ended = self._alone and not before
        # A pause restarts the count. A node that was dead before it is still dead if it has written nothing since.
        self.dead = {
            run
            for run, entry in entries.items()
            if run != self._run
            and (ended or self._unchanged.reads(run) >= _MAX_SAME or (run in self.dead and before.get(run) == entry))
        }

    def known(self) -> list[KnownNode]:
        """All nodes of the last reply."""
        nodes = []
        for run, node in self.by_run.items():
            fields = msgspec.structs.asdict(node)
            alive = run not in self.dead
            if alive:
                fields["beat"] = 0
            nodes.append(KnownNode(run=run, alive=alive, **fields))
        return nodes

    def others(self, store: str) -> list[tuple[str, Node]]:
        """The runs with another record store that aren't known to be dead, the longest running one first."""
        runs = [
            (run, node)
            for run, node in self.by_run.items()
            if node.store != store and run not in self.dead and run != self._run
        ]
        return sorted(runs, key=lambda entry: entry[1].started)

    def replaceable(self, name: str, started: float) -> str:
        """The leader's entry, if this node, with this name and start, may replace it; otherwise "".

        It may if the leader is dead, or an earlier run on this node that hasn't moved since we read it first. Two live
        nodes with one name don't take turns: only the later one replaces the earlier one.
        """
        leader = self.leader
        if leader.run in ("-", self._run):
            return ""
        if self._unchanged.reads(_LEADER) >= _MAX_SAME or leader.run in self.dead:
            return leader.text
        node = self.by_run.get(leader.run)
        earlier = node is not None and node.name == name and node.started < started
        return leader.text if earlier and leader.run not in self.changed else ""

    def fitter(self, fitness: Fitness) -> list[str]:
        """The names of the other live nodes that could do more of the leader's work than one of this fitness."""
        return [
            node.name
            for run, node in self.by_run.items()
            if node.fitness > fitness and node.serves and run not in self.dead and run != self._run
        ]

    def others_reach_all(self) -> bool:
        """Whether another live node reaches every master of Redis."""
        return any(node.reaches_all for run, node in self.by_run.items() if run not in self.dead and run != self._run)

    def namesakes(self, name: str) -> list[str]:
        """The runs of other live nodes with this name."""
        return [
            run for run, node in self.by_run.items() if node.name == name and run != self._run and run in self.changed
        ]


class NodesView:
    """The nodes as this node's control plane knows them: what its supervisor said last. `run` is its own.

    `others` are the other nodes by run, with dead ones whose workers aren't removed yet. `known`: the first heartbeat
    was answered. The supervisor says at once which of its own workers live (`alive`, their `k`), and which of them have
    no clients and admit none (`without_clients`); its heartbeat in `nodes` says it later. `down`: those whose
    connection to Redis is down.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.nodes: Sequence[KnownNode] = ()
        self.others: Mapping[str, KnownNode] = {}
        self.leader: str | None = None
        self.known = False
        self.alive: Sequence[int] = ()
        self.without_clients: Sequence[int] = ()
        self.down: Sequence[int] = ()

    def update(self, nodes: Sequence[KnownNode], leader: str | None) -> None:
        """The supervisor says which nodes there are, and the run of the one that leads."""
        self.nodes, self.leader, self.known = nodes, leader, True
        self.others = {node.run: node for node in nodes if node.run != self.run}

    @property
    def several(self) -> bool:
        """Other nodes are alive."""
        return any(node.alive for node in self.others.values())

    def live_run(self, name: str) -> str | None:
        """The run of the live node with this name; of several, the one that was started last. None if there is none."""
        live = [node for node in self.nodes if node.name == name and node.alive]
        return max(live, key=lambda node: node.started).run if live else None

    def serving(self) -> dict[str, int]:
        """The live nodes that admit clients, by run, and how many clients per second each can take over."""
        return {node.run: node.accepts_per_s for node in self.nodes if node.alive and node.serves}


class LeadCall(NamedTuple):
    keys: tuple[bytes, bytes, bytes]
    args: list[bytes | str | int]


def lead_call(
    keys: Keys,
    run: str,
    node: Node | None,
    *,
    may_lead: bool,
    replaces: str,
    seen_term: int,
    dead: Collection[str],
    gives_up: bool = False,
) -> LeadCall:
    """A call of the script `lead`. `node` None: the run ends. `seen_term` is the greatest term that the caller has
    seen: terms don't repeat, even if Redis lost its data. `gives_up`: if it leads, another node may lead at once."""
    names = (keys.nodes, keys.leader, keys.drained)
    if node is None:
        return LeadCall(names, [run, b"", b"", b"0", b"", 0, 0])
    entry = msgspec.json.encode(node)
    wish = b"-" if gives_up else b"1" if may_lead else b"0"
    args: list[bytes | str | int] = [run, entry, node.store, wish, replaces, seen_term, int(node.fitness), *dead]
    return LeadCall(names, args)


def entries_of(flat: Sequence[bytes]) -> dict[str, bytes]:
    """The entries by run, from the flat list that `lead` returns."""
    return {run.decode(): entry for run, entry in zip(flat[::2], flat[1::2], strict=True)}
