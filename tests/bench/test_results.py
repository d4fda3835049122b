"""The pages show the figures of bench/results, and every result has its date, commit and machine."""

import re

import pytest
from bench.compare import plots, render


def test_pages_show_the_results():
    results = render.read_results()
    for page in render.PAGES:
        text = page.read_text()
        assert "<!-- figures: " in text, f"{page} has no table of figures"
        assert render.rendered(text, results) == text, f"{page} is out of date: run python -m bench.compare.render"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_plots_show_the_results(name):
    assert render.is_current(name, render.read_results()), "run python -m bench.compare.render"
    assert f"figures/{name}.svg" in (render.ROOT / "bench" / "README.md").read_text()


def test_plot_is_drawn_for_light_and_dark():
    drawn = plots.svg("memory", render.read_results())
    assert "prefers-color-scheme: dark" in drawn
    assert "a worker's bytes for each" in drawn


def test_changed_figure_changes_the_page():
    results = render.read_results()
    page = render.PAGES[1].read_text()
    results["bus"]["figures"]["per_s"] = 123_000_000_000  # more than any machine gives
    assert "123,000,000,000" in render.rendered(page, results)
    assert "123,000,000,000" not in page


def test_every_result_says_when_where_and_how():
    results = render.read_results()
    assert results
    for name, result in results.items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]), name
        assert re.fullmatch(r"[0-9a-f]{7,}", result["commit"]), name
        assert result["command"].startswith(("python -m bench.", "pytest bench/", "PUSHER_URL")), name
        assert set(result["machine"]) == {"cpu", "cores", "kernel", "python"}, name
        assert result["figures"], name


def test_unknown_table_is_an_error():
    with pytest.raises(KeyError):
        render.rendered("<!-- figures: nothing -->\n<!-- end -->", {})


@pytest.mark.parametrize(("number", "text"), [(179_400, "179,000"), (20_058, "20,100"), (0, "0"), (1848.2, "1,850")])
def test_rounded_keeps_three_digits(number, text):
    assert render.rounded(number) == text
