"""Fuzzes the extensions for ten minutes, guided by coverage, and compares them with slow parsers.

`python -m bench.soak.fuzz [--seconds 600] [--seed N]` builds the extensions separately (build/fuzz) with
AddressSanitizer, UndefinedBehaviorSanitizer, bounds checks and edge coverage, then feeds damaged frames in damaged
chunks, request heads, bus envelopes and events, what fuzz_http.py says (HTTP requests, messages to control, signed
queries and publishes), and what fuzz_sockets.py says (connections with and without TLS, audiences). A finding is a
sanitizer's report, an unexpected exception, or a difference from tests/ext/reference.py, tests/ext/http_reference.py or
the slower Python code. Inputs that reach new code are stored in build/fuzz/corpus, findings in build/fuzz/findings. The
exit code is 1 if there is one. Needs gcc with its sanitizers.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import mmap
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bench.arguments import parser_of
from bench.report import save
from bench.soak.fuzz_http import Difference, HttpTargets
from bench.soak.fuzz_http import seeds as http_seeds
from bench.soak.fuzz_sockets import SocketTargets
from bench.soak.fuzz_sockets import seeds as socket_seeds

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "fuzz"
CORPUS = FOLDER / "corpus"
FINDINGS = FOLDER / "findings"
MAX_INPUT_BYTES = 4096
# Where an input's first byte says that its target is one of fuzz_http.py, or of fuzz_sockets.py.
FIRST_HTTP = 8
HTTP_TARGETS = ("requests", "requests", "stream", "queries", "bodies", "bodies", "bodies", "publishes")
FIRST_OF_SOCKETS = FIRST_HTTP + len(HTTP_TARGETS)
SOCKET_TARGETS = ("connections", "connections", "audiences")
# The share of inputs from a corpus of connections: one takes as long as thirty others.
CONNECTIONS_SHARE = 0.05
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
HEAD = (
    b"GET /app/key HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


# -- the parent: builds, runs the child under the sanitizers, says what it died of -------------------------------


def library(name: str) -> str:
    return subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()


def build() -> dict[str, str]:
    """The environment in which the instrumented extensions can be imported."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    coverage = FOLDER / "coverage.so"
    source = Path(__file__).with_name("coverage.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", coverage, source], check=True)
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", FOLDER, "--build-lib", FOLDER / "lib"]
    flags = {
        "REDPOLL_DEBUG": "1",
        "CFLAGS": f"{SANITIZERS} -fsanitize-coverage=trace-pc",
        "LDFLAGS": SANITIZERS,
    }
    with (FOLDER / "build.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env=os.environ | flags, stdout=log, stderr=log, check=True)
    preloaded = [library("libasan.so"), library("libubsan.so"), str(coverage)]
    return os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        # Python's allocator would hide overruns from the sanitizer. What it leaks at exit doesn't matter.
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=77",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(FOLDER / "lib"),
    }


def supervise(seconds: float, seed: int, result: Path | None) -> int:
    environment = build()
    for folder in (CORPUS, FINDINGS):
        folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", __spec__.name, "--child", "--seconds", str(seconds), "--seed", str(seed)]
    (FOLDER / "figures.json").unlink(missing_ok=True)
    status = subprocess.run(command, env=environment).returncode
    if status not in (0, 1):
        # The process died while handling an input, which is the finding.
        size, _, data = (FOLDER / "current").read_bytes().partition(b"\n")
        keep(FINDINGS, data[: int(size)])
        print(f"FAILED: the process ended with {status}; the input is in {FINDINGS}")
    elif status == 0 and result is not None:
        save(result, "fuzz", json.loads((FOLDER / "figures.json").read_text()))
    return 1 if status else 0


def keep(folder: Path, data: bytes) -> None:
    (folder / hashlib.sha1(data).hexdigest()[:16]).write_bytes(data)


# -- the child: one input after another ---------------------------------------------------------------------------


