"""The command line of every bench: what it does, and where it writes its figures."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["parser_of"]


def parser_of(doc: str | None, *, saves: bool = True) -> argparse.ArgumentParser:
    """A parser whose help is the bench's docstring. `saves`: with `--json FILE` for its figures (report.py, `save`)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if saves:
        parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser
