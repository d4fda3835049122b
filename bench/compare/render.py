"""Renders the tables of figures in README.md, bench/README.md and deploy/docs/sizing.md from the results in
bench/results.

    python -m bench.compare.render            writes them
    python -m bench.compare.render --check    exit code 1 where a page doesn't match the results

A result is what a bench writes with `--json` (results.py describes its form). To renew a figure, run the command that
its row shows, with `--json bench/results/NAME.json`, and then this. A table is the text between
`<!-- figures: NAME -->` and `<!-- end -->` of a page; everything else on a page is written by hand. plots.py has the
plots, which are written with the tables (and need matplotlib).
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.compare import plots

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "bench" / "README.md", ROOT / "deploy" / "docs" / "sizing.md")
# Of lines of Markdown (tests/deploy/test_docs.py).
WIDTH = 120
_REGION = re.compile(r"(<!-- figures: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Result = dict[str, Any]
# Servers of swarm that show what swarm itself costs.
_REFERENCES = {"bare C server"}
LATENCIES = {"p50": "p50_ms", "p99": "p99_ms", "p99.9": "p999_ms"}


def read_results() -> dict[str, Result]:
    """File name without suffix -> result."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") or "–" for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def filled(text: str, indent: str = "") -> str:
    """A paragraph in lines of at most WIDTH characters; all but the first begin with `indent`."""
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def rounded(number: float, digits: int = 3) -> str:
    """`digits` significant digits, with commas: 179,000."""
    if number == 0:
        return "0"
    text = f"{float(f'{number:.{digits}g}'):,.10g}"
    return text if "e" not in text else f"{number:,.0f}"


# -- README.md -------------------------------------------------------------------------------------------------------


def main_figures(results: dict[str, Result]) -> str:
    """The figures of redpoll alone, each with the limit that a release must meet and the bench that measures it."""
    figures = {name: result["figures"] for name, result in results.items()}
    return table(
        ["what", "seen", "beside", "limit", "`bench.`"],
        [
            *_deliveries(figures),
            *_publishes(figures),
            *_webhooks(figures),
            *_connections(figures),
            *_million(figures["million"]),
            *_failures(figures),
        ],
    )


def _deliveries(figures: dict[str, Any]) -> list[list[str]]:
    end, fanout = figures["end_to_end"], figures["fanout"]
    serial, batch = end["throughput"]["serial"]["1000"], end["throughput"]["batch of 10"]["1000"]
    latency, picows = end["latency"]["1000 at 100"], fanout.get("picows")
    rows = [
        ["deliveries/s to 1,000, one event at a time", serial, "× the loop", "130,000, 0.6"],
        ["the same in batches of ten", batch, "× a loop that joins ten", "700,000, 0.45"],
    ]
    return [
        *(
            [what, rounded(row["deliveries_per_s"], 4), f"{row['ratio']:.2f} {beside}", limit, "load.end_to_end"]
            for what, row, beside, limit in rows
        ),
        *(
            [
                f"fan-out alone, {word} a tick, deliveries/s",
                rounded(fanout["redpoll"][count]["per_s"]),
                f"{fanout['redpoll'][count]['ratio']:.2f} × the loop"
                + (f"; picows {picows[count]['ratio']:.2f}" if picows else ""),
                limit,
                "parts.fanout",
            ]
            for count, word, limit in (("1", "one frame", "0.95"), ("10", "ten frames", "0.9"))
        ),
        *(
            [
                f"latency to 1,000 subscribers, 100 events/s, {share}",
                f"{latency[f'{share}_ms']:.1f} ms",
                "",
                limit,
                "load.end_to_end",
            ]
            for share, limit in (("p50", "none"), ("p99", "15 ms"))
        ),
        ["events/s that one worker takes from Redis", rounded(figures["bus"]["per_s"]), "", "300,000", "parts.bus"],
    ]


def _publishes(figures: dict[str, Any]) -> list[list[str]]:
    publish, tracing, history = figures["publish"], figures["tracing"], figures["history"]
    most = max(publish, key=int)
    busy = publish[most]
    return [
        [
            f"signed publishes/s, one core, {most} connections",
            rounded(busy["per_s"]),
            f"a bare C server {rounded(busy['reference_per_s'])}",
            "30,000",
            "load.publish",
        ],
        [
            f"event log and trace at {tracing['rate']:,} calls/s, processor time",
            "",
            f"{tracing['paced']['processor_ratio']:.2f} × without",
            "1.1",
            "parts.tracing",
        ],
        [
            "publishes/s into channels with history",
            rounded(history["kept_per_s"]),
            f"{history['ratio']:.2f} × others",
            "none",
            "parts.history",
        ],
        ["Redis' memory for a stored message of 130 B", f"{history['redis_bytes']} B", "", "none", "parts.history"],
    ]


