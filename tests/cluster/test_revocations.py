"""Revoked tokens in Redis: a bounded set, ordered by the record store's version."""

import pytest

from redpoll.cluster import revocations
from redpoll.cluster.revocations import Revocations


@pytest.fixture
def revoked(link, keys):
    return Revocations(link, keys)


async def test_only_later_revocations_are_returned(revoked, link, keys):
    assert await revoked.since(0) == []
    await revoked.add({"a": 5, "b": 6})
    await revoked.add({"c": 7})
    assert await revoked.since(5) == ["b", "c"]
    assert await revoked.since(7) == []
    assert 0 < await link.ask(b"TTL", keys.revoked) <= 86_400


async def test_the_newest_stay(revoked, monkeypatch):
    monkeypatch.setattr(revocations, "_KEEP", 3)
    for version in range(1, 6):
        await revoked.add({f"token {version}": version})
    assert await revoked.since(0) == ["token 3", "token 4", "token 5"]
