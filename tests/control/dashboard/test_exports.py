"""Exports that spreadsheets can read."""

import asyncio
import csv
import io
import json

import pytest

from redpoll.control.dashboard import exports
from redpoll.control.dashboard.exports import encoded
from redpoll.control.dashboard.jobs import Progress

CELLS = (None, True, 2.5, "", " x ", 'a"b', "a,b", "a\r\nb", "ä", ["x", "y"])


async def chunks_of(*chunks):
    for chunk in chunks:
        yield chunk


async def as_csv(*chunks):
    return await (await encoded(chunks_of(*chunks), "csv", Progress())).joined()


async def test_rows_can_have_different_names_and_any_text():
    text = (await as_csv([{"a": 1, "b": 'say "hi",\nthere'}, {"a": None, "c": ["x", "y"]}])).decode()
    assert list(csv.DictReader(io.StringIO(text))) == [
        {"a": "1", "b": 'say "hi",\nthere', "c": ""},
        {"a": "", "b": "", "c": "x y"},
    ]


async def test_cells_are_quoted_as_by_the_standard_library():
    """That takes a hundred times as long for long cells."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["name", "value,"])
    writer.writerows(["x", " ".join(cell) if isinstance(cell, list) else cell] for cell in CELLS)
    rows = [{"name": "x", "value,": cell} for cell in CELLS]
    assert (await as_csv(rows[:4], rows[4:])).decode() == out.getvalue()


async def test_formulas_are_exported_as_text():
    text = (await as_csv([{"a": value} for value in ("=1+1", "+1", "-1", "@x", "\tx", "plain", -1)])).decode()
    assert [row["a"] for row in csv.DictReader(io.StringIO(text))] == [
        "'=1+1",
        "'+1",
        "'-1",
        "'@x",
        "'\tx",
        "plain",
        "-1",
    ]


async def test_export_without_rows_is_a_file():
    assert await as_csv() == b"\r\n"
    assert await (await encoded(chunks_of(), "json", Progress())).joined() == b"[]"


@pytest.mark.parametrize("format", ["csv", "json"])
async def test_rows_of_several_chunks_can_be_reversed(format):
    progress = Progress()
    content = await encoded(chunks_of([{"a": "3"}, {"a": "2"}], [{"a": "1"}]), format, progress)
    text = (await content.joined(reverse=True)).decode()
    rows = json.loads(text) if format == "json" else csv.DictReader(io.StringIO(text))
    assert [row["a"] for row in rows] == ["1", "2", "3"]
    assert (progress.done, content.limit) == (3, "")


@pytest.mark.parametrize("format", ["csv", "json"])
async def test_the_loop_has_its_turn_while_a_long_chunk_is_encoded(format):
    """20,000 rows of 10 kB blocked the control plane for five seconds."""
    loop, passes = asyncio.get_running_loop(), 0

    def look():
        nonlocal passes
        passes += 1
        if not encoding.done():
            loop.call_soon(look)

    rows = [{"event": "e", "data": "x, " * 3_000}] * 5_000
    encoding = asyncio.create_task(encoded(chunks_of(rows), format, Progress()))
    loop.call_soon(look)
    assert len((await encoding).lines) == 5_000
    assert passes > 3


@pytest.mark.parametrize("format", ["csv", "json"])
async def test_file_stops_at_its_limit_of_bytes_and_reads_no_more_rows(monkeypatch, format):
    monkeypatch.setattr(exports, "MAX_BYTES", 1_000)
    asked = []

    async def rows():
        for number in range(100):
            asked.append(number)
            yield [{"a": "x" * 50}] * 3

    content = await encoded(rows(), format, Progress())
    body = await content.joined()
    assert 900 < len(body) <= 1_000
    assert body.count(b"x" * 50) == len(content.lines)
    assert "MiB" in content.limit
    assert len(asked) == len(content.lines) // 3 + 1


async def test_page_says_how_many_rows_are_in_the_file_and_how_to_get_the_others(browser, monkeypatch):
    for limit, sentence in ((100_000, "The file has all rows: 1."), (0, "The file has only the first 0 rows")):
        monkeypatch.setattr(exports, "MAX_ROWS", limit)
        job = (await browser.post("/dashboard/audit/export", find="logged in", format="json")).headers["location"]
        assert len(json.loads((await browser.file_of(job)).body)) == min(limit, 1)
        page = (await browser.get(job)).body.decode()
        assert sentence in page
        assert ("Search for a user" in page) is (limit == 0)
