"""What a check found: one line per check, with the likely cause of a failure and the lines that fix it."""

import enum
from typing import Any, NamedTuple

from redpoll.text.terminal_text import safe

__all__ = ["Finding", "Verdict", "as_json", "as_text", "failed", "ok", "skipped", "warning", "worst"]


class Verdict(enum.IntEnum):
    """How bad a finding is. Ordered, so that the worst of several is their maximum."""

    OK = 0
    SKIPPED = 1
    WARNING = 2
    FAILED = 3


_MARKS = {Verdict.OK: "ok", Verdict.SKIPPED: "--", Verdict.WARNING: "warn", Verdict.FAILED: "FAIL"}


# A certificate may have a hundred names.
_MAX_CHARS = 10_000


class Finding(NamedTuple):
    """The outcome of one check. `seen` is what happened; `cause` and `remedy` are empty unless something is wrong.

    `remedy` is a list of lines to read or to paste, in order.
    """

    check: str
    verdict: Verdict
    seen: str
    cause: str = ""
    remedy: tuple[str, ...] = ()


def ok(check: str, seen: str) -> Finding:
    return Finding(check, Verdict.OK, seen)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, Verdict.SKIPPED, why)


def warning(check: str, seen: str, cause: str, *remedy: str) -> Finding:
    return Finding(check, Verdict.WARNING, seen, cause, remedy)


def failed(check: str, seen: str, cause: str, *remedy: str) -> Finding:
    return Finding(check, Verdict.FAILED, seen, cause, remedy)


def worst(findings: list[Finding]) -> Verdict:
    return max((finding.verdict for finding in findings if finding.verdict is not Verdict.SKIPPED), default=Verdict.OK)


def as_text(finding: Finding) -> str:
    """The finding as a terminal shows it: one line, then the cause and the remedy, indented. The checked server has
    written parts of it."""
    lines = [f"{_MARKS[finding.verdict]:>4}  {finding.check:<12} {safe(finding.seen, _MAX_CHARS)}"]
    if finding.cause:
        lines.append(f"      likely cause: {safe(finding.cause, _MAX_CHARS)}")
    lines += [f"      {safe(line, _MAX_CHARS)}" if line else "" for line in finding.remedy]
    return "\n".join(lines)


def as_json(finding: Finding) -> dict[str, Any]:
    """`check`, `verdict` (ok, skipped, warning, failed), `seen`, `cause`, `remedy` (list of lines)."""
    return {**finding._asdict(), "verdict": finding.verdict.name.lower(), "remedy": list(finding.remedy)}
