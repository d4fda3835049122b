import pytest

from redpoll.protocol import effects
from redpoll.protocol.effects import AskHistory, Join
from redpoll.protocol.history import Position, Rewind
from redpoll.protocol.presence import Member

KINDS = [getattr(effects, name) for name in effects.__all__ if name != "Effect"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_effect_is_one_of_effect_and_cannot_be_changed(kind):
    assert kind in effects.Effect.__args__
    assert kind.__struct_config__.frozen
    assert len(KINDS) == len(effects.Effect.__args__)


def test_effects_are_compared_by_what_they_say():
    assert Join("a", Member("7", b"")) == Join("a", Member("7", b""), None, False)
    assert Join("a", None, Rewind(count=1)) != Join("a", None, Rewind(count=2))
    assert AskHistory("a", 5, None, Position("e", 1)) != AskHistory("a", 5, Position("e", 1), None)
    with pytest.raises(AttributeError):
        Join("a", None).channel = "b"
