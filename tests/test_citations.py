"""Every page that code and documentation cite is in this repository and has the heading that they name.

A citation is `protocol/README.md "Close codes"`: a Markdown file, relative to the repository, to `src/redpoll` or to
`deploy/docs`, and one of its headings in quotes. It may be wrapped over lines. Links within Markdown are checked as
well, with their anchors, and the modules that READMEs name in backticks.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from redpoll.control.observe.metrics import FAMILIES

ROOT = Path(__file__).parent.parent
SUFFIXES = {".c", ".html", ".js", ".lua", ".md", ".mjs", ".pxd", ".py", ".pyi", ".pyx", ".service", ".toml"}
FOLDERS = (".github", "src", "ext", "tests", "bench", "deploy")

# Pages that only the authors had, their section numbers, and numbers of issues.
FOREIGN = re.compile(
    r"(?<![\w/])(?:asks|cluster|decisions|dependencies|design|failures|findings|machines|peers|protocol|spec|style|words)\.md"
    r"|\bspec(?:ification)? (?:section )?[0-9]"
    r"|\bissue \"?[0-9]"
    r"|\brows? [0-9]+(?:[ ,]+(?:and |to )?[0-9]+)* (?:of failures|\()"
    r"|^(?:async )?\W*Rows? [0-9]+",
    re.IGNORECASE | re.MULTILINE,
)
# A page, and perhaps a heading in quotes after it. A comment may be wrapped between the two.
CITATION = re.compile(r"(?<![\w/.-])([\w./-]*\w\.md)(?![\w-])(?:[`\s#]+\\?\"([^\"\\]+)\\?\")?")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"`((?:\.\./)*(?:\w+/)*\w+\.(?:py|pyx|pxd|lua))`")
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def texts() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.suffix in SUFFIXES]
    for folder in FOLDERS:
        for place, folders, files in os.walk(ROOT / folder):
            # Not entered: other tests make and delete folders in it meanwhile.
            folders[:] = [name for name in folders if name != "node_modules"]
            found += [path for name in files if (path := Path(place, name)).suffix in SUFFIXES]
    found += [path for path in (ROOT / ".ci").glob("*") if path.is_file()]
    return sorted(path for path in found if path != Path(__file__))


TEXTS = texts()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def headings_of(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text())
    return {re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(text)}


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them: lowercase, no punctuation, hyphens for spaces."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings_of(page)}


def page_of(cited: str, by: Path) -> Path | None:
    """Markdown may also name a page relative to itself."""
    bases = [ROOT, ROOT / "src" / "redpoll", ROOT / "deploy" / "docs"] + ([by.parent] if by.suffix == ".md" else [])
    return next((base / cited for base in bases if (base / cited).is_file()), None)


def citations() -> Iterator[tuple[str, Path, str, str]]:
    """Where, by which file, which page, which heading ("": none)."""
    for path in texts():
        text = path.read_text()
        for match in CITATION.finditer(text):
            # The tail of a URL, or of a path where redpoll is installed.
            if FOREIGN.match(text, match.start()) or match[1].startswith("/"):
                continue
            heading = re.sub(r"\s*\n[\s#]*", " ", match[2] or "").strip()
            yield f"{name_of(path)}:{text.count(chr(10), 0, match.start()) + 1}", path, match[1], heading


def foreign_in(path: Path) -> list[str]:
    text = path.read_text()
    return [
        f"{name_of(path)}:{text.count(chr(10), 0, match.start()) + 1} cites {match[0].strip()!r}"
        for match in FOREIGN.finditer(text)
        # Markdown may name a page beside it, such as deploy/failures.md from deploy/README.md.
        if not (path.suffix == ".md" and (path.parent / match[0]).is_file())
    ]


def test_cited_pages_and_headings_exist():
    wrong = []
    for where, path, cited, heading in citations():
        page = page_of(cited, path)
        if page is None:
            wrong.append(f"{where} cites {cited}, which doesn't exist")
        elif heading and heading not in headings_of(page):
            wrong.append(f'{where} cites {cited} "{heading}"; its headings are {sorted(headings_of(page))}')
    assert not wrong, "\n".join(wrong)


def test_no_page_outside_the_repository_is_cited():
    found = [line for path in texts() for line in foreign_in(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", [path for path in TEXTS if path.suffix == ".md"], ids=name_of)
def test_links_lead_somewhere(page: Path):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), f"{target} doesn't exist"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors_of(linked), f"{target}: the anchors are {sorted(anchors_of(linked))}"


def module_exists(name: str, page: Path) -> bool:
    """`name` is relative to the folder of `page`, to its package, `src/redpoll`, the repository or the scripts' folder.
    A name without a folder may also be that of a module further down."""
    package = ROOT / "src" / "redpoll"
    bases = [page.parent, *(base for base in page.parents if package in base.parents), package, ROOT]
    if any((base / name).is_file() for base in [*bases, package / "cluster" / "lua"]):
        return True
    return "/" not in name and any(path.name == name for path in TEXTS if page.parent in path.parents)


@pytest.mark.parametrize(
    "page",
    [path for path in TEXTS if path.name == "README.md" and name_of(path).startswith(("src/", "ext/", "tests/"))],
    ids=name_of,
)
def test_modules_named_by_readmes_exist(page: Path):
    text = page.read_text()
    missing = sorted(name for name in set(MODULE.findall(text)) if not module_exists(name, page))
    assert not missing, f"no such modules: {missing}; name them from this folder, its package or src/redpoll on"


def test_the_page_of_failures_names_tests_metrics_and_log_events_that_exist():
    text = (ROOT / "deploy" / "failures.md").read_text()
    for file in re.findall(r"`((?:tests|bench)/[\w/]+\.py)`", text):
        assert (ROOT / file).is_file(), file
    metrics = {family.name for family in FAMILIES.values()} | {"redpoll_http_requests_total"}
    assert not set(re.findall(r"\bredpoll_\w+", text)) - metrics
    sources = "\n".join(path.read_text() for path in (ROOT / "src" / "redpoll").rglob("*.py"))
    for events in re.findall(r"\b[Ll]og ((?:`[^`]+`(?:, (?:then )?)?)+)", text):
        for event in re.findall(r"`([^`]+)`", events):
            assert f'"{event}"' in sources, f"no log line says {event!r}"
