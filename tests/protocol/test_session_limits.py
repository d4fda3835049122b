"""What one connection may send before it is refused or closed."""

import pytest

from redpoll.protocol.limits import Limits
from redpoll.protocol.session_limits import BAD_FRAME, REFUSED_EVENT, SessionLimits


@pytest.mark.parametrize(("weight", "most"), [(BAD_FRAME, 100), (REFUSED_EVENT, 1000)])
def test_faults_within_ten_seconds_are_too_many(weight, most):
    limits = SessionLimits(Limits())
    assert [limits.faults.add(weight, 1.0) for _ in range(most)] == [False] * (most - 1) + [True]


def test_faults_of_earlier_are_forgotten():
    limits = SessionLimits(Limits())
    assert not any(limits.faults.add(BAD_FRAME, second * 0.2) for second in range(1000))


def test_limits_that_are_off_have_no_bucket():
    limits = SessionLimits(Limits(client_events_per_s=0, subscribes_per_s=0))
    assert limits.client_events is limits.subscribes is None
