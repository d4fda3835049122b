"""`pytest bench/regression` compares, `pytest bench/regression --record` writes a new baseline.json."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write bench/regression/baseline.json from this run")


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> bool:
    """Whether this run writes the baseline instead of comparing with it."""
    return bool(request.config.getoption("--record"))
