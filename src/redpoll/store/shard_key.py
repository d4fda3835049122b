"""The key that says in which of Redis' shards a channel is: a row of `meta`, 16 random bytes in hex that a store gets
when it is created (cluster/README.md "Shards and stamps").

"" in stores that an earlier redpoll created: their channels stay where CRC-32 puts them, and so do their histories. The
key of a store never changes while Redis has data of it. It is a secret.
"""

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import meta, state_facts

__all__ = ["put_shard_key", "shard_key"]

_NAME = "shard_key"


async def shard_key(connection: AsyncConnection) -> str:
    """The store's key in hex, or ""."""
    result = await connection.execute(sa.select(meta.c.value).where(meta.c.name == _NAME))
    return str(result.scalar_one())


async def put_shard_key(connection: AsyncConnection, key: str) -> None:
    """Gives a store that no server has used yet the key of another one."""
    for name, value in {_NAME: key, **state_facts(keyed=bool(key))}.items():
        await connection.execute(sa.update(meta).where(meta.c.name == name).values(value=value))
