"""Benchmarks: README.md says which answers which question. Run them from the root: `python -m bench.load.swarm`."""

import sys
from pathlib import Path

# Servers, wire and proxies are those of the tests.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
