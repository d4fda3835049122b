"""The files of the demo's page and of the folders in deploy/examples/, made of what is in web/."""

import re
from importlib import resources
from typing import Final, NamedTuple

import jinja2
from markupsafe import Markup, escape

__all__ = ["TILES", "Tile", "example_files", "page_files"]

_WEB: Final = resources.files("redpoll.demo") / "web"
# What the server offers or the dashboard uses isn't in the package twice.
_OF_OTHERS: Final = {
    "pusher.js": ("control", "dashboard/static/pusher-8.6.0.min.js"),
    "redpoll.js": ("control", "static/redpoll.js"),
    "icon.svg": ("control", "dashboard/static/icon.svg"),
    "echo.js": ("demo", "web/echo-2.5.0.js"),
}
_MARKED: Final = re.compile(r"(?P<comment>//.*)|(?P<string>`[^`]*`|\"[^\"]*\")")


class Tile(NamedTuple):
    """One example. `scripts` are the libraries that it loads, `code` is the script that runs and is shown."""

    name: str
    title: str
    lead: str
    scripts: tuple[str, ...]

    @property
    def markup(self) -> str:
        return _text(f"tiles/{self.name}.html")

    @property
    def code(self) -> str:
        return _text(f"tiles/{self.name}.js")

    @property
    def marked_code(self) -> Markup:
        """The code as HTML, with its comments and strings marked."""
        code, parts, at = self.code.rstrip("\n"), [], 0
        for match in _MARKED.finditer(code):
            parts += [
                escape(code[at : match.start()]),
                Markup('<span class="{}">{}</span>').format(match.lastgroup, match[0]),
            ]
            at = match.end()
        return Markup("").join([*parts, escape(code[at:])])


TILES: Final = (
    Tile(
        "chat",
        "Chat with presence",
        "Who is here, and what they say. A history rule keeps the last messages for a reload.",
        ("pusher.js", "echo.js"),
    ),
    Tile("cursors", "Live cursors", "Each page sends its position straight to the others.", ("pusher.js",)),
    Tile("ticker", "Ticker with history", "Reload the page: the last minute is still there.", ("pusher.js",)),
    Tile("text", "Text, word by word", "As a language model writes it. No word is lost.", ("pusher.js", "redpoll.js")),
)


def _text(name: str) -> str:
    return (_WEB / name).read_text()


def _content(name: str) -> bytes:
    if name in _OF_OTHERS:
        package, path = _OF_OTHERS[name]
        return resources.files(f"redpoll.{package}").joinpath(path).read_bytes()
    return (_WEB / name).read_bytes()


def _render(template: str, **values: object) -> bytes:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.from_string(_text(template)).render(**values).encode()


def page_files(*, server: str, can_kill: bool, publish: str) -> dict[str, bytes]:
    """The demo's files by name. `server` is the host and port of the server, `publish` a command that publishes, and
    `can_kill` says whether the page may end processes of the server."""
    files = {name: _content(name) for name in (*_OF_OTHERS, "style.css", "page.css", "page.js")}
    files |= {f"{tile.name}.js": tile.code.encode() for tile in TILES}
    files["index.html"] = _render("page.html", tiles=TILES, server=server, can_kill=can_kill, publish=publish)
    return files


def example_files(tile: Tile) -> dict[str, bytes]:
    """The files of this example's folder by name, with the back end."""
    files = {name: _content(name) for name in (*tile.scripts, "style.css")}
    files[f"{tile.name}.js"] = tile.code.encode()
    files["index.html"] = _render("example.html", tile=tile)
    files["backend.py"] = resources.files("redpoll.demo").joinpath("backend.py").read_bytes()
    return files
