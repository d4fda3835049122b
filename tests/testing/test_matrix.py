"""The cells of the matrix, library by feature, over the fake. `fake_rows.py` lists those that don't apply, and why.

In the suite, one library of each kind; `pytest --long` takes all but Chromium.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from helpers.lengths import amount
from matrix.features import ROWS, Cell, Row
from matrix.libraries import COLUMNS, Column
from testing.fake_rows import ROWS_WITHOUT
from testing.fake_world import FakeWorld, running_fake_world

LIBRARIES = amount({"pusher_js", "pypi"}, {column.id for column in COLUMNS} - {"chromium"})
CELLS = [
    pytest.param(row, column, id=f"{row.id}-{column.id}")
    for row in ROWS
    for column in COLUMNS
    if callable(row.cells[column.id]) and column.id in LIBRARIES and row.id not in ROWS_WITHOUT
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[FakeWorld]:
    async with running_fake_world() as running:
        yield running


def test_every_row_that_does_not_apply_is_a_row() -> None:
    assert set(ROWS_WITHOUT) <= {row.id for row in ROWS}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("row", "column"), CELLS)
async def test_cell_over_the_fake(world: FakeWorld, row: Row, column: Column) -> None:
    run = row.cells[column.id]
    assert callable(run)
    cell = Cell(world, row.id, column)
    try:
        await run(cell)
    finally:
        await cell.tidy()
