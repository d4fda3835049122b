"""Renders the tables of figures in README.md, bench/README.md and deploy/docs/sizing.md from the results in
bench/results.

    python bench/render.py            writes them
    python bench/render.py --check    exit code 1 where a page doesn't match the results

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

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = (HERE.parent / "README.md", HERE / "README.md", HERE.parent / "deploy" / "docs" / "sizing.md")
_REGION = re.compile(r"(<!-- figures: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Result = dict[str, Any]
Summary = Callable[[dict[str, Any]], str]
# Servers of swarm that show what swarm itself costs.
_REFERENCES = {"bare C server"}


def read_results() -> dict[str, Result]:
    """File name without suffix -> result."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
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
    least = min(row["per_s"] for row in connections.values())
    hook = webhooks["latency_ms"]
    p50, p99 = max(row["p50"] for row in hook.values()), max(row["p99"] for row in hook.values())
    picows = figures["fanout"].get("picows")
    busy = publish[max(publish, key=int)]
    recovery, million = figures["recovery"], figures["million"]
    phases = {phase["phase"]: phase for phase in million["phases"]}
    hold = phases["hold"]
    refused = sum(phase["failed_attempts"] + phase["lost_connections"] for phase in million["phases"])
    rows = [
        [
            "published by HTTP, received by 1,000 subscribers, one event at a time",
            f"{rounded(serial['deliveries_per_s'])} deliveries/s, {serial['ratio']:.2f} × the loop",
            "130,000, 0.6",
        ],
        [
            "the same in batches of ten",
            f"{rounded(batch['deliveries_per_s'], 4)}/s, {batch['ratio']:.2f} × a loop that joins ten",
            "700,000, 0.45",
        ],
        [
            "fan-out alone, one frame a tick, and ten",
            f"{fanout['1']['ratio']:.2f} and {fanout['10']['ratio']:.2f} × the loop"
            + (f"; picows {picows['1']['ratio']:.2f} and {picows['10']['ratio']:.2f}" if picows else ""),
            "0.95, 0.9",
        ],
        [
            f"signed publishes over HTTP on one core by {max(publish, key=int)} keep-alive connections, "
            "each with its row in the event log",
            f"{rounded(busy['per_s'])} requests/s; a bare C server that answers `{{}}` "
            f"{rounded(busy['reference_per_s'])}",
            "goal 30,000/s",
        ],
        [
            f"publishes at {tracing['rate']:,} calls/s: processor time with the event log and trace",
            f"{tracing['paced']['processor_ratio']:.2f} × that without",
            "1.1",
        ],
        [
            "publishes into channels that keep history",
            f"{rounded(history['kept_per_s'])} requests/s, {history['ratio']:.2f} × that of others; "
            f"{history['redis_bytes']} B of Redis for each message of 130 B",
            "none",
        ],
        [
            "latency from HTTP request to receipt, 1,000 subscribers, 100 events/s",
            f"p50 {latency['p50_ms']:.1f} ms, p99 {latency['p99_ms']:.1f} ms",
            "p99 15 ms",
        ],
        [
            f"webhooks, {webhooks['per_s']:,.0f} transitions/s beside an endpoint that never answers",
            f"{webhooks['transitions']:,}: {webhooks['missing'] or 'none'} missing, "
            f"{webhooks['repeated'] or 'none'} repeated; p50 {p50:.0f} ms, p99 {p99:.0f} ms",
            "p99 250 ms at 200/s",
        ],
        [
            "memory of a worker for each idle connection with one subscription",
            f"{rounded(connections['10000']['bytes_per_connection'])} B at 10,000 connections",
            "2,000 B",
        ],
        [
            "connect and subscribe into one channel",
            f"{rounded(connections['1000']['per_s'], 2)}/s up to 1,000 subscribers, "
            f"{rounded(connections['10000']['per_s'], 2)}/s up to 10,000 (least {rounded(least, 2)})",
            "6,000/s",
        ],
        [
            f"{million['connections']:,} connections to one channel, {million['workers']} workers, "
            "the clients on the same two cores and 24 GB, the kernel's TCP table with "
            f"{million['table_entries']:,} entries",
            f"{refused} refused or lost, {million['fenced']} workers fenced; {hold['user_bytes_per_connection']} B of "
            f"a worker and {hold['kernel_bytes_per_connection_both_ends'] / 1000:.1f} kB of the kernel (both ends) for "
            f"each; one event reaches all in {phases['broadcast']['latency']['max_ms'] / 1000:.1f} s",
            "none fenced, 10 s",
        ],
        ["events received from Redis by one worker", f"{rounded(bus['per_s'])}/s", "300,000/s"],
        [
            "worker killed with -9: members removed, counts right",
            ", ".join(f"{killed[name]['max']:.2f} s" for name in ("member_removed_s", "counts_right_s")),
            "1 s",
        ],
        [
            f"{recovery['messages']:,} messages, a recovering client cut {recovery['cuts']} times; "
            "Redis, workers, control killed",
            "each once, in order" if not recovery["lost"] else f"{recovery['lost']} lost",
            "each once",
        ],
    ]
    return table(["what", "seen", "limit"], rows)


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
                    f"{rounded(found[frames]['per_s'])}/s ({found[frames]['ratio']:.2f})" if found else "–"
                    for frames in ("1", "10")
                ),
                f"{suite['figures']['failed']} of {suite['figures']['cases']}" if suite else "–",
            ]
        )
    heads = ["engine", "memory of an idle connection", "1 frame a tick (× C loop)", "10 frames a tick"]
    return table([*heads, "Autobahn: failed"], rows)


