"""Configuration files of three kinds, recognised by their content."""

from pathlib import Path

import pytest

from redpoll.importing.documents import load, parse_env
from redpoll.importing.plan import SourceError


def test_environment_file_as_dotenv_reads_it():
    text = """
# a comment
export A=plain value # comment
B="with # hash, \\"quotes\\" and ${A}"
C='${A} as it is'
D = "spaces around"
E=
F="two
lines"
G=${B}/x#y
"""
    assert parse_env(text) == {
        "A": "plain value",
        "B": 'with # hash, "quotes" and plain value',
        "C": "${A} as it is",
        "D": "spaces around",
        "E": "",
        "F": "two\nlines",
        "G": 'with # hash, "quotes" and plain value/x#y',
    }


def test_the_content_tells_the_kind(tmp_path):
    kinds = {"a": '{"port": 1}', "b": "\ufeff[]", "c": "<?php return ['a' => 1];", "d": "A=1\r\nB=2"}
    for name, text in kinds.items():
        (tmp_path / name).write_text(text)
    assert [load(tmp_path / name).kind for name in kinds] == ["json", "json", "php", "env"]
    assert load(tmp_path / "d").env == {"A": "1", "B": "2"}


def test_php_reads_the_env_file_of_its_application_or_the_given_one(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / ".env").write_text("KEY=of the application")
    (tmp_path / "other.env").write_text("KEY=given")
    config = tmp_path / "config" / "reverb.php"
    config.write_text("<?php return ['key' => env('KEY')];")
    assert load(config).data == {"key": "of the application"}
    assert load(config, tmp_path / "other.env").data == {"key": "given"}


@pytest.mark.parametrize("content", [b"", b"no assignment", b"{broken", b"\xff\xfe", b"A=1\n" * 300_000])
def test_other_files_are_refused_with_a_sentence(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SourceError, match="file"):
        load(tmp_path / "file")


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(SourceError, match="No such file"):
        load(tmp_path / "none")


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 100_000, "[" + "9" * 5_000 + "]"], ids=["lists", "objects", "digits"]
)
def test_json_that_python_cant_take_is_refused(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(SourceError):
        load(tmp_path / "file")


def test_no_more_than_the_bound_is_read():
    with pytest.raises(SourceError, match="more than 1048576 bytes"):
        load(Path("/dev/zero"))
