import random

import pytest

from redpoll.loop.parted_dict import PartedDict


def test_random_changes_have_the_outcome_that_a_dict_gives():
    randomness = random.Random(7)
    parted: PartedDict[tuple[str, str], int] = PartedDict()
    expected: dict[tuple[str, str], int] = {}
    for number in range(5_000):
        key = ("1", f"channel-{randomness.randrange(800)}")
        if randomness.random() < 0.6:
            parted[key] = expected[key] = number
        elif key in expected:
            del parted[key], expected[key]
        else:
            with pytest.raises(KeyError):
                del parted[key]
        assert parted.get(key) == expected.get(key)
        assert len(parted) == len(expected)
    assert sorted(parted.values()) == sorted(expected.values())
    assert all(parted[key] == value for key, value in expected.items())
    with pytest.raises(KeyError):
        parted["1", "missing"]


def test_empty_one_is_false():
    parted: PartedDict[str, int] = PartedDict()
    assert not parted
    parted["a"] = 1
    assert parted
    del parted["a"]
    assert not parted
    assert list(parted.values()) == []


def test_items_that_stay_are_visited_once_while_others_come_and_go():
    parted: PartedDict[int, int] = PartedDict()
    for key in range(1_000):
        parted[key] = key
    visited = []
    for value in parted.values_in_parts():
        visited.append(value)
        if value < 1_000:
            parted[1_000 + value] = 1_000 + value
            if value % 2 == 0 and parted.get(value + 1) is not None:
                del parted[value + 1]
    assert set(range(0, 1_000, 2)) <= set(visited)
    assert len(visited) == len(set(visited))
