"""Outcomes and reasons that need no connection. test_sender.py has those of real connections."""

import pytest
from yarl import URL

from redpoll.control.webhooks.outcomes import Outcome, Stage, of_error, of_status

PLACE = URL("https://example.com:8443/hook?secret=1")


@pytest.mark.parametrize("code", [*range(200, 300, 33), 301, 404, 500, 101, 999])
def test_every_status_has_a_reason_with_its_code(code):
    outcome, reason = of_status(code, False)
    assert (outcome is Outcome.DELIVERED) is (200 <= code < 300)
    assert str(code) in reason


def test_timeout_reason_names_the_stage():
    assert Stage.RESOLVE.timeout_reason(PLACE, 10.0) == "no address of example.com was found within 10 s"
    assert Stage.CONNECT.timeout_reason(PLACE, 10.0) == "no connection to example.com:8443 within 10 s"
    assert Stage.ANSWER.timeout_reason(PLACE, 10.0) == "no answer within 10 s"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectionResetError(104, "x"), Outcome.BROKEN),
        (OSError("nothing to go by"), Outcome.BROKEN),
        (LookupError("a bug"), Outcome.INTERNAL),
    ],
)
def test_error_has_an_outcome_and_a_reason_without_the_errors_text(error, outcome):
    found, reason = of_error(error, PLACE)
    assert found is outcome
    assert reason
    assert "secret" not in reason
    assert "nothing to go by" not in reason
