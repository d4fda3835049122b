"""Times of the cases by pytest-benchmark, each beside the calibration case in the same seconds.

Between two rounds of a case runs a round of the calibration; the figure is the ratio of the fastest rounds. On a
shared machine it still moves by tens of percent, so it fails only where a case takes twice its recorded ratio: that
finds added system calls and waiting, which instruction counts don't show.
"""

from __future__ import annotations

import time

import baseline
import pytest
from cases import CALIBRATION, CASES, Case

ROUNDS = 60
_ROUND_S = 0.008


def _operations(case: Case) -> int:
    """How many make a round of about 8 ms."""
    began = time.perf_counter()
    case.run(case.operations // 10)
    took_s = time.perf_counter() - began
    case.reset()
    # An upper bound, because the sockets of the fan-out must take all of a round.
    return max(1, min(case.operations, int(case.operations // 10 * _ROUND_S / took_s)))


@pytest.mark.parametrize("name", CASES)
def test_time_of(name: str, benchmark, record: bool) -> None:
    case, calibration = CASES[name](), CALIBRATION()
    operations, reference_operations = _operations(case), _operations(calibration)
    reference_s: list[float] = []
    best_s: list[float] = []

    def between() -> None:
        case.reset()
        began = time.perf_counter()
        calibration.run(reference_operations)
        reference_s.append((time.perf_counter() - began) / reference_operations)

    def measured() -> None:
        began = time.perf_counter()
        case.run(operations)
        best_s.append((time.perf_counter() - began) / operations)

    benchmark.group = "cases"
    benchmark.pedantic(measured, setup=between, rounds=ROUNDS)
    case.reset()
    ratio = min(best_s) / min(reference_s)
    benchmark.extra_info.update(operations=operations, us=min(best_s) * 1e6, ratio=ratio)
    print(f"{name}: {min(best_s) * 1e6:.2f} us, {ratio:.4f} of the calibration")
    recorded = baseline.read()
    if record:
        recorded["times"][name] = round(ratio, 5)
        baseline.write(recorded)
    if name not in recorded["times"]:
        pytest.skip(f"{name} has no baseline yet: pytest bench/regression --record")
    growth = ratio / recorded["times"][name] - 1
    assert growth <= baseline.MAX_TIME_GROWTH, f"{growth:+.0%} of the recorded time, relative to the calibration"
