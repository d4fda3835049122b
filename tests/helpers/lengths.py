"""How much of a long test a run does: the suite's short form, or with `pytest --long` the long one.

`HISTORIES=1000` is another number of random histories, and `FIRST=300` begins with that seed.
"""

import os
from typing import Any, TypeVar

Amount = TypeVar("Amount")
# Set by tests/conftest.py before any test is imported.
chosen: dict[str, Any] = {"long": False}


def is_long() -> bool:
    return bool(chosen["long"])


def amount(short: Amount, long: Amount) -> Amount:
    """What this run takes of the two."""
    return long if is_long() else short


def seeds(short: int, long: int = 100) -> range:
    """The seeds of as many random histories."""
    first = int(os.environ.get("FIRST", "0"))
    return range(first, first + int(os.environ.get("HISTORIES", amount(short, long))))
