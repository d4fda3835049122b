import string

import pytest

from redpoll.protocol.channels import (
    CONSOLE,
    MAX_NAME_CHARS,
    OWN_PREFIX,
    Kind,
    is_cache,
    is_encrypted,
    is_reserved,
    kind_of,
    needs_auth,
    valid_name,
)


@pytest.mark.parametrize(
    ("channel", "kind"),
    [
        ("news", Kind.PUBLIC),
        ("cache-news", Kind.PUBLIC),
        ("private-x", Kind.PRIVATE),
        ("private-cache-x", Kind.PRIVATE),
        ("private-encrypted-x", Kind.PRIVATE),
        ("private-encrypted-cache-x", Kind.PRIVATE),
        ("presence-x", Kind.PRESENCE),
        ("presence-cache-x", Kind.PRESENCE),
        ("#server-to-user-7", Kind.USER),
        # Prefixes are anchored, end with the dash, and have a case.
        ("my-private-x", Kind.PUBLIC),
        ("cache-private-x", Kind.PUBLIC),
        ("cache-presence-x", Kind.PUBLIC),
        ("private", Kind.PUBLIC),
        ("privatex", Kind.PUBLIC),
        ("Private-x", Kind.PUBLIC),
        ("presence_x", Kind.PUBLIC),
    ],
)
def test_the_kind_follows_from_the_anchored_prefix(channel: str, kind: Kind):
    assert kind_of(channel) is kind
    assert needs_auth(channel) == (kind in (Kind.PRIVATE, Kind.PRESENCE))


def test_allowed_characters_of_names():
    allowed = set(string.ascii_letters + string.digits + "-_=@,.;")
    assert {chr(code) for code in range(128) if valid_name(chr(code))} == allowed


@pytest.mark.parametrize(
    "name",
    ["", "a b", "a/b", "a:b", "x\n", "\nx", "é", "a#b", "#server-to-user-7", "x" * (MAX_NAME_CHARS + 1)],
)
def test_other_names_are_refused(name: str):
    assert not valid_name(name)


def test_names_of_200_characters_are_allowed():
    assert valid_name("private-" + "x" * 192)


@pytest.mark.parametrize(
    ("channel", "caches", "encrypted"),
    [
        ("cache-x", True, False),
        ("private-cache-x", True, False),
        ("presence-cache-x", True, False),
        ("private-encrypted-cache-x", True, True),
        ("private-encrypted-x", False, True),
        ("private-x", False, False),
        ("presence-x", False, False),
        ("x", False, False),
        # Anchored, in this order, with the dash.
        ("my-cache-x", False, False),
        ("private-my-cache-x", False, False),
        ("private-cache-encrypted-x", True, False),
        ("presence-encrypted-x", False, False),
        ("presence-encrypted-cache-x", False, False),
        ("encrypted-x", False, False),
        ("cachex", False, False),
        ("private-encryptedx", False, False),
        ("#server-to-user-cache-x", False, False),
    ],
)
def test_caching_and_encryption_follow_from_the_prefix_and_change_no_kind(channel, caches, encrypted):
    assert (is_cache(channel), is_encrypted(channel)) == (caches, encrypted)
    assert needs_auth(channel) == channel.startswith(("private-", "presence-"))


def test_of_the_reserved_names_only_the_console_is_a_channel():
    assert [is_reserved(name) for name in (CONSOLE, OWN_PREFIX, OWN_PREFIX + "x")] == [False, True, True]
    assert not is_reserved("private-redpoll")
