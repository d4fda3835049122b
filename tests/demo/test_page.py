import re
import subprocess
import sys
from pathlib import Path

import pytest

from redpoll.demo.page import TILES, Tile, example_files, page_files

EXAMPLES = Path(__file__).parent.parent.parent / "deploy" / "examples"
FILES = page_files(server="127.0.0.1:6001", can_kill=True, publish="redpoll publish …")


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_code_that_is_shown_is_code_that_runs(tile: Tile):
    shown = re.sub(r"</?span[^>]*>", "", str(tile.marked_code))
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&#34;", '"'), ("&#39;", "'"), ("&amp;", "&")):
        shown = shown.replace(entity, character)
    assert shown == FILES[f"{tile.name}.js"].decode().rstrip("\n")
    assert str(tile.marked_code) in FILES["index.html"].decode()
    assert 10 <= len(tile.code.replace("\n\n", "\n").splitlines()) <= 23


def test_page_has_no_inline_script_or_style_and_names_no_other_host():
    page = FILES["index.html"].decode()
    assert not re.search(
        r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=|src=\"(?:https?:)?//|href=\"(?:https?:)?//", page
    )
    assert set(re.findall(r'(?:src|href)="([a-z.]+)"', page)) <= {*FILES, "config.js"}


def test_folders_of_examples_are_made_of_these_files(tmp_path: Path):
    subprocess.run([sys.executable, EXAMPLES / "generate", tmp_path], check=True)
    for tile in TILES:
        made = {path.name: path.read_bytes() for path in (tmp_path / tile.name).iterdir()}
        kept = {path.name: path.read_bytes() for path in (EXAMPLES / tile.name).iterdir() if path.is_file()}
        assert kept == made == example_files(tile), f"{tile.name} differs: run deploy/examples/generate"
