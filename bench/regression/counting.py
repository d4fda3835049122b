"""Runs the cases of `cases.py` under valgrind's callgrind and gives the instructions of one operation of each.

    python bench/regression/counting.py            prints JSON: case -> instructions, and its costliest functions

Instruction counts hardly depend on the machine's load: on a shared machine, times of equal code vary by a factor of
two and counts by less than 0.3 %. Instructions of the kernel are not counted.
The script starts itself again under valgrind (`--child`), with callgrind's client requests in a small library that
needs `cc` and valgrind's headers.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
BUILD = FOLDER.parent.parent / "build" / "regression"
# Functions that a case's record names, the costliest first.
_MAX_FUNCTIONS = 25
# What the allocator of libc does depends on all that was allocated before. Each call counts as this many instructions.
_ALLOCATOR = frozenset(("malloc", "calloc", "realloc", "free"))
_ALLOCATOR_CALL = 100
_ALLOCATOR_PARTS = re.compile(
    r"(malloc|calloc|realloc|free|_int_\w+|malloc_consolidate|unlink_chunk|sysmalloc|tcache_\w+)(\.|$)"
)
_TITLE = re.compile(r"^desc: Trigger: Client Request: (.*)$", re.MULTILINE)


class Unavailable(Exception):
    """This machine can't count instructions; the text says what is missing."""


def library() -> Path:
    """callgrind.c, compiled."""
    made = BUILD / "callgrind.so"
    source = FOLDER / "callgrind.c"
    if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
        made.parent.mkdir(parents=True, exist_ok=True)
        new = made.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", new, source], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Unavailable(f"bench/regression/callgrind.c doesn't compile: {done.stderr.strip()}")
        new.rename(made)
    return made


def count(tree: Path | None = None) -> dict[str, dict]:
    """Case -> {"instructions": of one operation, "functions": {name: instructions}}.

    `tree` is another checkout to measure, built in place, with the cases that it has itself. Takes about 20 s of
    processor time. Raises Unavailable.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise Unavailable("valgrind is not installed")
    made = library()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # Equal hashes give equal dictionaries, and so equal counts.
    environment |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    # The code beside this script, not the one that happens to be installed.
    tree = FOLDER.parent.parent if tree is None else tree
    environment["PYTHONPATH"] = str(tree / "src")
    script = tree / "bench" / "regression" / "counting.py"
    with tempfile.TemporaryDirectory(prefix="rpcount") as folder:
        out = Path(folder) / "callgrind.out"
        command = [valgrind, "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}", "--instr-atstart=no"]
        # Not compressed, a dump can be read line by line.
        command += ["--compress-strings=no", "--compress-pos=no", "--dump-line=no"]
        command += [sys.executable, script, "--child", str(made)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"counting failed:\n{done.stdout}{done.stderr}")
        dumps = dict(map(_read_dump, Path(folder).glob("callgrind.out.*")))
    counted = {}
    for name, operations in json.loads(done.stdout.splitlines()[-1]).items():
        total, functions = dumps[name]
        total -= dumps[f"{name} idle"][0]
        costliest = sorted(functions.items(), key=lambda item: -item[1])[:_MAX_FUNCTIONS]
        counted[name] = {
            "instructions": round(total / operations, 1),
            "functions": {function: round(cost / operations, 1) for function, cost in costliest},
        }
    return counted


def _read_dump(path: Path) -> tuple[str, tuple[int, dict[str, int]]]:
    """A dump's title, its instructions, and those of each function without the functions that it calls.

    `allocator calls` stands for the allocator's functions.
    """
    text = path.read_text(errors="replace")
    title = _TITLE.search(text)
    functions: dict[str, int] = {}
    allocator_calls = 0
    # The allocator's functions below malloc and free have no names where libc is stripped; what they took is known from
    # the calls that led to them.
    allocator = 0
    current = called = ""
    calls = 0
    for line in text.splitlines():
        if line.startswith("fn="):
            current = line[3:]
        elif line.startswith("cfn="):
            called = line[4:]
        elif line.startswith("calls="):
            # The next line is the cost of the called function, which has its own lines.
            calls = int(line[6:].split()[0])
        elif line[:1].isdigit():
            cost = int(line.split()[1])
            if not calls:
                functions[current] = functions.get(current, 0) + cost
            elif called in _ALLOCATOR and current not in _ALLOCATOR:
                allocator_calls += calls
                allocator += cost
            calls = 0
    total = sum(functions.values()) - allocator + allocator_calls * _ALLOCATOR_CALL
    functions = {name: cost for name, cost in functions.items() if not _ALLOCATOR_PARTS.match(name)}
    functions["allocator calls"] = allocator_calls * _ALLOCATOR_CALL
    return title[1] if title else "", (total, functions)


def _child(made: str) -> None:
    from cases import CALIBRATION, CASES

    # PyDLL keeps the GIL, so that calls are few instructions and always the same ones.
    tools = ctypes.PyDLL(made)
    gc.disable()
    names = {}
    instrumented = False
    for make in (CALIBRATION, *CASES.values()):
        case = make()
        # The first runs fill caches: of the interpreter (specialised instructions) and of redpoll.
        case.run(50)
        case.reset()
        if not instrumented:
            tools.start_counting()
            instrumented = True
        # The first run without operations fills caches that the counting itself has emptied; nothing reads its count.
        for title, operations in ((f"{case.name} first", 0), (f"{case.name} idle", 0), (case.name, case.operations)):
            case.run(1)
            case.reset()
            tools.zero_counts()
            case.run(operations)
            tools.write_counts(title.encode())
            case.reset()
        names[case.name] = case.operations
    print(json.dumps(names))


def main() -> None:
    parser = argparse.ArgumentParser(description="instructions of one operation of each case")
    parser.add_argument("--tree", type=Path, help="another checkout to measure, with its extensions built in place")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child)
        return
    try:
        print(json.dumps(count(options.tree), indent=1))
    except Unavailable as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    main()