def load_rows(results: dict[str, Result]) -> list[list[str]]:
    """The heads and rows of a table of what swarm, storm, Locust and k6 found, with a column for each server."""
    columns: dict[str, dict[str, str]] = {}
    for result in results.values():
        figures = result["figures"]
        for load, text in _loads(result["bench"], figures).items():
            columns.setdefault(figures["server"], {})[load] = text
    loads = dict.fromkeys(load for found in columns.values() for load in found)
    tools = ["swarm", "storm", "Locust", "k6"]
    ordered = sorted(loads, key=lambda load: tools.index(load.partition(",")[0]))
    return [
        ["load", *columns],
        *([load, *(found.get(load, "–") for found in columns.values())] for load in ordered),
    ]


def _loads(bench: str, figures: dict[str, Any]) -> dict[str, str]:
    """What a cell says for each load of a result; nothing for results of other benches."""
    if bench == "swarm" and figures["server"] not in _REFERENCES and figures["connections"] <= 1000:
        return {f"swarm, {figures['profile']}, {figures['connections']:,} connections": _swarm_server(figures)}
    if bench == "storm":
        return {f"storm, {figures['connections']:,} connections": _storm_server(figures)}
    if bench == "locust":
        rows = {name: row for name, row in sorted(figures.items()) if isinstance(row, dict)}
        parts = [f"{name} {_p50_p99(row)}" for name, row in rows.items()]
        requests = sum(row["requests"] for row in rows.values())
        failures = sum(row["failures"] for row in rows.values())
        return {"Locust": "; ".join([*parts, f"{failures} of {requests:,} failed", *_used(figures)])}
    if bench == "k6":
        return {f"k6, {script}": _k6_script(row) for script, row in figures.items() if isinstance(row, dict)}
    return {}


def _k6_script(figures: dict[str, Any]) -> str:
    parts = [f"{name} {_p50_p99(row)}" for name, row in figures.items() if isinstance(row, dict)]
    if figures["events"]:
        parts.append(f"{figures['events']:,} events")
    return "; ".join([*parts, f"thresholds missed: {figures['missed']}"])


def _p50_p99(row: dict[str, float]) -> str:
    return f"p50 {row['p50_ms']:g}, p99 {row['p99_ms']:g} ms"


def _used(figures: dict[str, Any]) -> list[str]:
    return [f"server {figures['server_cpu_s']:g} s of processor time"] if "server_cpu_s" in figures else []


