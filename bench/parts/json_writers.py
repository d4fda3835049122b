"""orjson compared with msgspec where redpoll writes JSON: HTTP responses, log lines, and the CLI's `--json`.

`python -m bench.parts.json_writers [--json FILE]` prints ns per document, the fastest of many rounds, in turns.
`records` are msgspec Structs, which orjson can't write. The figures decide which library writes what (README).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from bench.arguments import parser_of
from bench.report import save

ROUNDS = 200
ROUND_S = 0.002

CHANNELS = {f"presence-room-{number}": {"user_count": number, "subscription_count": 3} for number in range(50)}
LOG_LINE = {
    "timestamp": "2026-11-21T10:00:00.000000Z",
    "level": "warning",
    "role": "worker 0",
    "event": "connection refused",
    "app": "4711",
    "address": "192.0.2.17",
    "code": 4001,
    "reason": "App key 278d425bdf160c739803 not in this cluster",
}
ROWS = [
    {
        "id": str(number),
        "name": f"app {number}",
        "enabled": True,
        "max_connections": 0,
        "origins": ["https://a.example"],
    }
    for number in range(20)
]
DOCUMENTS = {
    "answer to a publish": {},
    "answer with 50 channels": {"channels": CHANNELS},
    "error answer": {"error": "channels: at least one", "code": "invalid", "status": 400, "trace_id": "0" * 32},
    "log line": LOG_LINE,
    "CLI table of 20 rows, indented": ROWS,
}
_encode = msgspec.json.Encoder().encode
_encode_any = msgspec.json.Encoder(enc_hook=str).encode


def writers(name: str) -> dict[str, Callable[[Any], bytes]]:
    if name.startswith("CLI"):
        return {
            "msgspec": lambda value: msgspec.json.format(_encode(value), indent=2),
            "orjson": lambda value: orjson.dumps(value, option=orjson.OPT_INDENT_2),
            "json": lambda value: json.dumps(value, indent=2, ensure_ascii=False).encode(),
        }
    if name == "log line":
        return {
            "msgspec": _encode_any,
            "orjson": lambda value: orjson.dumps(value, default=str),
            "json": lambda value: json.dumps(value, default=str, ensure_ascii=False).encode(),
        }
    return {
        "msgspec": _encode,
        "orjson": orjson.dumps,
        "json": lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(),
    }


def once(write: Callable[[Any], bytes], value: Any, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        write(value)
    return (time.perf_counter() - began) / times


def main() -> None:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    timings: dict[str, dict[str, int]] = {}
    for name, value in DOCUMENTS.items():
        ways = writers(name)
        texts = {json.dumps(json.loads(write(value))) for write in ways.values()}
        assert len(texts) == 1, f"{name}: the libraries write different documents"
        times = {way: max(1, int(ROUND_S / once(write, value, 10))) for way, write in ways.items()}
        best = dict.fromkeys(ways, 1.0)
        for _ in range(ROUNDS):
            for way, write in ways.items():
                best[way] = min(best[way], once(write, value, times[way]))
        timings[name] = {way: round(seconds * 1e9) for way, seconds in best.items()}
        print(f"{name:32}" + "".join(f"{way:>10} {ns:8,} ns" for way, ns in timings[name].items()), flush=True)
    if options.json is not None:
        save(options.json, "json_writers", timings)


if __name__ == "__main__":
    main()
