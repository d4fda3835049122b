"""How many subscriptions Redis counts on a channel. Not a test."""

from redpoll.cluster.redis.keys import COUNTS_SUM, Keys
from redpoll.cluster.redis.link import Link


async def counted(link: Link, keys: Keys, channel: str, app_id: str = "7") -> int:
    """All subscriptions of a channel. If Redis keeps their sum, it must be right."""
    counts = await link.ask(b"HGETALL", keys.counts(app_id, channel))
    stored = counts.pop(COUNTS_SUM, None)
    total = sum(map(int, counts.values()))
    assert stored is None or int(stored) == total > 0, (channel, stored, counts)
    return total