def _end_to_end(figures: dict[str, Any]) -> str:
    parts = []
    for mode, rows in figures["throughput"].items():
        for subscribers, row in rows.items():
            ratio = f" ({row['ratio']:.2f} × the loop)" if row["ratio"] is not None else ""
            parts.append(f"{int(subscribers):,} subscribers, {mode}: {rounded(row['deliveries_per_s'], 4)}/s{ratio}")
    for row in figures["latency"].values():
        parts.append(
            f"{row['subscribers']:,} at {row['events_per_s']:.0f}/s: "
            f"p50 {row['p50_ms']:.1f}, p99 {row['p99_ms']:.1f} ms"
        )
    return "; ".join(parts)


def _fanout(figures: dict[str, Any]) -> str:
    found = [name for name, rows in figures.items() if isinstance(rows, dict)]
    return f"{figures['connections']:,} connections; " + "; ".join(
        f"{name} {rounded(figures[name]['1']['per_s'])}/s ({figures[name]['1']['ratio']:.3f}) and "
        f"{rounded(figures[name]['10']['per_s'])}/s ({figures[name]['10']['ratio']:.3f})"
        for name in found
    )


def _swarm_server(figures: dict[str, Any]) -> str:
    """What a run of swarm says about the server."""
    text = (
        f"{figures['connected_per_s']:,.0f} connections/s, {figures['failed']} failed, "
        f"{figures['server_us_per_connection']:,.0f} µs of the server each"
    )
    if "events" in figures:
        latency = figures["latency"]
        text += (
            f"; {figures['events_per_s']:,.0f} events/s, {figures['lost_events']} lost, "
            f"{figures['overtaken']} overtaken, {figures['server_us_per_event']:.1f} µs each; "
            f"p50 {latency['p50_ms']:g}, p99 {latency['p99_ms']:g}, p99.9 {latency['p999_ms']:g} ms"
        )
    return text


def _swarm(figures: dict[str, Any]) -> str:
    own = f"{figures['swarm_us_per_connection']:,.0f} µs and {figures['swarm_bytes_per_connection']:,} B a connection"
    return (
        f"{figures['server']}: {figures['connections']:,} connections at {_swarm_server(figures)}; "
        f"swarm itself: {own}, {figures.get('swarm_us_per_event', '–')} µs an event"
    )


def _storm_server(figures: dict[str, Any]) -> str:
    back = figures["back"]
    return (
        f"cut {figures['storms']} times; back after p50 {back['p50_ms']:,.0f}, p99 {back['p99_ms']:,.0f}, "
        f"at most {back['max_ms']:,.0f} ms (worst storm), {figures['failed_attempts']} failed attempts, "
        f"{figures['server_us_per_connection']:,.0f} µs of the server each"
    )


def _storm(figures: dict[str, Any]) -> str:
    return f"{figures['server']}: {figures['connections']:,} connections {_storm_server(figures)}"


