"""What Redis stores for an app that is deleted, on a real Redis."""

import pytest

from redpoll.cluster.app_data import remove_app_data
from redpoll.cluster.redis.keys import Keys

CHANNELS = [f"news-{number}" for number in range(100)]


def stored(keys, app_id):
    """What may outlive the connections of an app."""
    for channel in CHANNELS:
        for of in (keys.cached, keys.cache_miss, keys.history, keys.history_meta, keys.resumed, keys.request):
            yield of(app_id, channel)
        for of_shard in (keys.cached_channels, keys.histories):
            yield of_shard(keys.shard(app_id, channel), app_id)


@pytest.mark.parametrize("prefix", ["rp", "", "r*[p]?"])
async def test_data_of_the_app_goes_and_that_of_others_stays(link, prefix):
    keys = Keys(prefix)
    mine = {*stored(keys, "7")}
    others = {
        *(name for app_id in ("77", "a.7", "b", "8") for name in stored(keys, app_id)),
        *(name for channel in CHANNELS for name in (keys.counts("7", channel), keys.members("7", channel))),
        # As another application, or another app, may name its keys.
        *(keys.cached("8", f"7:{channel}") for channel in CHANNELS),
        b"other:{x}:k:7:news",
        keys.spent("7", "20260101"),
    }
    await link.ask_all([(b"SET", name, b"x") for name in (*mine, *others)])
    assert await remove_app_data(link, keys, "7") == len(mine)
    assert {*await link.scan(b"*")} == others
    assert await remove_app_data(link, keys, "7") == 0
