import pytest

from redpoll.importing.file_formats import Fault, read
from redpoll.importing.plan import SourceError


def test_aliases_of_yaml_cannot_fill_the_memory():
    levels = "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 20)}]\n" for n in range(9))
    with pytest.raises(SourceError, match="aliases stand for more than"):
        read("yaml", f"a0: &a0 [x]\n{levels}", {}, [])


@pytest.mark.parametrize("text", ["apps: " + "[" * 100_000, "apps: " + "{a: " * 100_000, "- " * 100_000])
def test_yaml_of_any_depth_is_refused(text: str):
    """libyaml's composer overflows the stack at some ten thousand levels. Some releases have a limit of their own."""
    with pytest.raises(SourceError, match=r"^:1: .*(nested too deeply|nesting depth)"):
        read("yaml", text, {}, [])


@pytest.mark.parametrize(
    ("kind", "text", "fault"),
    [
        ("json", '{"apps": [{"id": "a", "id": "b"}]}', Fault("", "an object has the name 'id' twice")),
        ("yaml", "apps:\n  - id: a\n    id: b\n", Fault("apps[0].id", "this name is here twice")),
    ],
)
def test_a_name_that_is_there_twice_is_a_fault(kind: str, text: str, fault: Fault):
    faults: list[Fault] = []
    read(kind, text, {}, faults)
    assert faults == [fault]


@pytest.mark.parametrize("written", ["0123", "1_000", "0x1F", "12:30:45", "01234567", "+7", "2030-1-1", "!!int 0123"])
def test_an_id_or_key_of_yaml_is_the_text_that_is_written(written: str):
    app = read("yaml", f"apps:\n  - id: {written}\n    key: {written}\n    keep: 010\n", {}, [])["apps"][0]
    text = written.removeprefix("!!int ")
    assert app == {"id": text, "key": text, "keep": 8}
