"""Every message on the child pipe, and how it is encoded: a line of JSON whose `type` is the name of its struct.

There is a struct for each message, and a union for each receiver: `ToWorker` (worker/main.py), `ToControl`
(control/plane.py) and `FromChild` (host/supervisor.py). The receiver's handler is a `match` that mypy checks for
completeness. A message that is malformed, or isn't in its receiver's union, is refused with a line in the log and
changes nothing.
"""

from collections.abc import Sequence
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec
import structlog

from redpoll.cluster.membership.connection_state import Reach
from redpoll.cluster.nodes import Fitness, KnownNode
from redpoll.config.settings import Settings

__all__ = [
    "FROM_CHILD",
    "TO_CONTROL",
    "TO_WORKER",
    "AdminCreated",
    "AppCreated",
    "BeginStop",
    "CertificateChanged",
    "ClientsLeft",
    "Deaf",
    "DeafWorkers",
    "DirectoryVersion",
    "EndService",
    "Evacuate",
    "Fatal",
    "FitnessReport",
    "FromChild",
    "Inbox",
    "Lead",
    "ListenersClosed",
    "LivingWorkers",
    "Message",
    "NodesChanged",
    "Ping",
    "Pong",
    "ReachChanged",
    "Ready",
    "RecordStore",
    "Reload",
    "Reloaded",
    "ReturnToService",
    "Serve",
    "SettingsChanged",
    "ShardKey",
    "Start",
    "Stop",
    "TellReach",
    "TicketKeys",
    "ToControl",
    "ToWorker",
    "WorkersCutOff",
    "WorkersReady",
    "decode_start",
    "encode",
]

