"""The tree compared with the README ("How it fits together").

Arrows point down only, and every module has its test file: `src/redpoll/a/b.py` -> `tests/a/test_b.py`,
`ext/redpoll/_x.pyx` -> `tests/ext/test_x.py`.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "redpoll"

# Which package may import which others. `host` is the modules at the top that start everything.
ROOMS = {
    "protocol": set(),
    "ext": set(),
    "base": {"ext"},
    "cluster": {"protocol", "ext", "base"},
    "store": {"protocol", "base"},
    "worker": {"cluster", "protocol", "ext", "base"},
    "control": {"cluster", "store", "protocol", "ext", "base"},
    "host": {"worker", "control", "cluster", "store", "protocol", "base"},
}
# Modules at the top of src/redpoll that every package except protocol may import.
BASE = {
    "app_names",
    "certificate",
    "child_pipe",
    "command_socket",
    "config",
    "http_messages",
    "json_text",
    "terminal_text",
    "logs",
    "loop_lag",
    "proxies",
    "redis_url",
    "redpoll",
    "remedies",
    "setting_table",
    "settings",
}
# Modules that only declare types. Their tests would repeat them.
DECLARATIONS = {
    "redpoll.cluster.membership.membership_events",
    "redpoll.control.context",
    "redpoll.protocol.effects",
}
HOST = {
    "__main__",
    "cli",
    "supervisor",
    "reloading",
    "heartbeat",
    "cut_off",
    "system",
    "child",
    "embedded",
    "datafolder",
    "fitness",
    "welcome",
    "doctor",
    "importing",
}

# Cycles that are still to be broken. Only ever shorten this list: the test below fails when an entry is outdated.
KNOWN_CYCLES: set[frozenset[str]] = set()


def room_of(module: str) -> str:
    """`redpoll.worker.hub` -> `worker`, `redpoll._frame` -> `ext`, `redpoll.config` -> `base`."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "redpoll"
    if name in ROOMS:
        return name
    if name in BASE:
        return "base"
    if name in HOST:
        return "host"
    if name.startswith("_"):
        return "ext"
    raise AssertionError(f"{module}: in no package; add it here and in the README")


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if "migrations" in path.parts:
            continue
        name = ".".join(("redpoll", *path.relative_to(SOURCE).with_suffix("").parts))
        found.append((name.removesuffix(".__init__"), path))
    return found


def imports_of(path: Path) -> set[str]:
    """Every redpoll module that the file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "redpoll"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "redpoll":
            base = SOURCE.joinpath(*node.module.split(".")[1:])
            for alias in node.names:
                is_module = (base / alias.name).is_dir() or (base / f"{alias.name}.py").exists()
                is_extension = alias.name.startswith("_") and not alias.name.startswith("__")
                found.add(f"{node.module}.{alias.name}" if is_module or is_extension else node.module)
    return found


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The groups of modules that import each other, directly or through others: Tarjan's strongly connected components
    with more than one member."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for imported in graph.get(module, ()):
            if imported not in index:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], index[imported])
        if lowest[module] == index[module]:
            at = stack.index(module)
            component, stack[at:] = frozenset(stack[at:]), []
            if len(component) > 1:
                found.add(component)

    for module in graph:
        if module not in index:
            visit(module)
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: str(value) if isinstance(value, str) else "")
def test_imports_point_down(module: str, path: Path):
    room = room_of(module)
    for imported in imports_of(path):
        other = room_of(imported)
        assert other == room or other in ROOMS[room], f"{module} ({room}) imports {imported} ({other})"


def test_no_modules_import_each_other():
    """No cycle of imports, wherever they stand: at the top, inside a function, or under TYPE_CHECKING. Such modules
    can't be read, tested or changed one at a time."""
    found = cycles({module: imports_of(path) - {module} for module, path in modules()})
    new = found - KNOWN_CYCLES
    gone = KNOWN_CYCLES - found
    assert not new, f"new cycles: {[sorted(cycle) for cycle in new]}"
    assert not gone, f"no longer cycles, so delete them from KNOWN_CYCLES: {[sorted(cycle) for cycle in gone]}"


def test_a_cycle_is_found_through_several_modules():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f", "a"}}
    assert cycles(graph) == {frozenset("abc"), frozenset("fg")}


def test_protocol_knows_no_loop_no_redis_and_no_clock():
    forbidden = {
        "asyncio",
        "redis",
        "hiredis",
        "uvloop",
        "aiohttp",
        "time",
        "datetime",
        "socket",
        "structlog",
    }
    for path in sorted((SOURCE / "protocol").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            assert not forbidden & set(names), f"{path.name} imports {names}"


def test_every_module_has_its_test_file():
    missing = []
    for name, path in modules():
        if path.name in ("__init__.py", "__main__.py") or name in DECLARATIONS:
            continue
        parts = name.split(".")[1:]
        stem = parts[-1].strip("_")
        expected = ROOT.joinpath("tests", *parts[:-1], f"test_{stem}.py")
        if not expected.exists():
            missing.append(str(expected.relative_to(ROOT)))
    for path in sorted((ROOT / "ext" / "redpoll").glob("*.pyx")):
        expected = ROOT / "tests" / "ext" / f"test_{path.stem.strip('_')}.py"
        if not expected.exists():
            missing.append(str(expected.relative_to(ROOT)))
    assert not missing


def test_secrets_are_never_compared_with_an_operator():
    """Signatures, secrets, tokens and digests are compared by `hmac.compare_digest`."""
    secret = re.compile(r"(signature|secret|token|digest|hexdigest|password)$", re.IGNORECASE)
    found = []
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare) or not any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                continue
            for side in (node.left, *node.comparators):
                word = side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", "")
                if secret.search(word):
                    found.append(f"{name}:{node.lineno} compares {word}")
    assert not found
