import string

import pytest

from redpoll.protocol.channels import MAX_NAME_CHARS, Kind, kind_of, needs_auth, valid_name


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


def test_every_allowed_character_and_no_other_of_ascii_makes_a_name():
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