def _webhooks(figures: dict[str, Any]) -> list[list[str]]:
    webhooks = figures["webhooks"]
    hook = webhooks["latency_ms"].values()
    return [
        *(
            [
                f"webhooks, {webhooks['per_s']:,.0f}/s beside a dead endpoint, {share}",
                f"{max(row[share] for row in hook):.0f} ms",
                "",
                limit,
                "load.webhooks",
            ]
            for share, limit in (("p50", "none"), ("p99", "250 ms"))
        ),
        [
            f"of {webhooks['transitions']:,} of these, missing or repeated",
            f"{webhooks['missing'] + webhooks['repeated'] or 'none'}",
            "",
            "none",
            "load.webhooks",
        ],
    ]


def _connections(figures: dict[str, Any]) -> list[list[str]]:
    connections = figures["connections"]
    size = f"{rounded(connections['10000']['bytes_per_connection'])} B"
    return [
        ["a worker's memory for an idle subscribed connection", size, "", "2,000 B", "load.connections"],
        *(
            [
                f"the same over TLS{after}",
                f"{row['redpoll'] / 1000:.1f} kB",
                f"{row['redpoll'] / row['bare']:.2f} × a bare OpenSSL server",
                limit,
                "load.tls",
            ]
            for row, after, limit in (
                (figures["tls-memory"]["idle"], "", "1.3"),
                (figures["tls-memory"]["traffic"], ", after 20 events and a ping", "1.4"),
            )
        ),
        *(
            [
                f"connect and subscribe/s, up to {int(count):,}",
                rounded(connections[count]["per_s"], 2),
                "",
                "6,000",
                "load.connections",
            ]
            for count in ("1000", "10000")
        ),
    ]


def _million(million: dict[str, Any]) -> list[list[str]]:
    phases = {phase["phase"]: phase for phase in million["phases"]}
    hold = phases["hold"]
    refused = sum(phase["failed_attempts"] + phase["lost_connections"] for phase in million["phases"])
    kernel = hold["kernel_bytes_per_connection_both_ends"]
    slowest = phases["broadcast"]["latency"]["max_ms"]
    rows = [
        [f"{million['connections']:,} connections, {million['workers']} workers", f"{refused} refused or lost", "none"],
        ["a worker's memory for each of these", f"{hold['user_bytes_per_connection']} B", "none"],
        ["the kernel's memory for each (both ends)", f"{kernel / 1000:.1f} kB", "none"],
        ["one event reaches all of them in", f"{slowest / 1000:.1f} s", "10 s"],
    ]
    return [[what, seen, "", limit, "load.million"] for what, seen, limit in rows]


def _failures(figures: dict[str, Any]) -> list[list[str]]:
    killed, recovery = figures["worker_killed"], figures["recovery"]
    return [
        *(
            [f"worker killed with -9: {what}", f"{killed[name]['max']:.2f} s", "", "1 s", "load.worker_killed"]
            for what, name in (("members removed", "member_removed_s"), ("counts right", "counts_right_s"))
        ),
        [
            f"{recovery['messages']:,} messages, client cut {recovery['cuts']} times",
            "each once, in order" if not recovery["lost"] else f"{recovery['lost']} lost",
            "processes killed",
            "each once",
            "soak.failures",
        ],
    ]


