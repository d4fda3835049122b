"""The page that compares is made from its table, in which every cell has a mark, a source and a date."""

import datetime
import tomllib

import pytest

import compare

TABLE = tomllib.loads(compare.TABLE.read_text())


def test_page_is_made_from_the_table():
    assert compare.PAGE.read_text() == compare.page(TABLE), "run: .venv/bin/python deploy/compare.py"


def test_every_cell_has_a_mark_and_a_source_with_a_date():
    used = {row["source"] for row in TABLE["licences"]}
    for group in TABLE["groups"]:
        for feature in group["features"]:
            assert set(feature) - {"name", "note"} == set(TABLE["servers"]), feature["name"]
            for server in TABLE["servers"]:
                mark, source = feature[server].split()
                assert mark in compare.MARKS
                used.add(source)
    assert used == set(TABLE["sources"])
    for source in TABLE["sources"].values():
        assert isinstance(source["read"], datetime.date)
        assert source["url"] == "index.md" or source["url"].startswith("https://")


def test_what_others_do_better_comes_first():
    better, *others = TABLE["groups"]
    assert {feature["redpoll"] for feature in better["features"]} == {"no rp"}
    assert {feature["redpoll"] for group in others for feature in group["features"]} == {"yes rp"}


def test_unknown_source_is_an_error():
    table = {**TABLE, "groups": [{"name": "", "text": "", "features": [dict.fromkeys(TABLE["servers"], "yes nobody")]}]}
    with pytest.raises(KeyError):
        compare.page(table)
