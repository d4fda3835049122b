"""The tests of tests/clients that need no second process, over the fake: which pass, and why the others don't apply.

In the suite, those without a Node process of their own; `CLIENTS=all pytest tests/testing/test_clients.py` takes all.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from clients import test_laravel_echo, test_order, test_pusher_js, test_server_libraries
from node import Node, auth_endpoint, local_signer
from redpoll.testing import FakeServer

ALL = os.environ.get("CLIENTS") == "all"
MODULES = (test_pusher_js, test_laravel_echo, test_server_libraries, test_order)
# Tests that don't apply, and why. All others pass.
WITHOUT = {
    "test_python_library_with_a_wrong_clock": "it changes the clock of this process, which is the fake's too",
    "test_node_driver_reports_what_a_library_throws": "it is about the test's own driver",
}


class Target(FakeServer):
    """With what tests/server.py has besides. Tests that want clients of several workers take the fake's connections in
    turn for those of two."""

    workers = 2

    @property
    def public_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def client_ports(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {0: set(), 1: set()}
        for port in self.peers():
            found[self.worker_of(port)].add(port)
        return found

    def worker_of(self, client_port: int) -> int:
        return self._numbers.setdefault(client_port, len(self._numbers)) % 2

    def peers(self) -> list[int]:
        ports = self._run(lambda: [one.transport.get_extra_info("peername") for one in self._ports if one.socket])
        return [peer[1] for peer in ports]

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}


def rows() -> Iterator[Any]:
    """Each test function with each of its parameters."""
    for module in MODULES:
        for name, function in inspect.getmembers(module, inspect.iscoroutinefunction):
            if not name.startswith("test_") or name in WITHOUT or function.__module__ != module.__name__:
                continue
            if ALL or "node" not in inspect.signature(function).parameters:
                for number, values in enumerate(_parameters(function)):
                    yield pytest.param(function, values, id=f"{_short(module)}-{name[5:]}-{number}")


def _short(module: ModuleType) -> str:
    return module.__name__.rpartition(".test_")[2]


def _parameters(function: Callable[..., Any]) -> list[dict[str, Any]]:
    sets: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
            sets = [
                {**known, **dict(zip(names, values if len(names) > 1 else (values,), strict=True))}
                for known in sets
                for values in mark.args[1]
            ]
    return sets


@pytest.fixture
def server() -> Iterator[Target]:
    with Target() as running:
        yield running


@pytest.fixture
async def fixtures(server: Any, request: pytest.FixtureRequest) -> AsyncIterator[dict[str, Any]]:
    """Those of tests/clients/conftest.py that the test wants."""
    wanted = inspect.signature(request.node.callspec.params["function"]).parameters
    made: dict[str, Any] = {"server": server}
    async with auth_endpoint(local_signer(server)) as url:
        made["auth_url"] = url
        if "node" in wanted:
            async with Node(server) as made["node"]:
                yield made
        else:
            yield made


@pytest.mark.parametrize(("function", "values"), list(rows()))
async def test_row(function: Callable[..., Any], values: dict[str, Any], fixtures: dict[str, Any], monkeypatch) -> None:
    known = {**fixtures, **values, "monkeypatch": monkeypatch}
    await function(**{name: known[name] for name in inspect.signature(function).parameters})


def test_every_row_that_does_not_apply_is_a_test() -> None:
    assert all(any(hasattr(module, name) for module in MODULES) for name in WITHOUT)
