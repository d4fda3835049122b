"""Pages: escaping, times, files and their Content-Security-Policy."""

import re
import shutil
from pathlib import Path

import jinja2
import pytest

import redpoll.control.dashboard
from redpoll.control.dashboard import pages

TEMPLATES = Path(redpoll.control.dashboard.__file__).parent / "templates"


def test_templates_have_no_inline_script_or_style():
    for path in TEMPLATES.glob("*.html"):
        text = path.read_text()
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text), path.name
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text)), path.name


def test_templates_do_not_disable_escaping():
    for path in TEMPLATES.glob("*.html"):
        assert not re.search(r"\|\s*safe|autoescape|Markup", path.read_text()), path.name


def test_page_stays_whole_when_an_upgrade_moves_the_files_of_the_server_that_runs(tmp_path):
    folder = shutil.copytree(TEMPLATES, tmp_path / "templates")
    environment = pages._environment.__wrapped__()
    environment.loader = jinja2.FileSystemLoader(folder)
    template = environment.get_template("error.html")
    folder.rename(tmp_path / "old")
    assert environment.get_template("error.html") is template


def test_sizes_and_durations_have_a_suitable_unit():
    assert [pages.size(size) for size in (0, 1023, 1536, 200 * 1024, 5 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "200 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert [pages.span(seconds) for seconds in (1, 90, 3_600, 129_600)] == [
        "1 second",
        "1.5 minutes",
        "1 hour",
        "1.5 days",
    ]


def test_backticks_make_code_and_everything_is_escaped():
    assert pages.ticks("`<a>` or <b>") == "<code>&lt;a&gt;</code> or &lt;b&gt;"


def test_path_segments_are_quoted():
    assert pages.path_to("/dashboard", "a/b?c#d é") == "/dashboard/a%2Fb%3Fc%23d%20%C3%A9"


async def test_pages_have_a_policy_and_are_not_cached(browser):
    reply = await browser.get("/dashboard/apps")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "style-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-content-type-options"] == "nosniff"


async def test_current_static_files_are_cached_forever(browser):
    page = await browser.get("/dashboard/apps")
    path = re.search(rb'href="(/dashboard/static/[^"]+\.css)"', page.body)[1].decode()
    reply = await browser.get(path)
    assert (reply.status, reply.headers["content-type"]) == (200, "text/css; charset=utf-8")
    assert "immutable" in reply.headers["cache-control"]
    old = await browser.get("/dashboard/static/old/dashboard.css")
    assert (old.status, old.headers["cache-control"]) == (200, "no-cache")


@pytest.mark.parametrize("name", ["none.css", "LICENSES.txt", "..%2fpages.py", "%2e%2e"])
async def test_only_scripts_styles_and_images_are_served(browser, name):
    assert (await browser.get(f"/dashboard/static/x/{name}")).status == 404


def test_vendored_files_have_the_versions_in_their_names():
    folder = TEMPLATES.parent / "static"
    assert 'version:"2.0.11"' in (folder / "htmx-2.0.11.min.js").read_text()
    assert "8.6.0" in (folder / "pusher-8.6.0.min.js").read_text()
    assert (folder / "uplot-1.6.32.min.js").exists()
