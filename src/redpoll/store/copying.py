"""Copies all records of one record store to another one, which may be of the other kind.

The source is only read. Its versions aren't copied: the target has its own, which are higher, so the directory in Redis
is written again. Its shard key is: what Redis has stays where it is.
"""

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store import dropped
from redpoll.store.errors import StoreError
from redpoll.store.schema import changes, meta, metadata
from redpoll.store.shard_key import put_shard_key, shard_key
from redpoll.store.store import Store, raise_version

__all__ = ["copy"]

_ROWS_AT_ONCE = 500
# Parents before children, as foreign keys need it.
_TABLES = tuple(table for table in metadata.sorted_tables if table not in (meta, changes))


async def copy(source: Store, target: Store) -> dict[str, int]:
    """Copies everything in one transaction, which may take long: open both stores `patient`. Returns the number of rows
    by table.

    Raises StoreError if the target isn't empty, or if a table has another number of rows afterwards.
    """
    async with source.reading() as reading, target.change() as writing:
        present = await _count(writing)
        if any(present.values()):
            contents = ", ".join(f"{rows} rows in {table}" for table, rows in present.items() if rows)
            raise StoreError(f"{target.name} isn't empty, so nothing was copied: it has {contents}")
        copied = {table.name: await _copy_table(reading, writing, table) for table in _TABLES}
        if copied != await _count(writing) or copied != await _count(reading):
            raise StoreError("the copy doesn't have as many rows as the source, so nothing was kept; try again")
        await put_shard_key(writing, await shard_key(reading))
        for endpoint_id, (count, at_s) in (await dropped.counts(reading, None)).items():
            await dropped.note(writing, {endpoint_id: count}, at_s)
        # Rows keep the source's versions, which are lower than the target's.
        await raise_version(writing, for_workers=True)
    return copied


async def _count(connection: AsyncConnection) -> Mapping[str, int]:
    return {
        table.name: (await connection.execute(sa.select(sa.func.count()).select_from(table))).scalar_one()
        for table in _TABLES
    }


async def _copy_table(reading: AsyncConnection, writing: AsyncConnection, table: sa.Table) -> int:
    count = 0
    order = tuple(table.primary_key.columns)
    async with reading.stream(sa.select(table).order_by(*order)) as rows:
        async for batch in rows.mappings().partitions(_ROWS_AT_ONCE):
            written = [dict(row) for row in batch]
            if "version" in table.c:
                written = [{**row, "version": 0} for row in written]
            await writing.execute(sa.insert(table), written)
            count += len(written)
    await _set_next_number(writing, table)
    return count


async def _set_next_number(connection: AsyncConnection, table: sa.Table) -> None:
    """PostgreSQL numbers rows by a sequence, which doesn't notice rows that bring their numbers."""
    column = table.autoincrement_column
    if connection.dialect.name != "postgresql" or column is None:
        return
    last = (await connection.execute(sa.select(sa.func.max(column)))).scalar_one()
    if last is not None:
        sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
        await connection.execute(sa.select(sa.func.setval(sequence, last)))
