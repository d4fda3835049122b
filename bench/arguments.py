"""The command line of every bench: what it does, where it writes its figures, and how it ends."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

__all__ = ["end_on_signal", "parser_of"]


def parser_of(doc: str | None, *, saves: bool = True, tls: bool = False) -> argparse.ArgumentParser:
    """A parser whose help is the bench's docstring. `saves`: with `--json FILE` for its figures (report.py, `save`).
    `tls`: with `--tls` (driver.py, `tls_settings`). From then on SIGTERM ends the bench and the servers that it
    started."""
    signal.signal(signal.SIGTERM, end_on_signal)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if saves:
        parser.add_argument("--json", type=Path, help="also write the figures to this file")
    if tls:
        parser.add_argument("--tls", action="store_true", help="clients of the redpoll that is started here use TLS")
    return parser


def end_on_signal(number: int, frame: object) -> None:
    """Leaves every `with`. A second signal, such as that of `timeout`, doesn't interrupt this."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
