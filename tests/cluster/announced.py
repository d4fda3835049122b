"""The key with the subscription_count that a channel's subscribers were sent last. Only scripts use it."""


def announced_count(keys, app_id: str, channel: str) -> bytes:
    return b"%bn:%b:%b" % (keys.shards.head(app_id, channel), app_id.encode(), channel.encode())
