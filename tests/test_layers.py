"""The tree compared with the tables of rooms in the READMEs.

README ("How it fits together") says which packages exist and which others each may import. Where a package's README has
a table of its rooms, each of these imports only rooms above it. No folders import each other, and every module has its
test file: `src/redpoll/a/b.py` -> `tests/a/test_b.py`, `ext/redpoll/_x.pyx` -> `tests/ext/test_x.py`.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

from helpers.statements import statements

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "redpoll"
# A distribution of its own, which imports nothing of redpoll.
CLIENT = ROOT / "src" / "redpoll_client"

# What any package may import: the version.
PACKAGE_ITSELF = "redpoll"
MAX_MODULES = 26
# Modules that only declare types. Their tests would repeat them.
DECLARATIONS = {
    "redpoll.cluster.membership.membership_events",
    "redpoll.control.commands.context",
    "redpoll.protocol.effects",
    "redpoll.worker.streams.owner",
}


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the rows of the table with this heading, without markup."""
    rows = page.read_text().partition(f"\n{heading}\n")[2].splitlines()[1:]
    assert rows, f"{page.relative_to(ROOT)} has no table {heading}"
    found = []
    for row in rows:
        if not row.startswith("|"):
            break
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", row).replace("`", "")
        found.append([cell.strip() for cell in text.strip("|").split("|")])
    return found


def packages() -> dict[str, set[str]]:
    """Which packages each may import, as README says it."""
    rows = table(ROOT / "README.md", "| package | what is in it | may import |")
    names = {re.sub("^src/(redpoll/)?", "", name).partition("/")[0]: allowed for name, _, allowed in rows}
    everything = set(names)
    return {
        name: everything if allowed == "everything" else {word for word in allowed.split(", ") if word != "nothing"}
        for name, allowed in names.items()
    }


def rooms() -> dict[str, list[str]]:
    """The rooms of each package that has some, in the order of its README. `""`: the package's own modules."""
    divided = sorted({path.parent.parent for path in SOURCE.glob("*/*/__init__.py") if "migrations" not in path.parts})
    return {
        package.name: [row[0].strip("./") for row in table(package / "README.md", "| room | what is in it |")]
        for package in divided
    }


PACKAGES = packages()
ROOMS = rooms()


def package_of(module: str) -> str:
    """`redpoll.worker.hub.hub` -> `worker`, `redpoll._frame` -> `ext`."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return PACKAGE_ITSELF
    return "ext" if parts[1].startswith("_") else parts[1]


def room_of(module: str) -> str:
    """`redpoll.worker.hub.hub` and `redpoll.worker.hub` -> `hub`, `redpoll.worker.main` -> ``."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[2] in ROOMS.get(parts[1], ()) else ""


def folder_of(module: str) -> str:
    path = SOURCE.joinpath(*module.split(".")[1:])
    return module if path.is_dir() else module.rpartition(".")[0]


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if "migrations" in path.parts:
            continue
        name = ".".join(("redpoll", *path.relative_to(SOURCE).with_suffix("").parts))
        found.append((name.removesuffix(".__init__"), path))
    return found


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: Path, types: bool = True) -> set[str]:
    """Every redpoll module that the file imports, at its top or inside a function; `types`: also for types only."""
    found = set()
    for node in statements(syntax(path), types):
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
    package = package_of(module)
    for imported in imports_of(path):
        other = package_of(imported)
        if package != other:
            allowed = PACKAGES[package] | {PACKAGE_ITSELF} if package != PACKAGE_ITSELF else set(PACKAGES)
            assert other in allowed, f"{module} imports {imported}, which README doesn't allow"
    # Types are often declared above, and used below.
    for imported in imports_of(path, types=False) if package in ROOMS else ():
        if package_of(imported) == package:
            above = ROOMS[package][: ROOMS[package].index(room_of(module)) + 1]
            assert room_of(imported) in above, f"{module} imports {imported}, whose room is further down"


def test_packages_and_rooms_are_those_of_the_readmes():
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders | {"ext", CLIENT.name} == set(PACKAGES)
    for package, names in ROOMS.items():
        assert {path.parent.name for path in (SOURCE / package).glob("*/__init__.py")} | {""} == set(names)


def test_no_folder_is_large():
    folders = [CLIENT, *SOURCE.rglob("*"), *CLIENT.rglob("*")]
    sizes = {folder: len(list(folder.glob("[!_]*.py"))) for folder in folders if folder.is_dir()}
    assert {folder.name: size for folder, size in sizes.items() if size > MAX_MODULES} == {}


def test_no_modules_import_each_other():
    """No cycle of imports, wherever they stand: at the top, inside a function, or under TYPE_CHECKING. Such modules
    can't be read, tested or changed one at a time."""
    assert cycles({module: imports_of(path) - {module} for module, path in modules()}) == set()


def test_no_folders_import_each_other():
    """Imports for types only don't count."""
    graph: dict[str, set[str]] = {}
    for module, path in modules():
        if module != "redpoll":
            folder = folder_of(module)
            found = {folder_of(imported) for imported in imports_of(path, types=False)}
            graph.setdefault(folder, set()).update(found - {folder, "redpoll"})
    assert cycles(graph) == set()


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
        for node in statements(syntax(path)):
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
        # What is in a small module is tested with what uses it.
        if len(path.read_text().splitlines()) < 60:
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


def client_modules() -> dict[str, Path]:
    """`publisher`, `django.models` -> its file. Examples and migrations aside."""
    found = {}
    for path in sorted(CLIENT.rglob("*.py")):
        parts = path.relative_to(CLIENT).with_suffix("").parts
        if parts != ("__init__",) and not {"examples", "migrations", "build"} & set(parts):
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def client_imports(path: Path) -> set[str]:
    """The modules of redpoll_client, and anything of redpoll, that a file imports."""
    found = set()
    for node in statements(syntax(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {name for name in names if name.partition(".")[0] in ("redpoll", CLIENT.name)}
    return found


def test_the_client_imports_nothing_of_redpoll_and_has_no_cycles():
    graph = {}
    for name, path in client_modules().items():
        imported = client_imports(path)
        assert not {other for other in imported if other.partition(".")[0] == "redpoll"}, path.name
        graph[name] = {other.removeprefix(f"{CLIENT.name}.") for other in imported} - {name}
    assert cycles(graph) == set()


def test_every_module_of_the_client_is_in_its_readme_with_its_tests():
    rows = table(CLIENT / "README.md", "| module | what is in it | tests |")
    listed = {name: tests for name, _, tests in rows}
    large = {name for name, path in client_modules().items() if len(path.read_text().splitlines()) >= 60}
    assert large - set(listed) == set()
    assert set(listed) - set(client_modules()) == set()
    assert [tests for tests in listed.values() if not (ROOT / "tests" / CLIENT.name / f"{tests}.py").exists()] == []


def test_secrets_are_never_compared_with_an_operator():
    """Signatures, secrets, tokens and digests are compared by `hmac.compare_digest`."""
    secret = re.compile(r"(signature|secret|token|digest|hexdigest|password)$", re.IGNORECASE)
    found = []
    for name, path in [*modules(), *client_modules().items()]:
        for node in ast.walk(syntax(path)):
            if not isinstance(node, ast.Compare) or not any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                continue
            for side in (node.left, *node.comparators):
                word = side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", "")
                if secret.search(word):
                    found.append(f"{name}:{node.lineno} compares {word}")
    assert not found
