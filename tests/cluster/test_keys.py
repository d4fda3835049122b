import re
from zlib import crc32

import pytest

from redpoll.cluster.keys import SHARDS, TABLE, TAGS, Keys, shard


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
            keys.told_count(app_id, channel),
            keys.cached(app_id, channel),
            keys.published(app_id, channel, "0123456789abcdef", 3),
            keys.topic(app_id, channel),
        ]
        assert len({slot(name) for name in names}) == 1
        assert slot(names[0]) // 256 == at


def test_every_name_follows_a_row_of_the_table():
    keys = Keys("px")
    at, tag = shard("A", "C"), TAGS[shard("A", "C")].decode()
    day, request = TAGS[shard("A", "%day")].decode(), TAGS[shard("A", "%id:H")].decode()
    built = {
        keys.clock(at),
        keys.worker(at, "W"),
        keys.counts("A", "C"),
        keys.members("A", "C"),
        keys.occupied(at, "A"),
        keys.told_count("A", "C"),
        keys.cached("A", "C"),
        keys.published("A", "C", "ONCE", 0).replace(b"ONCE.0", b"ONCE.INDEX"),
        keys.request("A", "H").replace(b"{%b}" % request.encode(), b"{%b}" % tag.encode()),
        keys.spent("A", "YYYYMMDD").replace(b"{%b}" % day.encode(), b"{%b}" % tag.encode()),
        keys.answers("ID"),
        keys.beat,
        keys.directory,
        keys.directory_version,
        keys.stats("W"),
        keys.topic("A", "C"),
        keys.sys,
    }
    zero = TAGS[0].decode()
    table = {"px:" + row.pattern.replace("{T0}", f"{{{zero}}}").replace("{T}", f"{{{tag}}}") for row in TABLE}
    assert {name.decode() for name in built} == table


def test_sharded_topics_are_published_by_the_sharded_command():
    assert (Keys().publish, Keys(sharded=True).publish) == (b"PUBLISH", b"SPUBLISH")
