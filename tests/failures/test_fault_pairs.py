"""Two random faults at once on three servers. `python -m bench.soak.fault_pairs` plays many rounds.

See deploy/failures.md "Two faults at once".
"""

from collections.abc import Callable

from failures.faults import World, play

HEADING = "Two faults at once"
# Round 0: Redis is changed in place and the leader's machine killed.
SEED = 1138


async def test_two_faults_at_once(size: Callable[[int, int], int], within_s: Callable[[float], float], figures) -> None:
    async with World() as world:
        for number in range(size(1, 12)):
            outcome = await play(world, number, SEED, within_s(0))
            assert not outcome.faults, outcome.row()
            if outcome.webhooks_s is not None:
                figures.note(HEADING, "webhooks go on", outcome.webhooks_s, "s", "8 s")
            if outcome.ghosts_s is not None:
                figures.note(HEADING, "members of dead nodes are gone", outcome.ghosts_s, "s", "8 s")
