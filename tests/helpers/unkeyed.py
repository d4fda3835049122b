"""Where channels are in Redis for the tests' parts without a shard key."""

from redpoll.cluster.redis.keys import Keys

__all__ = ["shard"]

shard = Keys().shard