# Figure -> its row, how it is shown, and the part of peers.py (`--only`) that measures it.
_PEER_ROWS: dict[str, tuple[str, Callable[[float], str], str]] = {
    "serial_per_s": ("deliveries/s to 1,000 subscribers, one by one", rounded, "deliveries"),
    "batch of 10_per_s": ("the same in batches of ten", rounded, "deliveries"),
    "kept_per_s": ("one by one, into a channel with history", rounded, "history"),
    "p99_ms_at_20": ("p99 latency, 1,000 subscribers, 20 events/s", lambda ms: f"{ms:,.0f} ms", "latency"),
    "p99_ms_at_100": ("the same with 100 events/s", lambda ms: f"{ms:,.0f} ms", "latency"),
    "connects_per_s": ("connect + subscribe/s, up to 10,000", rounded, "connections"),
    "bytes": ("memory for an idle connection", lambda size: f"{size / 1000:.1f} kB", "connections"),
    "publishes_per_s": ("publishes/s, 64 keep-alive connections", rounded, "publishes"),
    "publishes_each_per_s": ("publishes/s, a connection for each (PHP)", rounded, "publishes"),
    "publish_p99_ms_at_10000": ("p99 of a publish at 10,000/s", lambda ms: f"{rounded(ms)} ms", "rates"),
    "publish_p99_ms_at_40000": ("p99 of a publish at 40,000/s", lambda ms: f"{rounded(ms)} ms", "rates"),
}


def peers(results: dict[str, Result]) -> str:
    """redpoll beside other servers, measured in one run."""
    figures = results["peers"]["figures"]
    rows = [
        [what, *(shown(row[name]) if name in row else "–" for row in figures.values()), f"`{part}`"]
        for name, (what, shown, part) in _PEER_ROWS.items()
        if any(name in row for row in figures.values())
    ]
    return table(["", *figures, "`--only`"], rows)


def peers_when(results: dict[str, Result]) -> str:
    """When and where that run was."""
    result = results["peers"]
    machine = result["machine"]
    return filled(
        f"One run, {result['date']}, on {machine['cores']} shared cores ({machine['cpu']}): read the ratios. All "
        "processes of a server had one core, the clients the other; the servers were measured in turns."
    )


# -- bench/README.md -------------------------------------------------------------------------------------------------


def engines(results: dict[str, Result]) -> str:
    """The worker's engine beside picows, bare uvloop and the C loop."""
    fanout, memory = results["fanout"]["figures"], results["memory"]["figures"]
    suites = {"redpoll": results.get("autobahn"), "picows": results.get("autobahn-picows")}
    names = {
        "redpoll": "redpoll's engine",
        "transports": "redpoll's engine on uvloop's transport, without TLS",
        "picows": "picows, its defaults",
        "picows-small": "picows, 2 kB read buffer on uvloop's transport",
        "uvloop": "uvloop's transport, no WebSocket",
    }
    rows = []
    for engine, name in names.items():
        rates = fanout.get(engine)
        suite = suites.get(engine)
        rows.append(
            [
                name,
                f"{memory[engine]:,} B" if engine in memory else "–",
                *(
                    shown(rates[frames]) if rates else "–"
                    for frames in ("1", "10")
                    for shown in (lambda row: f"{rounded(row['per_s'])}/s", lambda row: f"{row['ratio']:.2f}")
                ),
                f"{suite['figures']['failed']} of {suite['figures']['cases']}" if suite else "–",
            ]
        )
    heads = ["engine", "memory of an idle connection", "1 frame a tick", "× C loop", "10 frames a tick", "× C loop"]
    return table([*heads, "Autobahn: failed"], rows)


def load_rows(results: dict[str, Result]) -> list[list[str]]:
    """The heads and rows of a table of what swarm, storm, Locust and k6 found, with a column for each server."""
    columns: dict[str, dict[tuple[str, str], str]] = {}
    for result in results.values():
        figures = result["figures"]
        load, values = loads_of(result["bench"], figures)
        for what, value in values.items():
            columns.setdefault(figures["server"], {})[load, what] = value
    rows = dict.fromkeys(row for column in columns.values() for row in column)
    tools = ["swarm", "storm", "Locust", "k6"]
    ordered = sorted(rows, key=lambda row: tools.index(row[0].partition(",")[0]))
    return [
        ["load", "figure", *columns],
        *([*row, *(column.get(row, "–") for column in columns.values())] for row in ordered),
    ]


