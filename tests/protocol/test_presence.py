import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll.protocol.errors import ClientError
from redpoll.protocol.presence import Member, Roster, parse_member


@pytest.mark.parametrize(
    ("channel_data", "member"),
    [
        ('{"user_id":10,"user_info":{"name":"Mr. Channels"}}', Member("10", b'{"name":"Mr. Channels"}')),
        ('{"user_id":"10"}', Member("10", b"")),
        ('{"user_id":"a","user_info":null}', Member("a", b"")),
        ('{"user_id":"a","user_info":{}}', Member("a", b"")),
        ('{"user_id":"a","user_info": { } , "more":[1]}', Member("a", b"")),
        ('{"user_id":0}', Member("0", b"")),
        ('{"user_id":-7}', Member("-7", b"")),
        ('{"user_id":123456789012345678901234567890}', Member("123456789012345678901234567890", b"")),
        ('{"user_id":"a","user_info":0}', Member("a", b"0")),
        ('{"user_id":"a","user_info":""}', Member("a", b'""')),
        ('{"user_id":"a","user_info":[]}', Member("a", b"[]")),
        ('{"user_id":"a","user_info":false}', Member("a", b"false")),
        (
            '{"user_id":"a\\u0000\\n\\"é","user_info":{ "b" : 1, "a" : 2 }}',
            Member('a\x00\n"é', b'{"b":1,"a":2}'),
        ),
    ],
)
def test_ids_become_strings_and_infos_compact_json(channel_data, member, app):
    assert parse_member(channel_data, app) == member


@pytest.mark.parametrize(
    "channel_data",
    [
        "",
        "null",
        "[]",
        "7",
        "{}",
        '{"user_info":{}}',
        '{"user_id":null}',
        '{"user_id":true}',
        '{"user_id":1.5}',
        '{"user_id":{}}',
        '{"user_id":["a"]}',
        '{"user_id":""}',
        '{"user_id":"' + "x" * 129 + '"}',
        '{"user_id":' + "9" * 129 + "}",
        '{"user_id":' + "9" * 5000 + "}",
        '{"user_id":"\\ud800"}',
        '{"user_id":"\\ud800abcdefgh"}',
        '{"user_id":"\udc80"}',
        '{"user_id":"a","user_info":"\\ud800"}',
        '{"user_id":"a","user_info":1e999}',
        '{"user_id":"a","user_info":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"user_id":"a","user_info":' + '{"a":' * 100_000,
        '{"user_id":"a"',
    ],
    ids=lambda text: ascii(text[:40]),
)
def test_malformed_members_are_a_client_error(channel_data, app):
    with pytest.raises(ClientError) as refusal:
        parse_member(channel_data, app)
    assert refusal.value.code is None
    assert refusal.value.message.startswith("Invalid channel_data: ")
    refusal.value.message.encode()


def test_ids_may_have_128_characters(app):
    assert parse_member(json.dumps({"user_id": "é" * 128}), app).user_id == "é" * 128


def test_the_info_is_limited_by_the_app_in_bytes(app, changed):
    small = changed(app, max_user_info_bytes=10)
    assert parse_member('{"user_id":"a","user_info": "12345678" }', small).user_info == b'"12345678"'
    assert parse_member('{"user_id":"a","user_info":"éééé"}', small).user_info == '"éééé"'.encode()
    with pytest.raises(ClientError, match=r"11 bytes.*allows 10"):
        parse_member('{"user_id":"a","user_info":"123456789"}', small)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@given(user_id=JSON, user_info=JSON)
def test_any_accepted_member_can_be_put_into_every_frame(user_id, user_info, app):
    try:
        member = parse_member(json.dumps({"user_id": user_id, "user_info": user_info}), app)
    except ClientError:
        return
    roster = Roster()
    roster.add(member.user_id, member.user_info)
    info = {} if user_info is None else user_info
    assert json.loads(roster.snapshot()) == {
        "presence": {"count": 1, "ids": [str(user_id)], "hash": {str(user_id): info}}
    }


def test_a_second_tab_does_not_make_a_second_member():
    roster = Roster()
    assert roster.add("7", b'{"n":1}')
    assert not roster.add("7", b'{"n":1}')
    assert len(roster) == 1
    assert "7" in roster


@pytest.mark.parametrize("rest", ["", " and more"])
def test_a_cut_emoji_is_named(app, rest):
    with pytest.raises(ClientError, match="half of a surrogate pair, such as a cut emoji"):
        parse_member(json.dumps({"user_id": "7", "user_info": {"name": f"Anna \ud83d{rest}"}}), app)


def test_the_latest_info_that_is_not_empty_is_used():
    roster = Roster()
    roster.add("7", b"")
    roster.add("7", b'{"n":1}')
    roster.add("7", b"")
    assert roster["7"] == b'{"n":1}'
    roster.add("7", b'{"n":2}')
    assert roster["7"] == b'{"n":2}'


def test_a_user_without_info_is_removed_like_any_other():
    roster = Roster()
    roster.add("7", b"")
    assert roster.remove("7")
    assert not roster.remove("7")
    assert roster.add("7", b"")


def test_a_snapshot_has_all_members_in_order_of_arrival():
    roster = Roster()
    roster.add("2", b'{"name":"A"}')
    roster.add('q"\n', b"")
    assert roster.snapshot() == (
        b'{"presence":{"count":2,"ids":["2","q\\"\\n"],"hash":{"2":{"name":"A"},"q\\"\\n":{}}}}'
    )


def test_the_snapshot_of_an_empty_roster_is_valid():
    assert json.loads(Roster().snapshot()) == {"presence": {"count": 0, "ids": [], "hash": {}}}
