"""A change that webhooks report, as `outbox` reads it from Redis."""

from typing import NamedTuple

__all__ = ["Transition"]


class Transition(NamedTuple):
    """One row. `event` is channel.occupied, channel.vacated, member.added, member.removed, client_event, cache.miss or
    subscription.count. `user`, on presence channels, is the user who joined, left or sent. `time_ms` is when it
    happened, also for a leave that was held back; Unix time. `stamp` grows per channel in the order of the changes,
    with gaps.

    `detail` is JSON or b"": the number of subscriptions for channel.occupied and subscription.count, the user_info for
    member.added, an object of `event`, `data` and `socket_id` for client_event. `trace` is the trace id of a client
    event.
    """

    shard: int
    stamp: int
    event: str
    app_id: str
    channel: str
    user: str | None
    time_ms: int
    detail: bytes
    trace: str | None