def _plain(figures: dict[str, Any]) -> str:
    """Any figures: names and values."""
    parts = []
    for name, value in figures.items():
        if isinstance(value, dict):
            value = f"({_plain(value)})"
        elif isinstance(value, list):
            value = " to ".join(map(str, value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            value = f"{value:,}"
        parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _peers(figures: dict[str, Any]) -> str:
    return f"{', '.join(figures)} side by side: the first table of README.md"


def _tools(figures: dict[str, Any]) -> str:
    return f"{figures['server']}: the table above"


def _million(figures: dict[str, Any]) -> str:
    phases = "; ".join(
        f"{phase['phase']} {phase['seconds']:,.0f} s (publishes p99 {phase['api']['p99_ms']:,.0f} ms)"
        for phase in figures["phases"]
    )
    table_entries = f"a table of {figures['table_entries']:,} entries for their sockets; "
    return f"{figures['connections']:,} connections, {figures['workers']} workers; {table_entries}{phases}"


def _stalls(figures: dict[str, Any]) -> str:
    passes = ", ".join(f"{row['situation']} {row['worker_ms']:.1f}" for row in figures["rows"])
    of_control = max(row["control_ms"] for row in figures["rows"])
    return (
        f"{figures['connections']:,} connections, {figures['joins']:,} subscriptions; "
        f"longest pass of the worker's loop, ms: {passes}; of control's: {of_control:.1f}"
    )


_SUMMARIES: dict[str, Summary] = {
    "stalls": _stalls,
    "million": _million,
    "peers": _peers,
    "end_to_end": _end_to_end,
    "fanout": _fanout,
    "swarm": _swarm,
    "storm": _storm,
    "locust": _tools,
    "k6": _tools,
}


def load(results: dict[str, Result]) -> str:
    """What swarm, storm, Locust and k6 found, server beside server."""
    heads, *rows = load_rows(results)
    return table(heads, rows)


def most(results: dict[str, Result]) -> str:
    """The runs of swarm with the most connections."""
    rows = []
    for result in results.values():
        figures = result["figures"]
        if result["bench"] == "swarm" and not _loads("swarm", figures) and figures["server"] not in _REFERENCES:
            latency = figures["latency"]
            rows.append(
                [
                    figures["server"],
                    f"{figures['connections']:,} at {figures['connected_per_s']:,.0f}/s, {figures['failed']} failed",
                    f"{figures['server_bytes_per_connection']:,} B",
                    f"{figures['server_us_per_connection']:,.0f} µs",
                    f"{figures['published']:,} published, {figures['lost_events']} lost, "
                    f"{figures['overtaken']} overtaken",
                    f"p50 {latency['p50_ms']:g}, p99 {latency['p99_ms']:g}, p99.9 {latency['p999_ms']:g} ms",
                ]
            )
    return table(["server", "connections", "memory each", "processor time each", "events", "latency"], rows)


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
            "`bench/connections.py`",
        ],
        [
            "connect and subscribe, as fast as possible",
            f"{1000 / shared['per_core_per_s']:.2f} ms of processor time; with a channel of its own "
            f"{1000 / own_per_s:.2f} ms",
            "`bench/connections.py`",
        ],
        [
            f"the same at a steady {rounded(ticker['connected_per_s'], 2)} connections a second",
            f"{ticker['server_us_per_connection'] / 1000:.1f} ms; with three channels, one of them a presence channel, "
            f"{chat['server_us_per_connection'] / 1000:.1f} ms",
            "`bench/swarm.py`, profiles ticker and chat",
        ],
        [
            "event sent to a socket",
            f"{ticker['server_us_per_event']:.0f} µs of processor time, less in bursts",
            "`bench/swarm.py`, profile ticker",
        ],
        [
            "publish over HTTP, signed, logged and traced",
            f"{sum(publish.values()):.0f} µs of processor time: {publish['worker']:.0f} of a worker, "
            f"{publish['control']:.0f} of the control plane, {publish['redis']:.0f} of Redis",
            "`bench/publish.py`",
        ],
        [
            f"the same at {most['published_per_s']:.0f} a second, with all that the server does meanwhile",
            f"{most['server_us_per_event'] / 1000:.1f} ms",
            "`bench/swarm.py`, profile notifications",
        ],
        [
            "message kept in a history",
            f"{history['redis_bytes'] - 130} B of Redis' memory besides its own size",
            "`bench/history.py`",
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
    """Every result: command, date, commit, figures."""
    rows = []
    for result in results.values():
        text = _SUMMARIES.get(result["bench"], _plain)(result["figures"])
        if "note" in result:
            text += f" ({result['note']})"
        rows.append([f"`{result['command']}`", result["date"], result["commit"], text])
    return table(["command", "date", "commit", "figures"], rows)


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
            stale.append(page.name if page.parent != HERE else f"bench/{page.name}")
            if "--check" not in sys.argv:
                page.write_text(new)
    if "--check" in sys.argv and stale:
        sys.exit(f"{', '.join(stale)} don't match bench/results: run python bench/render.py")


if __name__ == "__main__":
    main()
