import msgspec
import pytest

from redpoll.protocol.grants import (
    KEPT_S,
    MAX_REVOKED,
    AppGrants,
    Grant,
    RevokedGrants,
    of_channel,
    of_grant,
    of_jti,
    of_user,
)

GRANT = Grant(
    key="k",
    digest=b"\x01" * 32,
    user_id="7",
    user_info=b"",
    id="j",
    expires_at=2_000.0,
    issued_at=1_000.5,
    not_before=1_000.5,
    names=" private-a private-encrypted-b ",
    prefixes="private-org-3- private-encrypted-c- presence-",
    subscribes=True,
    client_events=False,
)
EVERYWHERE = msgspec.structs.replace(GRANT, names=" ", prefixes="")


@pytest.mark.parametrize(
    "channel",
    ["private-a", "private-org-3-", "private-org-3-x", "presence-a", "private-encrypted-b", "private-encrypted-c-1"],
)
def test_names_and_beginnings_open_a_channel(channel):
    assert GRANT.channel_fault(channel) is None


@pytest.mark.parametrize("channel", ["private-ab", "private-", "rivate-a", "private-org-33-x", "x-private-org-3-x"])
def test_nothing_else_does(channel):
    assert GRANT.channel_fault(channel) == f"no pattern of its channels matches {channel}"
    assert msgspec.structs.replace(GRANT, names=" ", prefixes=None).channel_fault("private-a") is not None


def test_a_star_opens_all_but_encrypted_channels():
    """A grant for everything was hardly meant for channels whose key the back end gives out one by one."""
    assert EVERYWHERE.patterns == ["*"]
    assert EVERYWHERE.channel_fault("private-x") is None
    fault = EVERYWHERE.channel_fault("private-encrypted-x")
    assert fault is not None
    assert "shared_secret" in fault


def test_without_subscribe_it_opens_none():
    assert msgspec.structs.replace(GRANT, subscribes=False).channel_fault("private-a") == "its may lacks 'subscribe'"


def test_revoked_by_id_whenever_it_was_issued():
    grants = AppGrants(lambda: 0.0)
    assert not grants.is_revoked(GRANT, "private-a")
    grants.revoke(of_jti("j"), 5)
    assert grants.is_revoked(GRANT, "private-a")
    assert grants.is_revoked(GRANT, None)
    assert not grants.is_revoked(msgspec.structs.replace(GRANT, id=None), "private-a")


def test_revoked_by_user_until_a_later_one_is_issued():
    grants = AppGrants(lambda: 0.0)
    grants.revoke(of_user("8"), 2_000)
    assert not grants.is_revoked(GRANT, "private-a")
    grants.revoke(of_user("7"), 999)
    assert not grants.is_revoked(GRANT, "private-a")
    # Within the same second nobody knows which was first.
    grants.revoke(of_user("7"), 1_000)
    assert grants.is_revoked(GRANT, "private-a")
    assert not grants.is_revoked(msgspec.structs.replace(GRANT, issued_at=1_001.0), None)
    # Without iat it may be older.
    assert grants.is_revoked(msgspec.structs.replace(GRANT, issued_at=0.0), None)


def test_revoked_for_one_channel():
    grants = AppGrants(lambda: 0.0)
    grants.revoke(of_channel("private-a", "7"), 1_500)
    grants.revoke(of_grant("private-b", GRANT.digest.hex()), 1_500)
    for channel, is_revoked in (("private-a", True), ("private-b", True), ("private-c", False), (None, False)):
        assert grants.is_revoked(GRANT, channel) is is_revoked
    later = msgspec.structs.replace(GRANT, issued_at=1_501.0)
    assert not grants.is_revoked(later, "private-a")
    assert grants.is_revoked(later, "private-b")


def test_of_two_revocations_the_later_one_counts():
    table = RevokedGrants(lambda: 100.0)
    assert table.put("1", "sub a", 50)
    assert not table.put("1", "sub a", 40)
    assert not table.put("1", "sub a", 50)
    assert table.put("1", "sub a", 60)
    assert table.put("2", "sub a", 40)
    assert sorted(table) == [("1", "sub a", 60), ("2", "sub a", 40)]
    assert len(table) == 2


def test_revocations_live_as_long_as_a_grant_could():
    now_s = 0.0
    table = RevokedGrants(lambda: now_s)
    for number in range(MAX_REVOKED):
        table.put("1", f"jti {number}", 0)
    now_s = KEPT_S + 1.0
    table.put("1", "jti new", int(now_s))
    assert list(table) == [("1", "jti new", int(now_s))]
    # It can meet no grant any more.
    assert not table.put("1", "jti old", 0)
