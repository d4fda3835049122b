"""Forms of answers; test_fast_publish.py compares what fills them with what they are made of."""

from redpoll.control.publish.forms import answer_form
from redpoll.http.messages import AUTHENTICATED, LAST


def test_an_answer_says_whether_the_connection_closes_after_it():
    assert [answer_form(closes=closes)[0] for closes in (False, True)] == [AUTHENTICATED, AUTHENTICATED | LAST]
