"""Revoked grants in the record store, on both databases."""

import pytest

from redpoll.protocol.apps import App
from redpoll.store import apps as app_rows
from redpoll.store import revoked_grants


@pytest.fixture
async def with_app(connection):
    await app_rows.add(connection, App(id="7", name="x", keys=()))
    return connection


async def test_of_a_subject_the_latest_revocation_stays(with_app):
    await revoked_grants.add(with_app, [("7", "sub ann", 5), ("7", "jti é", 6)])
    await revoked_grants.add(with_app, [("7", "sub ann", 4)])
    await revoked_grants.add(with_app, [("7", "jti é", 9), ("unknown", "jti x", 9)])
    assert sorted(await revoked_grants.everything(with_app)) == [("7", "jti é", 9), ("7", "sub ann", 5)]


async def test_old_revocations_are_removed(with_app):
    await revoked_grants.add(with_app, [("7", "a", 5), ("7", "b", 6), ("7", "c" * 400, 7)])
    await revoked_grants.remove_before(with_app, 6)
    assert sorted(subject for _, subject, _ in await revoked_grants.everything(with_app)) == ["b", "c" * 400]
