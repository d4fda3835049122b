"""Forms: what was typed is kept, whatever is wrong with it."""

import pytest

from redpoll.control.dashboard.forms import Form, read_pairs
from redpoll.protocol.errors import ApiError


def test_values_come_without_the_space_around_them_but_what_is_sent_on_as_typed():
    form = Form([("name", "  a  "), ("id", "1"), ("id", "2")])
    assert (form.text("name"), form.raw("name"), form.every("id")) == ("a", "  a  ", ["1", "2"])
    assert (form.text("other", "x"), form.raw("other"), form.ticked("id")) == ("x", "", True)


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "11", "٣", "1" * 30])
def test_what_is_no_number_in_its_bounds_is_a_fault_at_its_field(text):
    form = Form([("keep", text)])
    assert form.number("keep", 0, 10) == 0
    assert form.faults["keep"] == "A whole number from 0 to 10, please."
    assert not form.good


def test_an_empty_number_is_its_default_and_the_first_fault_of_a_field_stays():
    form = Form([("keep", " ")])
    assert form.number("keep", 1, 10, 7) == 7
    form.fault("keep", "first")
    form.fault("keep", "second")
    assert form.faults == {"keep": "First."}


def test_a_choice_is_one_of_those_that_there_are():
    form = Form([("unit", "years")])
    assert form.choice("unit", ("days",), "days") == "days"
    assert "unit" in form.faults


@pytest.mark.parametrize("body", [b"\xff=1", b"a=%ff", b"&".join(b"a=1" for _ in range(6_000))])
def test_bytes_that_are_no_form_are_refused(body):
    with pytest.raises(ApiError):
        read_pairs(body)


def test_a_fault_is_a_sentence():
    form = Form()
    form.fault("name", "a token's name is 1 to 200 printable characters")
    form.fault("url", "Say where to send it.")
    assert form.faults == {"name": "A token's name is 1 to 200 printable characters.", "url": "Say where to send it."}
