"""Links to Redis for tests, and what they are connected with. Not a test."""

from typing import Any

from redpoll.cluster.redis.cluster_link import ClusterLink
from redpoll.cluster.redis.link import Link


def quick_link(url: str) -> Link:
    """The link for any URL, which reconnects within 50 ms."""
    if url.startswith("redis+cluster:"):
        return ClusterLink(url, first_delay_s=0.01)
    return Link(url, first_delay_s=0.01, max_delay_s=0.05)


def transports(link: Link) -> list[Any]:
    """Those of the link's present connections: one, or one to each master of a Cluster."""
    links = link._links.values() if isinstance(link, ClusterLink) else (link,)
    return [part._connection._transport for part in links if part._connection is not None]
