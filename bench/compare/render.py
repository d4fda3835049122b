"""Renders the tables of figures in README.md, bench/README.md and deploy/docs/sizing.md from the results in
bench/results.

    python -m bench.compare.render            writes them
    python -m bench.compare.render --check    exit code 1 where a page doesn't match the results

A result is what a bench writes with `--json` (results.py describes its form). To renew a figure, run the command that
its row shows, with `--json bench/results/NAME.json`, and then this. A table is the text between
`<!-- figures: NAME -->` and `<!-- end -->` of a page; everything else on a page is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "bench" / "README.md", ROOT / "deploy" / "docs" / "sizing.md")
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


def rounded(number: float, digits: int = 3) -> str:
    """`digits` significant digits, with commas: 179,000."""
    if number == 0:
        return "0"
    text = f"{float(f'{number:.{digits}g}'):,.10g}"
    return text if "e" not in text else f"{number:,.0f}"


# -- README.md -------------------------------------------------------------------------------------------------------


def main_figures(results: dict[str, Result]) -> str:
    """The figures of README.md, each with the limit that a release must meet."""
    figures = {name: result["figures"] for name, result in results.items()}
    end, publish, tracing = figures["end_to_end"], figures["publish"], figures["tracing"]
    serial, batch = end["throughput"]["serial"]["1000"], end["throughput"]["batch of 10"]["1000"]
    fanout, latency = figures["fanout"]["redpoll"], end["latency"]["1000 at 100"]
    history, webhooks, bus = figures["history"], figures["webhooks"], figures["bus"]
    connections, killed = figures["connections"], figures["worker_killed"]
    hook = webhooks["latency_ms"]
    p50, p99 = max(row["p50"] for row in hook.values()), max(row["p99"] for row in hook.values())
    picows = figures["fanout"].get("picows")
    busy = publish[max(publish, key=int)]
    recovery, million = figures["recovery"], figures["million"]
    phases = {phase["phase"]: phase for phase in million["phases"]}
    hold = phases["hold"]
    refused = sum(phase["failed_attempts"] + phase["lost_connections"] for phase in million["phases"])
    recovered = f"{recovery['messages']:,} messages, a recovering client cut {recovery['cuts']} times"
    crowd = (
        f"{million['connections']:,} connections to one channel, {million['workers']} workers, clients on the same two"
    )
    rows = [
        [
            "published by HTTP, received by 1,000 subscribers, one event at a time",
            f"{rounded(serial['deliveries_per_s'])} deliveries/s",
            f"{serial['ratio']:.2f} × the loop",
            "130,000, 0.6",
        ],
        [
            "the same in batches of ten",
            f"{rounded(batch['deliveries_per_s'], 4)} deliveries/s",
            f"{batch['ratio']:.2f} × a loop that joins ten",
            "700,000, 0.45",
        ],
        *(
            [
                f"fan-out alone, {word} a tick",
                f"{rounded(fanout[count]['per_s'])} deliveries/s",
                f"{fanout[count]['ratio']:.2f} × the loop"
                + (f"; picows {picows[count]['ratio']:.2f}" if picows else ""),
                limit,
            ]
            for count, word, limit in (("1", "one frame", "0.95"), ("10", "ten frames", "0.9"))
        ),
        [
            f"signed publishes over HTTP on one core by {max(publish, key=int)} keep-alive connections, "
            "each with its row in the event log",
            f"{rounded(busy['per_s'])} requests/s",
            f"a bare C server {rounded(busy['reference_per_s'])}",
            "goal 30,000/s",
        ],
        [
            f"processor time of publishes at {tracing['rate']:,} calls/s with the event log and trace",
            "",
            f"{tracing['paced']['processor_ratio']:.2f} × that without",
            "1.1",
        ],
        [
            "publishes into channels that keep history",
            f"{rounded(history['kept_per_s'])} requests/s",
            f"{history['ratio']:.2f} × that of others",
            "none",
        ],
        ["Redis' memory for a message of 130 B in a history", f"{history['redis_bytes']} B", "", "none"],
        *(
            [
                f"latency from HTTP request to receipt, 1,000 subscribers, 100 events/s, {share}",
                f"{latency[f'{share}_ms']:.1f} ms",
                "",
                limit,
            ]
            for share, limit in (("p50", "none"), ("p99", "15 ms"))
        ),
        *(
            [
                f"webhooks, {webhooks['per_s']:,.0f} transitions/s beside an endpoint that never answers, {share}",
                f"{ms:.0f} ms",
                "",
                limit,
            ]
            for share, ms, limit in (("p50", p50, "none"), ("p99", p99, "250 ms at 200/s"))
        ),
        [
            f"of {webhooks['transitions']:,} of these, missing or repeated",
            f"{webhooks['missing'] + webhooks['repeated'] or 'none'}",
            "",
            "none",
        ],
        [
            "memory of a worker for each of 10,000 idle connections with one subscription",
            f"{rounded(connections['10000']['bytes_per_connection'])} B",
            "",
            "2,000 B",
        ],
        *(
            [
                f"connect and subscribe into one channel, up to {int(count):,} subscribers",
                f"{rounded(connections[count]['per_s'], 2)}/s",
                "",
                "6,000/s",
            ]
            for count in ("1000", "10000")
        ),
        [
            f"{crowd} cores and 24 GB, the kernel's TCP table with {million['table_entries']:,} entries",
            f"{refused} refused or lost",
            "",
            "none",
        ],
        ["memory of a worker for each of these", f"{hold['user_bytes_per_connection']} B", "", "none"],
        [
            "memory of the kernel for each (both ends)",
            f"{hold['kernel_bytes_per_connection_both_ends'] / 1000:.1f} kB",
            "",
            "none",
        ],
        ["one event reaches all of them in", f"{phases['broadcast']['latency']['max_ms'] / 1000:.1f} s", "", "10 s"],
        ["events received from Redis by one worker", f"{rounded(bus['per_s'])}/s", "", "300,000/s"],
        *(
            [f"worker killed with -9: {what}", f"{killed[name]['max']:.2f} s", "", "1 s"]
            for what, name in (("members removed", "member_removed_s"), ("counts right", "counts_right_s"))
        ),
        [
            f"{recovered}; Redis, workers, control killed",
            "each once, in order" if not recovery["lost"] else f"{recovery['lost']} lost",
            "",
            "each once",
        ],
    ]
    return table(["what", "seen", "beside", "limit"], rows)


_PEER_ROWS: dict[str, tuple[str, Callable[[float], str]]] = {
    "serial_per_s": ("deliveries/s to 1,000 subscribers, one event at a time", rounded),
    "batch of 10_per_s": ("the same in batches of ten", rounded),
    "p99_ms_at_20": ("p99 latency, 1,000 subscribers, 20 events/s", lambda ms: f"{ms:,.0f} ms"),
    "p99_ms_at_100": ("the same with 100 events/s", lambda ms: f"{ms:,.0f} ms"),
    "connects_per_s": ("connect + subscribe/s, up to 10,000", rounded),
    "bytes": ("memory for each idle subscribed connection", lambda size: f"{size / 1000:.1f} kB"),
    "publishes_per_s": ("publishes/s, 64 keep-alive connections", rounded),
    "publishes_each_per_s": ("publishes/s, a connection for each (PHP)", rounded),
}


def peers(results: dict[str, Result]) -> str:
    """redpoll beside other servers, measured in one run."""
    figures = results["peers"]["figures"]
    rows = [[what, *(shown(row[name]) for row in figures.values())] for name, (what, shown) in _PEER_ROWS.items()]
    return table(["", *figures], rows)


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
        found = fanout.get(engine)
        suite = suites.get(engine)
        rows.append(
            [
                name,
                f"{memory[engine]:,} B" if engine in memory else "–",
                *(
                    shown(found[frames]) if found else "–"
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
        load, found = loads_of(result["bench"], figures)
        for what, value in found.items():
            columns.setdefault(figures["server"], {})[load, what] = value
    rows = dict.fromkeys(row for found in columns.values() for row in found)
    tools = ["swarm", "storm", "Locust", "k6"]
    ordered = sorted(rows, key=lambda row: tools.index(row[0].partition(",")[0]))
    return [
        ["load", "figure", *columns],
        *([*row, *(found.get(row, "–") for found in columns.values())] for row in ordered),
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
        found: dict[str, str] = {}
        for script, row in figures.items():
            if isinstance(row, dict):
                named = _times(row) | {"events": f"{row['events']:,}", "thresholds missed": f"{row['missed']}"}
                found |= {f"{script}: {name}": value for name, value in named.items()}
        return "k6", found
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
    found = {
        "connections/s": f"{figures['connected_per_s']:,.0f}",
        "failed": f"{figures['failed']}",
        "server, µs for each connection": f"{figures['server_us_per_connection']:,.0f}",
    }
    if "events" in figures:
        latency = figures["latency"]
        found |= {
            "events/s": f"{figures['events_per_s']:,.0f}",
            "lost": f"{figures['lost_events']}",
            "overtaken": f"{figures['overtaken']}",
            "server, µs for each event": f"{figures['server_us_per_event']:.1f}",
            **{f"{name}, ms": f"{latency[key]:g}" for name, key in LATENCIES.items()},
        }
    return found


def load(results: dict[str, Result]) -> str:
    """What swarm, storm, Locust and k6 found, server beside server."""
    heads, *rows = load_rows(results)
    return table(heads, rows)


def most(results: dict[str, Result]) -> str:
    """The runs of swarm with the most connections."""
    rows = []
    for result in results.values():
        figures = result["figures"]
        if result["bench"] == "swarm" and figures["connections"] > 1000 and figures["server"] not in _REFERENCES:
            rows.append(
                [
                    figures["server"],
                    f"{figures['connections']:,}",
                    f"{figures['connected_per_s']:,.0f}",
                    f"{figures['failed']}",
                    f"{figures['server_bytes_per_connection']:,} B",
                    f"{figures['server_us_per_connection']:,.0f} µs",
                    f"{figures['published']:,}",
                    f"{figures['lost_events']}",
                    f"{figures['overtaken']}",
                    *(f"{figures['latency'][key]:g}" for key in LATENCIES.values()),
                ]
            )
    heads = ["server", "connections", "a second", "failed", "memory each", "processor time each", "published", "lost"]
    return table([*heads, "overtaken", *(f"{name}, ms" for name in LATENCIES)], rows)


def per_unit(results: dict[str, Result]) -> str:
    """What one connection, event, publish and message costs the server."""
    figures = {name: result["figures"] for name, result in results.items()}
    shared, each = figures["connections"]["10000"], figures["connections-each"]
    # Memory of the first round stays for the next ones.
    own, own_per_s = each["round 1"], max(row["per_core_per_s"] for row in each.values())
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
    return table(["for each", "it takes", "measured by"], rows)


def own_cost(results: dict[str, Result]) -> str:
    """What swarm itself costs: its run against the bare server, which takes what it is sent as fast as a server can."""
    figures = results["swarm-own-cost"]["figures"]
    return (
        f"swarm itself takes {figures['swarm_us_per_connection']:,.0f} µs of processor time and "
        f"{figures['swarm_bytes_per_connection']:,} B for a connection, and {figures['swarm_us_per_event']:g} µs "
        f"for an event ({figures['connections']:,} connections, {figures['events']:,} events).\n"
    )


def seen(results: dict[str, Result]) -> str:
    """Every result: command, date, commit, and the file with its figures."""
    return table(
        ["command", "date", "commit", "figures", "note"],
        [
            [
                f"`{result['command']}`",
                result["date"],
                result["commit"],
                f"[{name}](results/{name}.json)",
                result.get("note", ""),
            ]
            for name, result in results.items()
        ],
    )


def machines(results: dict[str, Result]) -> str:
    """Which machines the results are from."""
    found = sorted(
        {
            f"{machine['cores']} cores {machine['cpu']}, Linux {machine['kernel']}, Python {machine['python']}"
            for machine in (result["machine"] for result in results.values())
        }
    )
    return "".join(f"- {line}\n" for line in found)


TABLES: dict[str, Callable[[dict[str, Result]], str]] = {
    "main": main_figures,
    "peers": peers,
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
    return _REGION.sub(lambda found: f"{found[1]}{TABLES[found[2]](results)}{found[4]}", text)


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
    if "--check" in sys.argv and stale:
        sys.exit(f"{', '.join(stale)} don't match bench/results: run python -m bench.compare.render")


if __name__ == "__main__":
    main()
