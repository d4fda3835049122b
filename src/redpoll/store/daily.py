"""The number of messages that each app used of its daily limit: a copy that survives the loss of Redis' counters.

Days are UTC, as `YYYYMMDD`. cluster/quota.py counts; control/publish/daily_limit.py copies the counters here every
minute.
"""

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import daily, insert_of

__all__ = ["put", "read", "remove_before"]


async def read(connection: AsyncConnection, day: str) -> dict[str, int]:
    """The count of every app on `day`, by app id. Apps without messages are missing."""
    rows = await connection.execute(sa.select(daily.c.app_id, daily.c.used).where(daily.c.day == day))
    return {row.app_id: row.used for row in rows}


async def put(connection: AsyncConnection, day: str, used: Mapping[str, int]) -> None:
    """Writes counters of `day`. A smaller count than the stored one is ignored, because Redis has lost its counter."""
    if not used:
        return
    row = insert_of(connection.dialect.name)(daily)
    statement = row.on_conflict_do_update(
        index_elements=[daily.c.app_id, daily.c.day],
        set_={"used": sa.case((row.excluded.used > daily.c.used, row.excluded.used), else_=daily.c.used)},
    )
    await connection.execute(statement, [{"app_id": app, "day": day, "used": count} for app, count in used.items()])


async def remove_before(connection: AsyncConnection, day: str) -> None:
    """Removes the counters of all days before `day`."""
    await connection.execute(sa.delete(daily).where(daily.c.day < day))
