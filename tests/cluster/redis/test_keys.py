import re
from pathlib import Path
from zlib import crc32

import pytest

from cluster.announced import announced_count
from helpers.unkeyed import shard
from redpoll.cluster.redis import keys as keys_module
from redpoll.cluster.redis.keys import CONSOLE_TOPIC, SHARDS, TAGS, Keys, cap_of_shard, share_of_limit


def crc16(data: bytes) -> int:
    """Redis' CRC16 (XMODEM), bit by bit."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


def slot(key: bytes) -> int:
    tag = re.search(rb"\{(.+?)\}", key)
    assert tag is not None
    return crc16(tag[1]) % 16384


def test_each_tag_is_the_smallest_number_in_its_64th_of_the_slots():
    for at, tag in enumerate(TAGS):
        owners = [n for n in range(int(tag) + 1) if crc16(b"%d" % n) % 16384 // 256 == at]
        assert owners == [int(tag)]


def test_the_largest_tag_is_343():
    assert max(int(tag) for tag in TAGS) == 343


@pytest.mark.parametrize("masters", [2, 4, 16, 64])
def test_shards_spread_evenly_over_masters(masters):
    slots = [slot(Keys().clock(at)) for at in range(SHARDS)]
    owned = [slot * masters // 16384 for slot in slots]
    assert {owned.count(master) for master in range(masters)} == {SHARDS // masters}


def test_keys_and_topic_of_a_channel_lie_in_one_slot():
    keys = Keys()
    for number in range(200):
        app_id, channel = "12", f"presence-room-{number}"
        at = shard(app_id, channel)
        assert at == crc32(f"{app_id}:{channel}".encode()) & 63
        names = [
            keys.clock(at),
            keys.worker(at, "0123456789ab.3.0"),
            keys.counts(app_id, channel),
            keys.members(app_id, channel),
            keys.occupied(at, app_id),
            announced_count(keys, app_id, channel),
            keys.cached(app_id, channel),
            keys.cached_channels(at, app_id),
            keys.history(app_id, channel),
            keys.history_meta(app_id, channel),
            keys.histories(at, app_id),
            keys.outbox(at),
            keys.left(at),
            keys.cache_miss(app_id, channel),
            keys.published(app_id, channel, "0123456789abcdef", 3),
            keys.topic(app_id, channel),
        ]
        assert len({slot(name) for name in names}) == 1
        assert slot(names[0]) // 256 == at


def test_every_name_follows_a_row_of_the_table_in_the_readme():
    keys = Keys("px")
    at, tag = shard("A", "C"), TAGS[shard("A", "C")].decode()
    day, request = TAGS[shard("A", "%day")].decode(), TAGS[shard("A", "%id:H")].decode()
    user, watched = TAGS[shard("A", "%u:U")].decode(), TAGS[shard("A", CONSOLE_TOPIC)].decode()
    placed = TAGS[shard("A", "%places")].decode()
    traced = TAGS[shard("", "RUN")].decode()
    limited = TAGS[shard("", "ADDRESS")].decode()
    called = TAGS[shard("", "ID")].decode()
    boxed, session = TAGS[shard("", "RUN.7")].decode(), TAGS[shard("", "N/S")].decode()
    built = {
        keys.clock(at),
        keys.canary(at, "RUN", 7).replace(b"7", b"K"),
        keys.mailbox("RUN", 7).replace(b"{%b}" % boxed.encode(), b"{%b}" % tag.encode()).replace(b"N.7", b"N.K"),
        keys.fallback("KEY", "N/S").replace(b"{%b}" % session.encode(), b"{%b}" % tag.encode()),
        keys.worker(at, "W"),
        keys.counts("A", "C"),
        keys.members("A", "C"),
        keys.occupied(at, "A"),
        announced_count(keys, "A", "C"),
        keys.cached("A", "C"),
        keys.cache_miss("A", "C"),
        keys.cached_channels(at, "A"),
        keys.history("A", "C"),
        keys.history_meta("A", "C"),
        keys.histories(at, "A"),
        keys.outbox(at),
        keys.left(at),
        keys.published("A", "C", "ONCE", 0).replace(b"ONCE.0", b"ONCE.INDEX"),
        keys.request("A", "H").replace(b"{%b}" % request.encode(), b"{%b}" % tag.encode()),
        keys.spent("A", "YYYYMMDD").replace(b"{%b}" % day.encode(), b"{%b}" % tag.encode()),
        keys.counted("A", "ONCE").replace(b"{%b}" % day.encode(), b"{%b}" % tag.encode()),
        keys.places("A").replace(b"{%b}" % placed.encode(), b"{%b}" % tag.encode()),
        keys.resumed("A", "U").replace(b"{%b}" % user.encode(), b"{%b}" % tag.encode()),
        keys.answers("ID"),
        keys.debug("A"),
        keys.beat,
        keys.nodes,
        keys.leader,
        keys.drained,
        keys.directory,
        keys.directory_version,
        keys.revoked,
        keys.revoked_grants,
        keys.traces("RUN").replace(b"{%b}" % traced.encode(), b"{%b}" % tag.encode()),
        keys.stats("RUN.K"),
        keys.stats_by_app("RUN.K"),
        keys.topic("A", "C"),
        keys.topic("A", CONSOLE_TOPIC).replace(b"{%b}" % watched.encode(), b"{%b}" % tag.encode()),
        keys.sys,
        keys.here_of(at, "RUN.K"),
        keys.roll_call("ID").replace(b"{%b}" % called.encode(), b"{%b}" % tag.encode()),
        keys.news,
        keys.records,
        keys.controls,
        keys.nothing,
        keys.ticket_key(7).replace(b"7", b"PERIOD"),
        keys.rate("ADDRESS").replace(b"{%b}" % limited.encode(), b"{%b}" % tag.encode()),
    }
    zero = TAGS[0].decode()
    page = (Path(keys_module.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| `(\{T0?\}:.+?)` \|", page, re.MULTILINE)
    table = {"px:" + row.replace("{T0}", f"{{{zero}}}").replace("{T}", f"{{{tag}}}") for row in rows}
    assert {name.decode() for name in built} == table


@pytest.mark.parametrize(("most", "share"), [(1, 1), (32, 1), (33, 2), (10_000, 313), (1_000_000, 31_250)])
def test_cap_on_channels_that_store_something_is_shared_by_the_shards_with_room_to_spare(most, share):
    assert cap_of_shard(most) == share


@pytest.mark.parametrize(
    ("limit", "signed", "public"), [(1, 0, 0), (6_399, 0, 0), (6_400, 50, 25), (1_000_000, 7_812, 3_906)]
)
def test_share_of_a_small_limit_is_nothing_and_of_a_large_one_half_of_an_even_share(limit, signed, public):
    assert (share_of_limit(limit, signed=True), share_of_limit(limit, signed=False)) == (signed, public)


def test_sharded_topics_are_published_by_the_sharded_command():
    assert (Keys().publish, Keys(sharded=True).publish) == (b"PUBLISH", b"SPUBLISH")
