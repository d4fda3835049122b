"""Time for slow machines."""

import pytest

from redpoll.control.tracing import tracing


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A flush that a test awaits has read what workers appended, also after a pause of Redis."""
    monkeypatch.setattr(tracing, "_READ_WITHIN_S", 60.0)
