"""How much of the leader's work this node's control plane can do, as the supervisor knows it.

Control says it once a second over the child pipe (control/nodes/fitness.py). Silence means that it hangs or doesn't
run. The supervisor writes it into the heartbeat, by which the nodes decide who leads (cluster/README.md "Nodes and the
leader").
"""

import time
from collections.abc import Callable
from typing import Final

from redpoll.cluster.nodes import Fitness

__all__ = ["ControlFitness"]

# How long a report counts: a control plane that is started again, or stalls, for less time doesn't lose the lead.
_COUNTS_FOR_S: Final = 3.0


class ControlFitness:
    """Call `take` with each report. `clock` is a monotonic one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported = Fitness.UNFIT
        self._reported_at = float("-inf")

    def changes(self, fitness: Fitness) -> bool:
        """Takes a report. Returns whether it changes the present fitness."""
        changed = fitness != self.present()
        self._reported, self._reported_at = fitness, self._clock()
        return changed

    def present(self) -> Fitness:
        """What control said last, UNFIT after 3 s of silence."""
        return self._reported if self._clock() - self._reported_at < _COUNTS_FOR_S else Fitness.UNFIT
