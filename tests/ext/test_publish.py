"""What a request publishes: its checks, commands and description, without a parser.

tests/protocol/test_messages.py has the refusals as clients see them."""

import hiredis
import pytest

from redpoll._publish import CACHED, RULED, Call, Refusal
from redpoll.cluster.redis.keys import Keys
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.messages import limits_of

RULES = (
    HistoryRule(id="abcdef", name="stored-", prefix=True, keep=5, seconds=60, era="1"),
    HistoryRule(id="abcde0", name="news", keep=5, seconds=60, era="1"),
)
APP = App(id="7", name="seven", keys=(), history=RULES, max_channels=3, max_event_name_chars=5, max_data_bytes=10)


def call(*events, app=APP):
    made = Call(limits_of(app), len(events) > 1)
    for names, name, data, socket_id in events:
        made.add(names, name, data, socket_id)
    return made


@pytest.mark.parametrize(
    ("names", "refusal", "name"),
    [
        (["a", "b", "a", "c"], Refusal.TOO_MANY_CHANNELS, None),
        (["a", "private-redpoll.x"], Refusal.RESERVED_CHANNEL, "private-redpoll.x"),
        (["a", "b c"], Refusal.INVALID_CHANNEL, "b c"),
        (["a", "caf\u00e9"], Refusal.INVALID_CHANNEL, "caf\u00e9"),
        (["a", "private-encrypted-b"], Refusal.ENCRYPTED_CHANNEL, "private-encrypted-b"),
        (["private-encrypted-b", "private-encrypted-b"], 0, None),
        (["#server-to-user-1", "a", "a"], 0, None),
    ],
)
def test_channels_are_refused_or_each_counts_once(names, refusal, name):
    made = call((names, "e", "d", None))
    assert made.refusal_of_channels() == refusal
    if name is not None:
        assert made.refused_channel == name
    if not refusal:
        assert made.events_of() == [("e", "d", list(dict.fromkeys(names)), None)]
        assert made.count == len(set(names))


@pytest.mark.parametrize(
    ("members", "refusal"),
    [
        ((None, "d", None), Refusal.NAME_MISSING),
        (("", "d", None), Refusal.NAME_SIZE),
        (("sechs6", "d", None), Refusal.NAME_SIZE),
        (("\u00e9\u00e9\u00e9\u00e9\u00e9", "d", None), 0),
        (("\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9", "d", None), Refusal.NAME_SIZE),
        (("svc:a", "d", None), Refusal.NAME_RESERVED),
        (("e", None, None), Refusal.DATA_MISSING),
        (("e", "x" * 10, None), 0),
        (("e", "\u00e9" * 6, None), Refusal.DATA_SIZE),
        (("e", "", "1.2"), 0),
        *((("e", "d", bad), Refusal.SOCKET_ID) for bad in ("", "1", "1.", ".1", "1.x", "1.2.3", "-1.2", "1.2\n")),
    ],
)
def test_the_other_members_of_an_event(members, refusal):
    assert call((["a"], *members)).refusal_of_event() == refusal


@pytest.mark.parametrize("unknown", ["01.2", "1.02", "9" * 19 + ".1", "1." + "9" * 19])
def test_an_id_that_no_connection_has_excludes_nobody(unknown):
    made = call((["a"], "e", "d", unknown))
    assert made.refusal_of_event() == 0
    assert made.events_of() == [("e", "d", ["a"], None)]


def test_lone_surrogates_are_no_text():
    with pytest.raises(UnicodeEncodeError):
        call((["a"], "e", "\ud800", None))


def test_what_an_event_needs_besides_publish():
    made = call((["a", "cache-a", "news"], "e", "d", None), (["stored-x"], "e", "d", None), (["stored"], "e", "", None))
    assert made.needs() == [0, CACHED, RULED, RULED, 0]
    assert not made.is_plain
    assert call((["a", "stored", "newsletter"], "e", "d", None)).is_plain
    without = App(id="8", name="eight", keys=(), cache_ttl_s=0)
    assert call((["cache-a"], "e", "d", None), app=without).is_plain


def test_each_command_is_for_one_channel_and_names_its_shard():
    keys = Keys("rp", shard_key=b"0" * 16)
    made = call((["a", "b"], "e", "caf\u00e9", "1.2"), (["c"], "f", "", None))
    commands = made.pack(b"SPUBLISH", keys.shards, "ab12")
    assert commands.count == 3
    reader = hiredis.Reader()
    reader.feed(commands.data)
    expected = [
        [b"SPUBLISH", keys.topic("7", "a"), b"e 0 0 1.2 ab12 0 1\necaf\xc3\xa9"],
        [b"SPUBLISH", keys.topic("7", "b"), b"e 0 0 1.2 ab12 0 1\necaf\xc3\xa9"],
        [b"SPUBLISH", keys.topic("7", "c"), b"e 0 0 - ab12 0 1\nf"],
    ]
    assert list(iter(reader.gets, False)) == expected
    each = [
        (keys.shard("7", name), hiredis.pack_command(tuple(command)))
        for name, command in zip("abc", expected, strict=True)
    ]
    assert commands.each() == each


def test_the_description_has_each_name_and_channel_once():
    made = call((["a"], "e", "12", None), (["b"], "e", "\u00e9", None), (["a"], "f", "", None))
    assert made.describe() == ("e, f", ["a", "b"], 4)
    assert call().describe() == ("", [], 0)


def test_a_call_grows_with_what_is_added():
    made = call(*(([f"c{number}"], "e", str(number), None) for number in range(1000)))
    assert [data for _, data, _, _ in made.events_of()] == [str(number) for number in range(1000)]
    assert made.pack(b"PUBLISH", Keys("rp").shards).count == made.count == 1000
