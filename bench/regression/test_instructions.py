"""Fails where a case takes 2 % more instructions than recorded. See baseline.py and bench/README.md."""

from __future__ import annotations

import baseline
import counting
import pytest
from cases import CASES

# Building and counting the commit of the baseline takes a minute on a quiet machine.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def counts() -> baseline.Counts:
    try:
        return counting.count()
    except counting.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def before(counts: baseline.Counts, record: bool) -> baseline.Counts:
    """What to compare with: recorded figures, else those of the commit that recorded others."""
    if record:
        recorded = baseline.read()
        recorded["environments"][baseline.environment()] = counts
        baseline.write(recorded)
    base = baseline.recorded_counts(counts)
    if base is None:
        commit = baseline.base_commit()
        if commit is None:
            pytest.skip("no baseline for this environment and no git history; record one with --record")
        base = baseline.of_commit(commit)
    return base


@pytest.mark.parametrize("case", CASES)
def test_instructions_of(case: str, counts: baseline.Counts, before: baseline.Counts) -> None:
    if case not in before:
        pytest.skip(f"{case} has no baseline yet: pytest bench/regression --record")
    (finding,) = (finding for finding in baseline.compare(counts, before) if finding.case == case)
    print(finding)
    if finding.slower:
        pytest.fail(
            f"slower than its baseline\n{finding}\nchanged since it was recorded:\n{baseline.changed_files()}\n"
            "if this is meant: pytest bench/regression --record, and say in the commit why",
            pytrace=False,
        )
