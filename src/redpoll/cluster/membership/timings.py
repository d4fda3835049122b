"""The times by which a worker keeps its membership in Redis. Tests use shorter ones."""

from dataclasses import dataclass

from redpoll.protocol.users import OFFLINE_AFTER_S

__all__ = ["Timings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """All in seconds."""

    beat_s: float = 1.0
    """Between two beats."""
    unanswered_s: float = 10.0
    """A beat or registration without an answer for so long means that the connection is broken."""
    canary_s: float = 2.0
    """Between two messages that the worker sends to itself."""
    away_s: float = 5.0
    """The worker is not ready when Redis has been silent for longer."""
    second_look_s: float = 5.0
    """How long other workers may take after a break to tell Redis again what they hold."""
    reserved_s: float = 10.0
    """A reserved place of a channel that isn't occupied then is free again: its worker may be dead."""
    look_s: float = 0.02
    """Between two looks at the total of an app's occupied channels."""
    full_s: float = 1.0
    """For so long after a refusal, an app's further channels are refused without another look at its total."""
    offline_s: float = OFFLINE_AFTER_S
    """A user who went offline is reported after this time."""
    admit_retry_s: float = 0.5
    """Between two attempts of a connection that found its app full."""
    max_admit_s: float = 7.0
    """A connection that found its app full is refused after this time."""
    join_wait_s: float = 30.0
    """A subscribe without an answer from Redis is refused after this time."""
    count_s: float = 0.05
    """Between two calls that tell Redis only the number of a plain channel's sockets."""
    retry_s: float = 0.05
    """Before the first repetition of a call that failed; doubled for each further one, up to:"""
    max_retry_s: float = 1.0

    def retry_delay_s(self, failures: int) -> float:
        """The delay after so many earlier failures in a row."""
        return min(self.retry_s * 2.0 ** min(failures, 16), self.max_retry_s)
