"""The arrays of Laravel's configuration files."""

import pytest

from redpoll.importing.php import Expression, env_value, parse
from redpoll.importing.plan import SourceError


def value_of(php: str, **env: str):
    return parse(f"<?php\nuse App\\Thing;\n\nreturn {php};\n", env)


@pytest.mark.parametrize(
    ("php", "value"),
    [
        ("['a' => 1, \"b\" => [true, FALSE, null]]", {"a": 1, "b": [True, False, None]}),
        ("array('a' => 10_000, 'f' => 1.5, 'n' => -1,)", {"a": 10000, "f": 1.5, "n": -1}),
        ("[ // comment, with ] in it\n 'x' /* and */ => 'it\\'s', # more\n]", {"x": "it's"}),
        ("['a' => (int) '12', 'b' => (bool) 0, 'c' => (string) 5]", {"a": 12, "b": False, "c": "5"}),
        ("[]", []),
        ("[5 => 'five']", {5: "five"}),
    ],
)
def test_literals(php, value):
    assert value_of(php) == value


def test_env_gives_the_value_its_default_or_null():
    php = "[env('A'), env('B', 'default'), env('C'), env('D', 8080), env('E'), env('F', env('A'))]"
    assert value_of(php, A="a", C="true", E="null") == ["a", "default", True, 8080, None, "a"]


def test_truth_values_of_texts_are_those_of_php():
    assert value_of("[(bool) env('A'), (bool) env('B'), (bool) env('C')]", A="0", B="1", C="0.0") == [False, True, True]


def test_explode_gives_a_list():
    assert value_of("['o' => explode(',', env('O', 'a, b,'))]") == {"o": ["a", "b"]}
    assert value_of("['o' => explode(',', env('O', ''))]") == {"o": []}


@pytest.mark.parametrize(
    "php",
    [
        "env('A') === 'https'",
        "Thing::class",
        "$apps",
        "'a' . 'b'",
        '"{$x} y"',
        "function () { return [1, 2]; }",
        "fn ($x) => [$x, 1]",
        "array_map('trim', explode(',', env('A', '')))",
        "env('A') ? ['x' => 1] : []",
        "(int) env('A') * 1000",
        "storage_path('x') ?? null",
        "[...$more, 'x'][0]",
    ],
)
def test_what_only_php_can_compute_keeps_its_text_and_disturbs_nothing_else(php):
    found = value_of(f"['before' => 1, 'it' => {php}, 'after' => ['x' => 2]]")
    assert found["before"] == 1
    assert found["after"] == {"x": 2}
    assert found["it"] == Expression(php)


@pytest.mark.parametrize("php", ["<?php\n$x = 1;", "<?php return ['a' 'b'", "<?php return " + "[" * 200 + ";"])
def test_broken_files_are_refused(php):
    with pytest.raises(SourceError):
        parse(php, {})


@pytest.mark.parametrize(
    "value",
    [
        "'" + "\\'" * 100_000,
        "'\\'\\'" * 40_000,
        "/* " * 100_000,
        "(int) " * 5_000 + "1",
        "9" * 5_000,
        "[" * 5_000,
    ],
    ids=["open text", "many texts", "open comments", "casts", "digits", "arrays"],
)
def test_a_file_made_to_be_slow_or_deep_is_refused(value):
    with pytest.raises(SourceError):
        parse(f"<?php return [{value}];", {})


def test_a_number_without_an_end_stays_an_expression():
    assert parse("<?php return [(int) 1e999];", {}) == [Expression("(int) 1e999")]


@pytest.mark.parametrize(
    ("text", "value"),
    [("null", None), ("(null)", None), ("Empty", ""), ("(true)", True), ("FALSE", False), ("(null", "(null"), ("", "")],
)
def test_words_of_the_environment_are_those_of_laravel(text, value):
    assert env_value(text) == value
