"""The command line of every bench: what it does, and where it writes its figures."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["parser_of"]


def parser_of(doc: str | None, *, saves: bool = True, tls: bool = False) -> argparse.ArgumentParser:
    """A parser whose help is the bench's docstring. `saves`: with `--json FILE` for its figures (report.py, `save`).
    `tls`: with `--tls` (driver.py, `tls_settings`)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if saves:
        parser.add_argument("--json", type=Path, help="also write the figures to this file")
    if tls:
        parser.add_argument("--tls", action="store_true", help="clients of the redpoll that is started here use TLS")
    return parser