def load_reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tests" / "ext" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Transport:
    """Records what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.eof_written = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def write(self, data: bytes) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof_written = True

    def pause_reading(self) -> None: ...

    def abort(self) -> None: ...


class Targets:
    """Feeds one input to one of the targets. Its first byte chooses the target, the next few how it is cut."""

    def __init__(self) -> None:
        from redpoll import _engine, _frame, _http
        from redpoll._fanout import Flusher

        class MembershipEvents(_engine.WebSocket):
            def head_received(self, head: bytes) -> None:
                self.accept(_http.parse_head(head).headers[b"sec-websocket-key"])

            def message_received(self, message: bytes) -> None:
                self.reported.append(("text", message))

            def binary_message_received(self, message: bytes) -> None:
                self.reported.append(("binary", message))

            def closed(self, code: int, reason: str) -> None:
                self.reported.append(("closed", code, reason))

        self.http, self.frame, self.flusher_type, self.listener_type = _http, _frame, Flusher, MembershipEvents
        self.reference = load_reference()
        http = HttpTargets()
        self.by_byte: list[Callable[[bytes], None]] = [self.frames] * 6 + [self.heads, self.envelopes]
        self.by_byte += [getattr(http, name) for name in HTTP_TARGETS]
        sockets = SocketTargets(FOLDER)
        self.by_byte += [getattr(sockets, name) for name in SOCKET_TARGETS]

    def run(self, data: bytes) -> None:
        if data:
            self.by_byte[data[0] % len(self.by_byte)](data[1:])

    def is_connection(self, data: bytes) -> bool:
        return bool(data) and data[0] % len(self.by_byte) - FIRST_OF_SOCKETS in (0, 1)

    def frames(self, data: bytes) -> None:
        cuts, stream = data[:4], data[4:]
        limit = 200 if cuts[:1] < b"\x80" else 65536
        flusher = self.flusher_type(lambda: None)
        ws, transport = self.listener_type(flusher, limit), Transport()
        ws.reported = []
        ws.connection_made(transport)
        ws.feed(HEAD)
        flusher.flush()
        transport.written = b""
        at, number = 0, 0
        while at < len(stream):
            step = 1 + cuts[number % len(cuts)] % 64
            ws.feed(stream[at : at + step])
            at += step
            number += 1
        flusher.flush()
        if ws.buffered > limit + 14:
            raise Difference("more is kept than the limit allows")
        self.compare(stream, limit, ws.reported, transport)
        ws.connection_lost(None)
        if [event[0] for event in ws.reported].count("closed") != 1:
            raise Difference("closed() was not called once")

    def compare(self, stream: bytes, limit: int, reported: list[tuple], transport: Transport) -> None:
        expected = self.reference.parse(stream, limit)
        heard = [event for event in reported if event[0] != "closed"]
        if heard != [event for event in expected if event[0] in ("text", "binary")]:
            raise Difference(f"messages: {heard} for {expected}")
        frames = self.reference.server_frames(transport.written)
        pings = [event[1] for event in expected if event[0] == "ping"]
        if [payload for opcode, payload in frames if opcode == 10] != pings:
            raise Difference(f"pongs: {frames} for {expected}")
        ends = [event for event in expected if event[0] in ("close", "fail")]
        closed = [event[1] for event in reported if event[0] == "closed"]
        if closed != [event[1] for event in ends] or transport.eof_written != bool(ends):
            raise Difference(f"ends: {closed} for {ends}")

    def heads(self, data: bytes) -> None:
        try:
            expected = self.reference.parse_head(data)
        except ValueError:
            expected = None
        try:
            head = self.http.parse_head(data)
        except ValueError:
            if expected is not None:
                raise Difference(f"the head {data!r} was refused") from None
            return
        if (head.method, head.target, head.version, head.headers) != expected:
            raise Difference(f"{head} is not {expected}")
        self.http.upgrade_fault(head)

    def envelopes(self, data: bytes) -> None:
        try:
            _, _, hi, lo, _, user, event, text = self.frame.envelope(data)
        except ValueError:
            return
        made = self.frame.frame_of(data, b"channel")
        if self.frame.frame_and_trace(data, b"channel") != (*made, self.frame.trace_of(data)):
            raise Difference("frame_and_trace is not frame_of and trace_of")
        if made != (self.frame.event_frame(event, b"channel", text, user), hi, lo):
            raise Difference("frame_of is not event_frame of envelope")
        try:
            slow = self.reference.event_frame(event, b"channel", text, user)
        except UnicodeDecodeError:
            return
        if made[0] != slow:
            raise Difference("event_frame is not what json.dumps makes")


def seeds(reference) -> list[bytes]:
    """A valid input of each kind, to be damaged."""
    frame = reference.client_frame
    streams = [
        frame(1, b"hello") + frame(9, b"ping") + frame(8, b"\x03\xe8bye"),
        frame(1, b"h\xc3", fin=False) + frame(10, b"") + frame(0, b"\xa9", fin=False) + frame(0, b"llo"),
        frame(2, bytes(range(256)) * 2) + frame(1, b"x" * 130),
        frame(1, "\u20ac\U0001f600é".encode() * 9) + frame(8),
        frame(1, b"", fin=False) + frame(0, b"x" * 70_000, length_bytes=8)[:300],
    ]
    made = [
        bytes([kind]) + cuts + stream
        for stream in streams
        for kind, cuts in ((0, b"\x00\x01\x3f\x09"), (3, b"\xff" * 4))
    ]
    made.append(b"\x06" + HEAD)
    made.append(b"\x07e 12 11 123.456 0123456789abcdef 2 5\nu1event" + b'{"a":"b\\n\x01"}' * 3)
    made.append(b"\x07e 0 0 - - 0 1\ne")
    for name, inputs in http_seeds().items():
        made += [bytes([FIRST_HTTP + HTTP_TARGETS.index(name)]) + data for data in inputs]
    for name, inputs in socket_seeds(reference).items():
        made += [bytes([FIRST_OF_SOCKETS + SOCKET_TARGETS.index(name)]) + data for data in inputs]
    return made


def damage(data: bytes, corpus: list[bytes], chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(7)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << chance.randrange(8)
        elif kind == 1 and changed:
            changed[at % len(changed)] = chance.choice((0, 1, 125, 126, 127, 128, 136, 137, 254, 255))
        elif kind == 2:
            changed[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif kind == 3:
            del changed[at : at + chance.randrange(1, 17)]
        elif kind == 4:
            piece = changed[at : at + chance.randrange(1, 65)]
            to = chance.randrange(len(changed) + 1)
            changed[to:to] = piece
        elif kind == 5:
            other = chance.choice(corpus)
            begin = chance.randrange(len(other) + 1)
            changed[at:] = other[begin:]
        elif changed:
            changed[at % len(changed)] = chance.randrange(256)
    return bytes(changed[:MAX_INPUT_BYTES])


def fuzz(seconds: float, seed: int) -> int:
    coverage = ctypes.CDLL(str(FOLDER / "coverage.so"))
    targets = Targets()
    chance = random.Random(seed)
    corpus = seeds(targets.reference) + [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    connections = [data for data in corpus if targets.is_connection(data)]
    others = [data for data in corpus if not targets.is_connection(data)]
    reached, added, inputs = 0, Counter(), 0
    with (FOLDER / "current").open("w+b") as file:
        file.truncate(16 + MAX_INPUT_BYTES)
        current = mmap.mmap(file.fileno(), 0)
        for data in corpus:
            targets.run(data)
        reached = coverage.newly_reached()
        began = time.monotonic()
        print(f"seed {seed}, {len(corpus)} inputs at the start, {reached} edges", flush=True)
        while (ran_s := time.monotonic() - began) < seconds:
            pool = connections if chance.random() < CONNECTIONS_SHARE else others
            data = damage(chance.choice(pool), corpus, chance)
            # Written before it runs, so that an input that kills the process can be found.
            entry = b"%d\n" % len(data) + data
            current[: len(entry)] = entry
            try:
                targets.run(data)
            except Exception as fault:
                keep(FINDINGS, data)
                print(f"FAILED: {type(fault).__name__}: {fault}; the input is in {FINDINGS}")
                return 1
            inputs += 1
            fresh = coverage.newly_reached()
            if fresh:
                reached += fresh
                added[data[0] % len(targets.by_byte)] += 1
                corpus.append(data)
                (connections if targets.is_connection(data) else others).append(data)
                keep(CORPUS, data)
            if inputs % 100_000 == 0:
                print(f"{ran_s:6.0f} s: {inputs} inputs, {reached} edges, {len(corpus)} kept", flush=True)
    print(f"{inputs} inputs in {seconds:g} s, {reached} edges, {sum(added.values())} new in the corpus, no finding")
    figures = {"seconds": seconds, "inputs": inputs, "edges": reached, "findings": 0}
    (FOLDER / "figures.json").write_text(json.dumps(figures))
    return 0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.exit(fuzz(arguments.seconds, arguments.seed))
    sys.exit(supervise(arguments.seconds, arguments.seed, arguments.json))


if __name__ == "__main__":
    main()
