"""Whoever has the sockets keeps the whole promise."""

import inspect

import pytest

from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.worker.hub import Hub

WORDS = [name for name in vars(MembershipEvents) if not name.startswith("_")]


@pytest.mark.parametrize("word", WORDS)
def test_hub_takes_every_word_with_the_same_arguments(word):
    promised = inspect.signature(getattr(MembershipEvents, word))
    assert list(inspect.signature(getattr(Hub, word)).parameters) == list(promised.parameters)