def loads_of(bench: str, figures: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The load of a result, and its figures by name; none for results of other benches."""
    if bench == "swarm" and figures["server"] not in _REFERENCES and figures["connections"] <= 1000:
        return f"swarm, {figures['profile']}, {figures['connections']:,} connections", _swarm(figures)
    if bench == "storm":
        back = figures["back"]
        return f"storm, {figures['connections']:,} connections", {
            **{f"back, {name}, ms": f"{back[f'{name}_ms']:,.0f}" for name in ("p50", "p99", "max")},
            "failed attempts": f"{figures['failed_attempts']}",
            "server, µs for each connection": f"{figures['server_us_per_connection']:,.0f}",
        }
    if bench == "locust":
        rows = {name: row for name, row in sorted(figures.items()) if isinstance(row, dict)}
        return "Locust", {
            **_times(rows),
            "requests": f"{sum(row['requests'] for row in rows.values()):,}",
            "failed": f"{sum(row['failures'] for row in rows.values())}",
            **({"server, s": f"{figures['server_cpu_s']:g}"} if "server_cpu_s" in figures else {}),
        }
    if bench == "k6":
        values: dict[str, str] = {}
        for script, row in figures.items():
            if isinstance(row, dict):
                named = _times(row) | {"events": f"{row['events']:,}", "thresholds missed": f"{row['missed']}"}
                values |= {f"{script}: {name}": value for name, value in named.items()}
        return "k6", values
    return "", {}


def _times(rows: dict[str, Any]) -> dict[str, str]:
    return {
        f"{name}, {share}, ms": f"{row[f'{share}_ms']:g}"
        for name, row in rows.items()
        if isinstance(row, dict)
        for share in ("p50", "p99")
    }


def _swarm(figures: dict[str, Any]) -> dict[str, str]:
    """What a run of swarm says about the server."""
    values = {
        "connections/s": f"{figures['connected_per_s']:,.0f}",
        "failed": f"{figures['failed']}",
        "server, µs for each connection": f"{figures['server_us_per_connection']:,.0f}",
    }
    if "events" in figures:
        latency = figures["latency"]
        values |= {
            "events/s": f"{figures['events_per_s']:,.0f}",
            "lost": f"{figures['lost_events']}",
            "overtaken": f"{figures['overtaken']}",
            "server, µs for each event": f"{figures['server_us_per_event']:.1f}",
            **{f"{name}, ms": f"{latency[key]:g}" for name, key in LATENCIES.items()},
        }
    return values


def load(results: dict[str, Result]) -> str:
    """What swarm, storm, Locust and k6 found, server beside server."""
    heads, *rows = load_rows(results)
    return table(heads, rows)


def most(results: dict[str, Result]) -> str:
    """The runs of swarm with the most connections, a column for each."""
    columns = []
    for result in results.values():
        figures = result["figures"]
        if result["bench"] == "swarm" and figures["connections"] > 1000 and figures["server"] not in _REFERENCES:
            columns.append(
                {
                    "": figures["server"],
                    "connections": f"{figures['connections']:,}",
                    "a second": f"{figures['connected_per_s']:,.0f}",
                    "failed": f"{figures['failed']}",
                    "memory each": f"{figures['server_bytes_per_connection']:,} B",
                    "processor time each": f"{figures['server_us_per_connection']:,.0f} µs",
                    "published": f"{figures['published']:,}",
                    "lost": f"{figures['lost_events']}",
                    "overtaken": f"{figures['overtaken']}",
                    **{f"{name}, ms": f"{figures['latency'][key]:g}" for name, key in LATENCIES.items()},
                }
            )
    heads, *rows = ([what, *(column[what] for column in columns)] for what in columns[0])
    return table(heads, rows)


def per_unit(results: dict[str, Result]) -> str:
    """What one connection, event, publish and message costs the server."""
    figures = {name: result["figures"] for name, result in results.items()}
    shared, own_channel = figures["connections"]["10000"], figures["connections-each"]
    # Memory of the first round stays for the next ones.
    own, own_per_s = own_channel["round 1"], max(row["per_core_per_s"] for row in own_channel.values())
    ticker, chat = figures["swarm-ticker-redpoll"], figures["swarm-chat-redpoll"]
    publish = figures["publish"][max(figures["publish"], key=int)]["us"]
    most, history = figures["swarm-20000-redpoll"], figures["history"]
    rows = [
        [
            "idle connection with one subscription",
            f"{shared['bytes_per_connection']} B of a worker's memory; with a channel of its own "
            f"{own['worker_bytes']:,} B, and {own['redis_bytes']:,} B of Redis'",
            "`bench/load/connections.py`",
        ],
        [
            "the same over TLS",
            f"{figures['tls-memory']['idle']['redpoll'] / 1000:.1f} kB of a worker's memory",
            "`bench/load/tls.py`",
        ],
        [
            "connect and subscribe, as fast as possible",
            f"{1000 / shared['per_core_per_s']:.2f} ms of processor time; with a channel of its own "
            f"{1000 / own_per_s:.2f} ms",
            "`bench/load/connections.py`",
        ],
        [
            f"the same at a steady {rounded(ticker['connected_per_s'], 2)} connections a second",
            f"{ticker['server_us_per_connection'] / 1000:.1f} ms; with three channels, one of them a presence channel, "
            f"{chat['server_us_per_connection'] / 1000:.1f} ms",
            "`bench/load/swarm.py`, profiles ticker and chat",
        ],
        [
            "event sent to a socket",
            f"{ticker['server_us_per_event']:.0f} µs of processor time, less in bursts",
            "`bench/load/swarm.py`, profile ticker",
        ],
        [
            "publish over HTTP, signed, logged and traced",
            f"{sum(publish.values()):.0f} µs of processor time: {publish['worker']:.0f} of a worker, "
            f"{publish['control']:.0f} of the control plane, {publish['redis']:.0f} of Redis",
            "`bench/load/publish.py`",
        ],
        [
            f"the same at {most['published_per_s']:.0f} a second, with all that the server does meanwhile",
            f"{most['server_us_per_event'] / 1000:.1f} ms",
            "`bench/load/swarm.py`, profile notifications",
        ],
        [
            "message kept in a history",
            f"{history['redis_bytes'] - 130} B of Redis' memory besides its own size",
            "`bench/parts/history.py`",
        ],
    ]
    return "".join(filled(f"- **{what}**: {takes} ({by})", "  ") for what, takes, by in rows)


def own_cost(results: dict[str, Result]) -> str:
    """What swarm itself costs: its run against the bare server, which takes what it is sent as fast as a server can."""
    figures = results["swarm-own-cost"]["figures"]
    return filled(
        f"swarm itself takes {figures['swarm_us_per_connection']:,.0f} µs of processor time and "
        f"{figures['swarm_bytes_per_connection']:,} B for a connection, and {figures['swarm_us_per_event']:g} µs "
        f"for an event ({figures['connections']:,} connections, {figures['events']:,} events)."
    )


def seen(results: dict[str, Result]) -> str:
    """Every result: the file with its figures, date, commit and command."""
    lines = []
    for name, result in results.items():
        note = f" ({result['note']})" if result.get("note") else ""
        lines.append(filled(f"- [{name}](results/{name}.json), {result['date']}, {result['commit']}{note}:", "  "))
        lines += [f"  {line}\n" for line in textwrap.wrap(f"`{result['command']}`", WIDTH - 2, break_long_words=False)]
    return "".join(lines)


def machines(results: dict[str, Result]) -> str:
    """Which machines the results are from."""
    lines = sorted(
        {
            f"{machine['cores']} cores {machine['cpu']}, Linux {machine['kernel']}, Python {machine['python']}"
            for machine in (result["machine"] for result in results.values())
        }
    )
    return "".join(f"- {line}\n" for line in lines)


TABLES: dict[str, Callable[[dict[str, Result]], str]] = {
    "main": main_figures,
    "peers": peers,
    "peers-when": peers_when,
    "engines": engines,
    "load": load,
    "most": most,
    "per-unit": per_unit,
    "own-cost": own_cost,
    "seen": seen,
    "machines": machines,
}


def rendered(text: str, results: dict[str, Result]) -> str:
    """A page with its tables made from `results`. Raises KeyError for an unknown table."""
    return _REGION.sub(lambda match: f"{match[1]}{TABLES[match[2]](results)}{match[4]}", text)


def is_current(name: str, results: dict[str, Result]) -> bool:
    """Whether a plot shows these results."""
    path = plots.FOLDER / f"{name}.svg"
    return path.exists() and plots.digest_of(name, results) in path.read_text()


def main() -> None:
    results = read_results()
    stale = []
    for page in PAGES:
        text = page.read_text()
        new = rendered(text, results)
        if new != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                page.write_text(new)
    for name in plots.PLOTS:
        path = plots.FOLDER / f"{name}.svg"
        if not is_current(name, results):
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                plots.FOLDER.mkdir(exist_ok=True)
                path.write_text(plots.svg(name, results))
    if "--check" in sys.argv and stale:
        sys.exit(f"{', '.join(stale)} don't match bench/results: run python -m bench.compare.render")


if __name__ == "__main__":
    main()
