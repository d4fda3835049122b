"""What one connection may send: a session counts it here, from the first limited message on."""

from redpoll.protocol.limits import Limits, TokenBucket, Window

__all__ = ["BAD_FRAME", "HISTORY_REQUESTS_PER_S", "REFUSED_EVENT", "SessionLimits"]

# `pusher:error` for bad frames, unknown events and refused client events. The others are dropped.
_ERROR_FRAMES_PER_S = 1.0
# The weights of faults. 100 bad frames within 10 s close the connection. A refused client event weighs a tenth: a page
# that sends 60 a second is eager, not hostile.
_FAULT_WINDOW_S = 10.0
_MAX_FAULT_WEIGHT = 1000
BAD_FRAME = 10
REFUSED_EVENT = 1
# A request reads up to 1,000 messages from Redis. The burst is enough to read a whole history page by page.
HISTORY_REQUESTS_PER_S = 20.0
_MAX_HISTORY_BURST = 100.0


class SessionLimits:
    """What a connection has used of its limits. Most connections never need one.

    `client_events` and `subscribes` are None if the operator set no limit. `closing`: the session has been closed for
    its faults.
    """

    __slots__ = ("client_events", "closing", "error_frames", "faults", "history_requests", "subscribes")

    def __init__(self, limits: Limits) -> None:
        rate = limits.client_events_per_s
        self.client_events = TokenBucket(rate, rate) if rate > 0 else None
        rate = limits.subscribes_per_s
        self.subscribes = TokenBucket(rate, max(rate, limits.max_channels)) if rate > 0 else None
        self.error_frames = TokenBucket(_ERROR_FRAMES_PER_S, 1)
        self.history_requests = TokenBucket(HISTORY_REQUESTS_PER_S, _MAX_HISTORY_BURST)
        self.faults = Window(_MAX_FAULT_WEIGHT, _FAULT_WINDOW_S)
        self.closing = False