log = structlog.get_logger()


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Any message on the child pipe."""


# -- the pipe itself


class Start(Message, frozen=True, kw_only=True):
    """The first message to a child: everything it needs to start. (To reach Redis, a worker also needs the record
    store's shard key, which the supervisor learns from control.)

    `run` identifies this start of the supervisor: 12 hex digits. `number` is the worker's position, 0 to N - 1, which
    its successors share. `process` counts the worker processes of the run from 1 and never repeats (cluster/README.md
    "Worker names and fencing"). Both are 0 for the control plane.

    `listen_fd` is the inherited listening socket, of the public port for a worker and of the control port for control.
    `tls_fd` is a worker's second one, for the TLS port if there is one. If a port has TLS, `settings.tls_cert` names
    one file, which the supervisor has checked and written (certificate_files.py). The ports in `settings` are the ones
    that were bound, never 0. `settings.redis_url` is as the operator gave it; `redis_url` here is never empty and names
    the TLS files, too (redis_url.py).
    """

    role: Literal["worker", "control"]
    number: int
    run: str
    process: int
    redis_url: str
    listen_fd: int
    requests_path: str
    data_dir: str
    settings: Settings
    tls_fd: int | None = None


class Ping(Message, frozen=True):
    """Each end answers it with `Pong` by itself (child_pipe.py)."""


class Pong(Message, frozen=True):
    """The process's loop runs."""


# -- from the supervisor


class SettingsChanged(Message, frozen=True):
    """`redpoll reload` changed these settings (Setting.is_live), by name."""

    changes: dict[str, Any]


class Evacuate(Message, frozen=True):
    """An operator drains this node: workers close their connections within `within_s` seconds and admit none;
    everything else goes on. `max_per_s` is how many of them each worker may close per second, None for any number."""

    within_s: float
    max_per_s: float | None


class Serve(Message, frozen=True):
    """The operator's drain has ended: admit clients again."""


class Stop(Message, frozen=True):
    """End the process. A worker closes its connections first; `max_per_s` as in Evacuate."""

    max_per_s: float | None = None


# To workers.


class ShardKey(Message, frozen=True):
    """The record store's shard key in hex (store/shard_key.py), which a worker needs to reach Redis."""

    key: str


class DirectoryVersion(Message, frozen=True):
    """The record store's version of the app records. Control says it at its start and when it goes back; workers admit
    no clients until Redis has this version or a later one."""

    version: int


class CertificateChanged(Message, frozen=True):
    """The file with the TLS certificates was replaced. To control only if its port has TLS."""


class TicketKeys(Message, frozen=True):
    """The keys of TLS session tickets in hex, the newest first (host/ticket_keys.py). At most two."""

    keys: Sequence[str]


class TellReach(Message, frozen=True):
    """Asks for `ReachChanged`: Redis was away, so what the worker said before may be over."""


class EndService(Message, frozen=True):
    """Close all clients with 4200 and admit none, because this worker can't reach Redis (worker/aside.py)."""


class ReturnToService(Message, frozen=True):
    """Admit clients again, after EndService."""


class BeginStop(Message, frozen=True):
    """The server stops: workers close their ports and answer `ListenersClosed`, control's /readyz says it. `Stop`
    follows."""


# To control.


class LivingWorkers(Message, frozen=True):
    """The `k` of this node's living worker processes, and the greatest one so far."""

    alive: Sequence[int]
    greatest: int


class WorkersCutOff(Message, frozen=True):
    """The numbers of the workers that are out of service because they can't reach Redis, the `k` of those that have no
    clients left, and the `k` of all that said last that Redis is down (host/cut_off.py)."""

    numbers: Sequence[int]
    without_clients: Sequence[int]
    down: Sequence[int]


class DeafWorkers(Message, frozen=True):
    """The numbers of the workers that get no messages from Redis."""

    numbers: Sequence[int]


class WorkersReady(Message, frozen=True):
    """Each worker has been ready once."""


class NodesChanged(Message, frozen=True):
    """All nodes, also dead ones whose entry is still in Redis, and the run of the one that leads, if it is known."""

    nodes: Sequence[KnownNode]
    leader: str | None


class Lead(Message, frozen=True):
    """This node leads with this term; None: it doesn't."""

    term: int | None


class Reloaded(Message, frozen=True):
    """The answer to `Reload`: `Reloaded.answer` of config/reloading.py."""

    answer: dict[str, Any]


# -- from children


class Ready(Message, frozen=True):
    """The child works: a worker admits clients, control answers requests."""


class Fatal(Message, frozen=True):
    """The child can't start, and another attempt would fail in the same way. `reason` is for the operator."""

    reason: str


# From workers.


class ListenersClosed(Message, frozen=True):
    """This process accepts no more connections."""


class Deaf(Message, frozen=True):
    """Redis delivers no messages to this worker, or delivers them again."""

    deaf: bool


class ReachChanged(Message, frozen=True):
    """How far this worker has come with Redis."""

    reach: Reach


class ClientsLeft(Message, frozen=True):
    """The outcome of EndService: no client is left (`all`), or this worker has reached Redis before and keeps them."""

    all: bool


# From control.


class RecordStore(Message, frozen=True):
    """The open record store: its random id, the greatest term of a leader that it has seen, its shard key in hex."""

    store: str
    term: int
    shard_key: str


class FitnessReport(Message, frozen=True):
    """How much of the leader's work this control plane can do."""

    fitness: Fitness


class AppCreated(Message, frozen=True):
    """The app of the first start, as `redpoll app show` prints it."""

    app: dict[str, Any]


class AdminCreated(Message, frozen=True):
    """The dashboard's password of the first start."""

    password: str


class Reload(Message, frozen=True):
    """Read the settings and the certificate again, and answer with `Reloaded`."""


ToWorker: TypeAlias = (
    SettingsChanged
    | Evacuate
    | Serve
    | Stop
    | ShardKey
    | DirectoryVersion
    | CertificateChanged
    | TicketKeys
    | TellReach
    | EndService
    | ReturnToService
    | BeginStop
)
ToControl: TypeAlias = (
    SettingsChanged
    | Evacuate
    | Serve
    | Stop
    | BeginStop
    | LivingWorkers
    | WorkersCutOff
    | DeafWorkers
    | WorkersReady
    | NodesChanged
    | Lead
    | CertificateChanged
    | Reloaded
)
FromChild: TypeAlias = (
    Ready
    | Fatal
    | ListenersClosed
    | Deaf
    | ReachChanged
    | ClientsLeft
    | RecordStore
    | DirectoryVersion
    | FitnessReport
    | AppCreated
    | AdminCreated
    | Reload
)

M = TypeVar("M")


class Inbox(Generic[M]):
    """Decodes the messages of one union."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(union | Ping | Pong)

    def decode(self, line: bytes) -> M | Ping | Pong | None:
        """None: the message is refused, and the log says why."""
        try:
            message: M | Ping | Pong = self._decoder.decode(line)
        except msgspec.DecodeError as error:
            log.error("message on the child pipe refused", reason=str(error))
            return None
        return message


TO_WORKER: Final = Inbox[ToWorker](ToWorker)
TO_CONTROL: Final = Inbox[ToControl](ToControl)
FROM_CHILD: Final = Inbox[FromChild](FromChild)


def encode(message: Message) -> bytes:
    """A message as its line."""
    return msgspec.json.encode(message) + b"\n"


def decode_start(line: bytes) -> Start:
    """The first message to a child. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=Start)
