"""The messages on the topics `sys` (to all workers) and `controls` (to all control planes), and their encoding.

Each kind is a struct; its name is the `type` in the JSON on the topic. Those that are answered through a list in Redis
(survey.py) are questions. The change of an app's record is in directory.py, the questions about event logs are in
control/tracing/cluster_log.py.
"""

from collections.abc import Mapping, Sequence

import msgspec

from redpoll.cluster.redis.keys import Keys

__all__ = [
    "CloseSocket",
    "Count",
    "GrantRevoked",
    "KnowDirectory",
    "ListConnections",
    "Move",
    "Question",
    "RevokeGrants",
    "SilenceOfUser",
    "TerminateUser",
    "TopicMessage",
    "Unsubscribe",
    "UserSilent",
    "encode",
    "publication",
]


class TopicMessage(msgspec.Struct, frozen=True, tag=True):
    """Any message on `sys` or `controls`."""


class Question(TopicMessage, frozen=True, kw_only=True):
    """`id` is unique, `asker` the node that asks control planes. Both are set when it is asked."""

    id: str = ""
    asker: str = ""


class Count(Question, frozen=True):
    """How many connections the worker has."""


class KnowDirectory(Question, frozen=True):
    """Answered with true once the worker has the app directory of this version, or a later one."""

    version: int


class Move(Question, frozen=True):
    """Close as many connections as `targets` says for this W, over `within_s` seconds. Answers with that number."""

    targets: Mapping[str, int]
    within_s: float


class TerminateUser(Question, frozen=True):
    """Close the connections that are signed in as this user. Answers with their number."""

    app: str
    user: str


class CloseSocket(Question, frozen=True):
    """Close the connection with this socket id, if it is one of the app. Answers with 1, or 0."""

    app: str
    socket: str


class RevokeGrants(Question, frozen=True):
    """Accept these grants no longer, and end what they opened. `subject` and `at_s` as in protocol/grants.py. Answers
    with the number of subscriptions and readers over HTTP that it ended."""

    app: str
    subject: str
    at_s: int


class GrantRevoked(TopicMessage, frozen=True):
    """On `controls`: what a control plane has revoked, as in RevokeGrants."""

    app: str
    subject: str
    at_s: int


class Unsubscribe(Question, frozen=True):
    """Remove a user, or the connection with this socket id, from one channel; "" for the one that isn't meant. Answers
    with the number of subscriptions and readers over HTTP that it ended, and the digests (hex) of the grants that
    opened the subscriptions. `granted`: the app accepts grants, and the user's earlier ones open this channel no
    longer."""

    app: str
    channel: str
    user: str
    socket: str
    at_s: int
    granted: bool = True


class ListConnections(Question, frozen=True):
    """The newest `limit` connections of the app, "" for all apps, as in worker/connection_list.py, and how many
    `readers` over HTTP there are."""

    app: str
    find: str = ""
    channel: str = ""
    limit: int = 500


class SilenceOfUser(TopicMessage, frozen=True):
    """For how long the user's connections on the workers `of` have been silent (worker/replay/user_resume.py)."""

    id: str
    app: str
    user: str
    of: Sequence[str]


class UserSilent(TopicMessage, frozen=True):
    """The answer of `worker` to SilenceOfUser `id`: the seconds of the longest silence, None if all connections are
    alive. It comes over `sys` as well, because a list in Redis would have to be polled."""

    id: str
    age_s: float | None
    worker: str = ""


def encode(message: TopicMessage) -> bytes:
    return msgspec.json.encode(message)


def publication(keys: Keys, message: TopicMessage) -> tuple[bytes, bytes, bytes]:
    """The command that sends a message to all workers."""
    return keys.publish, keys.sys, encode(message)
