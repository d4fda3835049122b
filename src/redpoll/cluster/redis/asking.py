"""Connections for rare questions, to a Sentinel or to a node of a cluster: which server is a master?

redis-py makes them. It is imported only where a URL names such servers, because it takes 7 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redpoll.config.redis_url import RedisUrl

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["connection_to"]


def connection_to(host: str, port: int, url: RedisUrl, username: str | None, password: str | None) -> Redis:
    """With the TLS files of `url`. Connects at the first question; repeats none."""
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    return Redis(
        host=host,
        port=port,
        username=username,
        password=password,
        ssl=url.tls,
        ssl_ca_certs=url.ca_file or None,
        ssl_certfile=url.cert_file or None,
        ssl_keyfile=url.key_file or None,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        decode_responses=True,
    )
