"""Plots of the results in bench/results, for bench/README.md and the documentation site. `render.py` writes them.

Each is one SVG that follows the reader's choice of light or dark (`prefers-color-scheme`). Its description has a digest
of the figures in it, by which a test finds plots that are out of date without drawing them.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FOLDER", "PLOTS", "digest_of", "svg"]

FOLDER = Path(__file__).parents[2] / "deploy" / "docs" / "figures"

Result = dict[str, Any]
# Of light and dark. Text has a contrast of 7:1 and more, bars of 3:1.
_COLOURS = {
    "ground": ("#ffffff", "#1e2129"),
    "text": ("#24292f", "#e6edf3"),
    "grid": ("#d8dee4", "#3d444d"),
    "ours": ("#b4233c", "#ff8a9a"),
    "theirs": ("#6e7781", "#9aa4af"),
}
_LIGHT = {name: light for name, (light, _) in _COLOURS.items()}
_DARK = "\n".join(
    f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important; }}'
    for light, dark in _COLOURS.values()
    for kind in ("fill", "stroke")
)
_STYLE = f"<style>@media (prefers-color-scheme: dark) {{\n{_DARK}\n}}</style>"


def _deliveries(axes: Axes, results: dict[str, Result]) -> None:
    figures = results["peers"]["figures"]
    _bars(
        axes,
        {
            "one event at a time": {name: row["serial_per_s"] for name, row in figures.items()},
            "batches of ten": {name: row["batch of 10_per_s"] for name, row in figures.items()},
        },
        "deliveries/s to 1,000 subscribers, one core",
    )


def _latency(axes: Axes, results: dict[str, Result]) -> None:
    figures = results["peers"]["figures"]
    _bars(
        axes,
        {f"{rate} events/s": {name: row[f"p99_ms_at_{rate}"] for name, row in figures.items()} for rate in (20, 100)},
        "p99 in ms, 1,000 subscribers, one core",
    )


def _publishes(axes: Axes, results: dict[str, Result]) -> None:
    figures = results["publish"]["figures"]
    _bars(
        axes,
        {
            f"{count} connection{'s' * (count != '1')}": {
                "redpoll": row["per_s"],
                "bare C server": row["reference_per_s"],
            }
            for count, row in figures.items()
        },
        "signed publishes/s, keep-alive, one core",
    )


def _memory(axes: Axes, results: dict[str, Result]) -> None:
    figures = results["connections"]["figures"]
    sizes = {int(count): row["bytes_per_connection"] for count, row in figures.items()}
    axes.plot(list(sizes), list(sizes.values()), color=_LIGHT["ours"], marker="o")
    for count, size in sizes.items():
        axes.annotate(f"{size}", (count, size), (0, 7), textcoords="offset points", ha="center")
    axes.set_ylim(0, 500)
    axes.set_xlim(0, max(sizes) * 1.05)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("idle connections with one subscription")
    axes.set_ylabel("a worker's bytes for each")
    axes.grid(axis="y")


def _storm(axes: Axes, results: dict[str, Result]) -> None:
    """Where the API's p99 is in each phase of a million connections: width is the phase's time."""
    began = 0.0
    for phase in results["million"]["figures"]["phases"]:
        p99, lasts_s = phase["api"]["p99_ms"], phase["seconds"]
        axes.bar(began, p99, lasts_s, align="edge", color=_LIGHT["ours"], edgecolor=_LIGHT["ground"])
        # A shorter phase has no room for its name.
        if lasts_s >= 8:
            how = {} if lasts_s > 100 else {"rotation": 90, "fontsize": 8}
            place = (began + lasts_s / 2, p99)
            axes.annotate(phase["phase"], place, (0, 5), textcoords="offset points", ha="center", va="bottom", **how)
        began += lasts_s
    axes.set_yscale("log")
    axes.set_ylim(1, 1_000_000)
    axes.set_xlim(0, 1.02 * began)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("seconds of the run with 1,000,000 connections")
    axes.set_ylabel("p99 of the API in ms")
    axes.grid(axis="y")


def _bars(axes: Axes, groups: dict[str, dict[str, float]], title: str) -> None:
    """Horizontal bars in groups, with their figures."""
    ticks, names, at = [], [], 0.0
    for group, bars in groups.items():
        axes.annotate(group, (0, at), xycoords=("axes fraction", "data"), va="center")
        for name, figure in bars.items():
            at -= 1
            axes.barh(at, figure, 0.75, color=_LIGHT["ours" if name == "redpoll" else "theirs"])
            shown = f"{float(f'{figure:.3g}'):,.10g}"
            axes.annotate(shown, (figure, at), (4, 0), textcoords="offset points", va="center")
            ticks.append(at)
            names.append(name)
        at -= 1.2
    axes.set_xlim(0, 1.12 * max(figure for bars in groups.values() for figure in bars.values()))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_yticks(ticks, names)
    axes.set_ylim(at + 0.5, 0.8)
    axes.set_xlabel(title)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


# Name of the file without its suffix -> what draws it, and the results that it shows.
PLOTS: dict[str, tuple[Callable[[Axes, dict[str, Result]], None], str]] = {
    "deliveries": (_deliveries, "peers"),
    "latency": (_latency, "peers"),
    "publishes": (_publishes, "publish"),
    "memory": (_memory, "connections"),
    "storm": (_storm, "million"),
}


def digest_of(name: str, results: dict[str, Result]) -> str:
    """16 hex digits of the figures in a plot."""
    shown = json.dumps(results[PLOTS[name][1]]["figures"], sort_keys=True)
    return hashlib.sha256(shown.encode()).hexdigest()[:16]


def svg(name: str, results: dict[str, Result]) -> str:
    """The plot as an SVG document. Needs matplotlib (the extra `bench`)."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    draw, _ = PLOTS[name]
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "text.color": _LIGHT["text"],
        "axes.labelcolor": _LIGHT["text"],
        "axes.edgecolor": _LIGHT["grid"],
        "axes.facecolor": _LIGHT["ground"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": _LIGHT["grid"],
        "xtick.color": _LIGHT["text"],
        "ytick.color": _LIGHT["text"],
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(8, 4.2), facecolor=_LIGHT["ground"], layout="constrained")
        draw(figure.subplots(), results)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Description": digest_of(name, results)})
    # Names of system fonts differ; any sans-serif font will do.
    text = out.getvalue().replace("'DejaVu Sans', ", "")
    head, svg_tag, rest = text.partition("<svg ")
    opened, end, body = rest.partition(">")
    return f"{head}{svg_tag}{opened}{end}\n{_STYLE}{body}"
