"""Renders the templates and serves static files.

Templates escape everything and have no inline script or style, so the Content-Security-Policy can forbid both. A time
is a `<time>` element with UTC text, which the page's script changes to the reader's time zone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from redpoll import __version__
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response, header_line
from redpoll.control.observe.debugging import is_debugged
from redpoll.protocol.channels import valid_name
from redpoll.protocol.errors import ApiError

if TYPE_CHECKING:
    import jinja2

__all__ = ["SECURITY", "Pages", "Part", "StaticFiles", "iso", "part_of", "path_to"]

_HTML: Final = b"Content-Type: text/html; charset=utf-8\r\n"
# Headers of every response of the dashboard.
SECURITY: Final = (
    b"X-Content-Type-Options: nosniff\r\n"
    b"X-Frame-Options: DENY\r\n"
    b"Referrer-Policy: same-origin\r\n"
    b"Cross-Origin-Opener-Policy: same-origin\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\n"
)
_TYPES: Final = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


def path_to(path: str, *segments: str) -> str:
    """A path followed by segments, which are quoted."""
    return "/".join((path, *(quote(segment, safe="") for segment in segments)))


def iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(at_s: float | None, how: str = "ago") -> Markup:
    """A time; `how` is `ago` ("3 minutes ago"), `time` or `date`. None is shown as "never"."""
    if at_s is None:
        return Markup('<span class="faint">never</span>')
    text = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" data-how="{}">{}</time>').format(iso(at_s), how, text)


def size(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def span(seconds: float) -> str:
    """A duration in the largest unit that is not larger than it."""
    for unit_s, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= unit_s:
            number = round(seconds / unit_s, 1)
            return f"{number:g} {unit}{'' if number == 1 else 's'}"
    return f"{seconds:g} second{'' if seconds == 1 else 's'}"


def _elapsed(microseconds: int) -> str:
    """A short duration: "180 µs", "3.2 ms", "1.4 s"."""
    if microseconds < 1_000:
        return f"{microseconds} µs"
    for size, unit in ((1_000, "ms"), (1_000_000, "s")):
        if microseconds < size * 1_000 or unit == "s":
            value = microseconds / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"
    raise AssertionError


def ticks(text: str) -> Markup:
    """Shows words between backticks as code."""
    parts = text.split("`")
    return Markup("").join(Markup("<code>{}</code>" if at % 2 else "{}").format(part) for at, part in enumerate(parts))


def _plural(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class StaticFiles:
    """Scripts and styles, read once. Their path contains a digest of all files, so browsers may cache them forever."""

    def __init__(self) -> None:
        folder = resources.files("redpoll.control.dashboard").joinpath("static")
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}
        digest = hashlib.sha256()
        for name in sorted(files):
            digest.update(name.encode() + files[name])
        self.edition = digest.hexdigest()[:12]
        self._answers = {
            name: (body, header_line("Content-Type", _TYPES[name.rpartition(".")[2]])) for name, body in files.items()
        }

    def path(self, name: str) -> str:
        return f"/dashboard/static/{self.edition}/{name}"

    async def show(self, request: Request) -> Response:
        """GET /dashboard/static/{edition}/{name}. With the digest of another version it returns the current file."""
        edition, name = request.parameters
        answer = self._answers.get(name)
        if answer is None:
            raise ApiError("not_found", "this file doesn't exist")
        caching = "public, max-age=31536000, immutable" if edition == self.edition else "no-cache"
        return Response(200, answer[0], answer[1] + header_line("Cache-Control", caching) + SECURITY)


@functools.cache
def _environment() -> jinja2.Environment:
    """One for the process, because it keeps the compiled templates."""
    # With the first page: most starts show none.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("redpoll.control.dashboard", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # An upgrade may replace the files below a server that runs, whose pages are those of its own version.
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        moment=_moment,
        ticks=ticks,
        size=size,
        count=_count,
        elapsed=_elapsed,
        span=span,
        plural=_plural,
        segment=lambda text: quote(text, safe=""),
    )
    environment.globals["version"] = __version__
    environment.tests["debugged"] = is_debugged
    environment.tests["channel_name"] = valid_name
    return environment


class Pages:
    """Renders templates."""

    def __init__(self, files: StaticFiles) -> None:
        self._globals = {"static": files.path}

    def answer(
        self,
        template: str,
        context: dict[str, Any],
        *,
        status: int = 200,
        sockets: Iterable[str] = (),
        headers: bytes = b"",
    ) -> Response:
        """The page as a response that must not be cached. The page may open WebSockets to the URLs in `sockets`."""
        body = _environment().get_template(template, globals=self._globals).render(context)
        return Response(
            status, body.encode(), _HTML + _policy(sockets) + SECURITY + b"Cache-Control: no-store\r\n" + headers
        )


def _policy(sockets: Iterable[str]) -> bytes:
    connect = " ".join(("'self'", *sockets))
    return header_line(
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        f"connect-src {connect}; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    )


class Part(NamedTuple):
    """Some `items` of a list of `total`: those of the page `at`, counted from 0. `before` and `after` are the pages
    beside it, None if there is none."""

    items: Sequence[Any]
    total: int
    at: int
    before: int | None
    after: int | None


def part_of(items: Sequence[Any], page: str, size: int) -> Part:
    """The page with this number, as a query has it; the first if that is none, the last if it is greater."""
    total = len(items)
    at = int(page) if page.isascii() and page.isdecimal() and len(page) < 6 else 0
    at = min(at, max(0, total - 1) // size)
    after = at + 1 if (at + 1) * size < total else None
    return Part(items[at * size : (at + 1) * size], total, at, at - 1 if at else None, after)
