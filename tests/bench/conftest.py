"""bench/ contains scripts and isn't a package, so `bench_module` loads one by its path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="session")
def bench_module() -> Callable[[str], ModuleType]:
    """`bench_module("regression/cases")`; the scripts find each other as they do when they run."""

    def load(name: str) -> ModuleType:
        path = BENCH / f"{name}.py"
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        full_name = f"redpoll_bench_{name.replace('/', '_')}"
        if full_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(full_name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[full_name] = module
            spec.loader.exec_module(module)
        return sys.modules[full_name]

    return load
