"""Times of the cases by pytest-benchmark, each beside the calibration case in the same seconds.

Between two rounds of a case runs a round of the calibration; the figure is the ratio of the fastest rounds, in
processor time, and is compared with the one recorded with the same Python. On a shared machine it still moves by tens
of percent, so a case fails only where it takes twice its recorded ratio in three attempts: that finds added system
calls, which instruction counts don't show.
"""

from __future__ import annotations

import time

import baseline
import pytest
from cases import CALIBRATION, CASES, Case

ROUNDS = 500
ATTEMPTS = 3
# Much less than a scheduler's slice, so that some rounds are not interrupted by other processes. With rounds of 3 ms on
# a busy machine the fan-out, whose buffers leave the caches, took 1.8 times as long.
_ROUND_S = 0.0005


def _operations(case: Case) -> int:
    """How many make a round."""
    few = max(1, case.operations // 10)
    took_s = 1.0
    for _ in range(5):
        began = time.thread_time()
        case.run(few)
        took_s = min(took_s, time.thread_time() - began)
        case.reset()
    # An upper bound, because the sockets of the fan-out must take all of a round.
    return max(1, min(case.operations, int(few * _ROUND_S / max(took_s, 1e-9))))


class Pair:
    """A case and the calibration, timed in turns."""

    def __init__(self, case: Case, calibration: Case) -> None:
        self.case, self.calibration = case, calibration
        self.operations, self.reference_operations = _operations(case), _operations(calibration)
        self.best_s = self.best_reference_s = 1.0

    def between(self) -> None:
        self.case.reset()
        began = time.thread_time()
        self.calibration.run(self.reference_operations)
        self.best_reference_s = min(self.best_reference_s, (time.thread_time() - began) / self.reference_operations)

    def measured(self) -> None:
        began = time.thread_time()
        self.case.run(self.operations)
        self.best_s = min(self.best_s, (time.thread_time() - began) / self.operations)

    def again(self) -> None:
        self.best_s = self.best_reference_s = 1.0
        for _ in range(ROUNDS):
            self.between()
            self.measured()
        self.case.reset()

    @property
    def ratio(self) -> float:
        return self.best_s / self.best_reference_s


@pytest.mark.parametrize("name", CASES)
def test_time_of(name: str, benchmark, record: bool) -> None:
    pair = Pair(CASES[name](), CALIBRATION())
    benchmark.group = "cases"
    benchmark.pedantic(pair.measured, setup=pair.between, rounds=ROUNDS)
    pair.case.reset()
    recorded = baseline.read()
    times = recorded["times"].setdefault(baseline.interpreter(), {})
    if record:
        times[name] = round(pair.ratio, 5)
        baseline.write(recorded)
    if name not in times:
        pytest.skip(f"{name} has no baseline with this Python yet: pytest bench/regression --record")
    ratios = [pair.ratio]
    while min(ratios) > (1 + baseline.MAX_TIME_GROWTH) * times[name] and len(ratios) < ATTEMPTS:
        pair.again()
        ratios.append(pair.ratio)
    growth = min(ratios) / times[name] - 1
    benchmark.extra_info.update(operations=pair.operations, us=pair.best_s * 1e6, ratio=min(ratios), growth=growth)
    print(f"{name}: {pair.best_s * 1e6:.2f} us, {pair.ratio:.4f} of the calibration, {growth:+.0%}")
    assert growth <= baseline.MAX_TIME_GROWTH, f"{growth:+.0%} of the recorded time, relative to the calibration"
