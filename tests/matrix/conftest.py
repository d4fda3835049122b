"""Collects the outcomes of the matrix for MATRIX.md, and adds the option that writes it."""

from collections.abc import Iterator

import pytest

OUTCOMES = pytest.StashKey[dict[tuple[str, str], bool]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-matrix", action="store_true", help="Write MATRIX.md from what this run sees.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    for name, value in item.user_properties:
        if name == "cell":
            seen = item.config.stash.setdefault(OUTCOMES, {})
            seen[value] = seen.get(value, True) and report.passed
    return report


@pytest.fixture
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, str], bool]:
    """(row, column), or (rule, ""), of every test of this run so far → whether it passed."""
    return request.config.stash.get(OUTCOMES, {})
