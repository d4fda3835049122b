"""The small mapping against a dict."""

import gc
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll._memory import SmallMap

KEYS = ["a", "b", "c"]


@given(st.lists(st.tuples(st.sampled_from(["set", "pop", "del", "clear"]), st.sampled_from(KEYS)), max_size=40))
def test_agrees_with_a_dict(steps):
    small, model = SmallMap(), {}
    for number, (what, key) in enumerate(steps):
        if what == "set":
            small[key] = model[key] = number
        elif what == "pop":
            assert small.pop(key, None) == model.pop(key, None)
            with pytest.raises(KeyError):
                small.pop(key)
        elif what == "clear":
            small.clear()
            model.clear()
        elif key in model:
            del small[key], model[key]
        else:
            with pytest.raises(KeyError):
                del small[key]
        assert len(small) == len(model)
        assert list(small) == list(small.keys()) == list(model)
        assert list(small.values()) == list(model.values())
        assert list(small.items()) == list(model.items())
        for key in KEYS:
            assert (key in small) is (key in model)
            assert small.get(key) == model.get(key)
            if key in model:
                assert small[key] == model[key]
            else:
                with pytest.raises(KeyError):
                    small[key]


def test_one_entry_is_small_and_not_tracked_by_the_collector():
    small = SmallMap()
    small["channel"] = object()
    assert sys.getsizeof(small) <= 48
    assert not gc.is_tracked(small)
