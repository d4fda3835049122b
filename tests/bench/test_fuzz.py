"""The fuzzer's targets agree with the slow parsers on valid inputs and on some that are damaged, and see a difference.

bench/soak/fuzz.py runs them under sanitizers, for long."""

import random

import pytest
from bench.soak import fuzz


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "FOLDER", tmp_path_factory.mktemp("certificate"))
        return fuzz.Targets()


def test_no_target_finds_a_difference(targets):
    corpus = fuzz.seeds(targets.reference)
    assert {data[0] % len(targets.by_byte) for data in corpus} >= {0, 6, 7, 8, 10, 11, 12, 15, 16, 18}
    chance = random.Random(1)
    connections = [data for data in corpus if targets.is_connection(data)]
    others = [data for data in corpus if not targets.is_connection(data)]
    damaged = [fuzz.damage(chance.choice(others), corpus, chance) for _ in range(3000)]
    damaged += [fuzz.damage(chance.choice(connections), corpus, chance) for _ in range(60)]
    for data in corpus + damaged:
        targets.run(data)


def test_valid_publishes_are_taken_and_a_wrong_command_is_a_difference(targets, monkeypatch):
    http = targets.by_byte[8].__self__
    (body, *_) = fuzz.http_seeds()["bodies"]
    http.bodies(body)
    monkeypatch.setattr(http.keys, "publish", b"SPUBLISH")
    http.bodies(body)
    monkeypatch.setattr(http.keys, "topic", lambda app_id, channel: b"other")
    with pytest.raises(fuzz.Difference, match="other"):
        http.bodies(body)


@pytest.mark.parametrize("bits", [b"\0", b"\1"])
def test_a_message_that_is_lost_is_a_difference(targets, monkeypatch, bits):
    """Without TLS and with it."""
    sockets = targets.by_byte[16].__self__
    hello = targets.reference.client_frame(1, b"hello")
    steps = b"\xff" * 4 + bytes([0, len(hello)]) + hello
    sockets.connections(bits + steps)
    monkeypatch.setattr(sockets.recorder, "message_received", lambda self, message: None)
    with pytest.raises(fuzz.Difference, match="hello"):
        sockets.connections(bits + steps)
