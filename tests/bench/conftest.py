"""bench/regression also runs in earlier checkouts and isn't part of the package: `regression` loads it by its path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "regression"


@pytest.fixture(scope="session")
def regression() -> Callable[[str], ModuleType]:
    """`regression("cases")`; the modules find each other as they do when they run."""

    def load(name: str) -> ModuleType:
        if str(FOLDER) not in sys.path:
            sys.path.append(str(FOLDER))
        full_name = f"redpoll_regression_{name}"
        if full_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(full_name, FOLDER / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[full_name] = module
            spec.loader.exec_module(module)
        return sys.modules[full_name]

    return load
