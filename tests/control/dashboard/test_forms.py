"""Forms: they keep what was typed, even if it is wrong."""

import pytest

from redpoll.control.dashboard.forms import Form, read_pairs
from redpoll.protocol.errors import ApiError


def test_text_strips_values_and_raw_does_not():
    form = Form([("name", "  a  "), ("id", "1"), ("id", "2")])
    assert (form.text("name"), form.raw("name"), form.every("id")) == ("a", "  a  ", ["1", "2"])
    assert (form.text("other", "x"), form.raw("other"), form.ticked("id")) == ("x", "", True)


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "11", "٣", "1" * 30])
def test_number_out_of_bounds_is_a_fault(text):
    form = Form([("keep", text)])
    assert form.number("keep", 0, 10) == 0
    assert form.faults["keep"] == "Enter a whole number from 0 to 10."
    assert not form.good


def test_empty_number_is_the_default_and_the_first_fault_of_a_field_stays():
    form = Form([("keep", " ")])
    assert form.number("keep", 1, 10, 7) == 7
    form.fault("keep", "first")
    form.fault("keep", "second")
    assert form.faults == {"keep": "First."}


def test_other_choice_is_a_fault():
    form = Form([("unit", "years")])
    assert form.choice("unit", ("days",), "days") == "days"
    assert "unit" in form.faults


@pytest.mark.parametrize("body", [b"\xff=1", b"a=%ff", b"a=%00", b"&".join(b"a=1" for _ in range(6_000))])
def test_malformed_form_is_refused(body):
    with pytest.raises(ApiError):
        read_pairs(body)


def test_faults_are_sentences():
    form = Form()
    form.fault("name", "a token's name is 1 to 200 printable characters")
    form.fault("url", "Enter a URL.")
    assert form.faults == {"name": "A token's name is 1 to 200 printable characters.", "url": "Enter a URL."}
