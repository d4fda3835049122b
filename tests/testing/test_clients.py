"""The tests of tests/clients and of hostile input that need no second process, over the fake.

`fake_rows.py` lists them, those that don't apply, and why. In the suite, the short ones;
`pytest --long` takes all.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from clients.node import Node, auth_endpoint, local_signer
from clients.test_browser_module import opened_page
from helpers.lengths import is_long
from redpoll.testing import FakeServer
from testing import fake_rows

CLIENTS = Path(__file__).parents[1] / "clients"


class Target(FakeServer):
    """With what tests/helpers/server.py has besides. Tests that want clients of several workers take the fake's
    connections in turn for those of two."""

    workers = 2

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._numbers: dict[int, int] = {}

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

    def worker_pids(self) -> list[int]:
        return [os.getpid()]

    def peers(self) -> list[int]:
        ports = self._run(lambda: [one.transport.get_extra_info("peername") for one in self._ports if one.socket])
        return [peer[1] for peer in ports]


def rows() -> Iterator[Any]:
    """Each test function with each of its parameters."""
    for module in fake_rows.MODULES:
        for function in fake_rows.tests_of(module):
            if is_long() or not fake_rows.is_long(function):
                for number, values in enumerate(fake_rows.parameters_of(function)):
                    name = f"{fake_rows.short(module)}-{function.__name__[5:]}-{number}"
                    yield pytest.param(function, values, id=name)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Target]:
    module = inspect.getmodule(request.node.callspec.params["function"])
    assert module is not None
    with Target(**fake_rows.MODULES[module]) as running:
        for prefix, rule in fake_rows.RULES.get(module, {}).items():
            running.keep_history(prefix, **rule)
        yield running


@pytest.fixture
async def fixtures(server: Any, request: pytest.FixtureRequest) -> AsyncIterator[dict[str, Any]]:
    """Those of tests/clients that the test wants."""
    function, values = (request.node.callspec.params[name] for name in ("function", "values"))
    wanted = inspect.signature(function).parameters
    async with AsyncExitStack() as stack:
        made: dict[str, Any] = {**values, "server": server}
        made["auth_url"] = await stack.enter_async_context(auth_endpoint(local_signer(server)))
        if "node" in wanted:
            made["node"] = await stack.enter_async_context(Node(server))
        if "page" in wanted:
            opened = opened_page(server, values.get("page", "node"), function.__name__)
            made["page"] = await stack.enter_async_context(opened)
        yield made


@pytest.mark.parametrize(("function", "values"), list(rows()))
async def test_row(function: Callable[..., Any], values: dict[str, Any], fixtures: dict[str, Any], monkeypatch) -> None:
    known = {**fixtures, "monkeypatch": monkeypatch}
    await function(**{name: known[name] for name in inspect.signature(function).parameters})


def test_the_tables_name_every_test_that_does_not_apply() -> None:
    assert all(any(hasattr(module, name) for module in fake_rows.MODULES) for name in fake_rows.WITHOUT)
    modules = {path.stem.removeprefix("test_") for path in CLIENTS.glob("test_*.py")}
    here = {fake_rows.short(module) for module in fake_rows.MODULES} - {"hostile_input"}
    assert modules == here | fake_rows.WHOLE_MODULES_WITHOUT.keys()
    text = fake_rows.README.read_text()
    assert fake_rows.with_table(text) == text, "run python tests/testing/fake_rows.py"
