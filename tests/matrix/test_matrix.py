"""Runs every cell of the matrix, library by feature, and checks MATRIX.md. features.py has what each cell does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from matrix import page
from matrix.features import ROWS, Cell, Row
from matrix.libraries import COLUMNS, Column
from matrix.pullers import PULLERS
from matrix.readers import READERS
from matrix.receivers import RECEIVERS
from matrix.rules import RULES, Rule
from matrix.world import World, running_world

Record = Callable[[str, object], None]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    async with running_world() as running:
        yield running


def test_every_row_names_every_column() -> None:
    columns = {column.id for column in COLUMNS}
    for row in ROWS:
        assert set(row.cells) == columns, f"{row.id}: {set(row.cells) ^ columns}"
    ids = [row.id for row in ROWS] + [rule.id for rule in (*RULES, *READERS, *RECEIVERS, *PULLERS)]
    assert len(set(ids)) == len(ids)


CELLS = [
    pytest.param(row, column, id=f"{row.id}-{column.id}")
    for row in ROWS
    for column in COLUMNS
    if callable(row.cells[column.id])
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("row", "column"), CELLS)
async def test_cell(world: World, row: Row, column: Column, record_property: Record) -> None:
    record_property("cell", (row.id, column.id))
    run = row.cells[column.id]
    assert callable(run)
    await _run(run, Cell(world, row.id, column))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule.id) for rule in (*RULES, *READERS, *RECEIVERS, *PULLERS)])
async def test_rule(world: World, rule: Rule, record_property: Record) -> None:
    record_property("cell", (rule.id, ""))
    await _run(rule.run, Cell(world, rule.id, None))


async def _run(run: Callable[[Cell], Awaitable[None]], cell: Cell) -> None:
    began = len(cell.world.node.news)
    try:
        await run(cell)
    finally:
        await cell.tidy()
    # Uncaught exceptions on the page in Chromium.
    assert not [news for news in cell.world.node.news[began:] if "page_error" in news]


@pytest.mark.asyncio(loop_scope="module")
async def test_page_in_the_repository_shows_this_run(
    world: World, outcomes: dict[tuple[str, str], bool], pytestconfig: pytest.Config
) -> None:
    if set(outcomes) != page.expected():
        pytest.skip("only a part of the matrix was run")
    rendered = page.render(outcomes, world.chromium_version)
    if pytestconfig.getoption("write_matrix", False):
        page.PAGE.write_text(rendered)
    shown = page.PAGE.read_text()
    assert page.without_versions(shown) == page.without_versions(rendered), "pytest tests/matrix --write-matrix"
