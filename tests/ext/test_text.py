"""Bytes with gaps. What fills them is compiled: test_fast_publish.py sees it."""

import pytest

from redpoll._text import Form


def test_each_mark_is_in_the_form():
    Form(b"a MARK b OTHER c MARK", (b"MARK", b"OTHER"))
    with pytest.raises(ValueError, match="a mark is missing"):
        Form(b"a MARK b", (b"MARK", b"OTHER"))
