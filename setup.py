"""Builds the extensions of ext/redpoll into the package; everything else is in pyproject.toml.

`REDPOLL_DEBUG=1` builds them with bounds checks and live-object counters. Build that apart from the
release build, and run the engine's tests on it:

    REDPOLL_DEBUG=1 python setup.py build --build-base build/debug --build-lib build/debug/lib
    PYTHONPATH=build/debug/lib python -m pytest tests/ext

`REDPOLL_PURE=1` builds none of them, as on other systems than Linux.
"""

import multiprocessing
import os
import sys
from typing import Any

from setuptools import Extension, setup

# Off Linux, and with REDPOLL_PURE=1, the package has no engine: `redpoll serve` says so, and all that reaches a server
# by its address works, and redpoll.testing (src/redpoll/config/engine.py).
PURE = not sys.platform.startswith("linux") or os.environ.get("REDPOLL_PURE", "") not in ("", "0")
DEBUG = os.environ.get("REDPOLL_DEBUG", "") not in ("", "0")

# A checkout must not pick up objects that were compiled for the other kind of build.
BUILD_FOLDER = "build/debug/cython" if DEBUG else "build/cython"

extensions = [
    Extension(
        f"redpoll.{name}",
        [f"ext/redpoll/{name}.pyx"],
        define_macros=[("REDPOLL_DEBUG", "1")] if DEBUG else [],
        # Interposition off: calls inside a module are direct. No debug symbols: they are 90 % of the file.
        extra_compile_args=["-O1", "-g"] if DEBUG else ["-O3", "-g0", "-fno-semantic-interposition"],
    )
    for name in (
        "_text",
        "_shards",
        "_frame",
        "_digests",
        "_http",
        "_publish",
        "_publish_body",
        "_replies",
        "_fast_publish",
        "_memory",
        "_wheel",
        "_sockets",
        "_fanout",
        "_engine",
        "_openssl",
        "_tls",
    )
]


PROCESSES = os.cpu_count() or 1


def compiled() -> list[Any]:
    """The extensions as C. Cython is only needed for them."""
    from Cython.Build import cythonize

    # Other start methods run this file again in each process: from Python 3.14 on.
    forks = multiprocessing.get_start_method() == "fork"
    modules: list[Any] = cythonize(
        extensions,
        nthreads=PROCESSES if forks else 0,
        build_dir=BUILD_FOLDER,
        include_path=["ext"],
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "nonecheck": DEBUG,
            "initializedcheck": DEBUG,
            "overflowcheck": False,
            "cdivision": True,
            "embedsignature": True,
        },
    )
    return modules


setup(
    ext_modules=[] if PURE else compiled(),
    options={"build_ext": {"parallel": PROCESSES}},
)
