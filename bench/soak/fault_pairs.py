"""Random pairs of faults on three servers with one Redis and one PostgreSQL, round after round.

    python -m bench.soak.fault_pairs --rounds 300 --seed 1
    python -m bench.soak.fault_pairs --rounds 1 --first 17 --seed 1      only round 17, the same faults again

Each round: Redis' primary changed in place or killed; PostgreSQL cut from one node or from all; the leader's
supervisor, control plane or machine killed or stopped; a worker without Redis: two of these, at most 1.5 s apart.
After them, every publish that is answered with 200 from the fifth second on must reach every client once; webhooks go
on, members of dead nodes are gone and one living node leads after 8 s (tests/failures/faults.py). Prints a line for
each round; ends with 1 if something didn't hold. `--patience` adds seconds to the limits, for a machine that has other
work.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from bench.arguments import parser_of
from bench.report import print_table, save
from failures.faults import Outcome, World, play


async def rounds(options: argparse.Namespace) -> list[Outcome]:
    """Plays all rounds. After one in which something didn't hold, the servers are started again."""
    outcomes: list[Outcome] = []
    numbers = iter(range(options.first, options.first + options.rounds))
    number = next(numbers, None)
    while number is not None:
        async with World() as world:
            while number is not None:
                try:
                    outcome = await play(world, number, options.seed, options.patience)
                except (OSError, TimeoutError, AssertionError) as error:
                    outcome = Outcome(number, [], 0.0, faults=[f"the round ended with {error!r}"])
                outcomes.append(outcome)
                print(" | ".join(outcome.row()), flush=True)
                number = next(numbers, None)
                if outcome.faults:
                    for node in world.nodes if options.logs else ():
                        print(node.output(), file=sys.stderr)
                    break
    return outcomes


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("--logs", action="store_true", help="the servers' output after a round that failed, to stderr")
    options = parser.parse_args()
    outcomes = asyncio.run(rounds(options))
    failed = [outcome for outcome in outcomes if outcome.faults]
    print()
    header = ["round", "faults", "accepted", "webhooks", "members", "took", "what didn't hold"]
    print_table(header, [outcome.row() for outcome in failed])
    print(f"{len(outcomes)} rounds with seed {options.seed}, {len(failed)} in which something didn't hold")
    if options.json is not None:
        save(options.json, "fault_pairs", {"rows": [outcome.row() for outcome in outcomes]})
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
