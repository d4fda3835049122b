"""What a record must be like, beyond the form of each value. Each check raises RecordError; none knows a store."""

from collections.abc import Sequence
from typing import Final

import msgspec

from redpoll.protocol.apps import MAX_HISTORY_RULES, App, HistoryRule, history_fault
from redpoll.protocol.presence import MAX_USER_ID_CHARS

__all__ = ["RecordError", "check_name", "check_roster", "check_rules", "check_size"]

# What the directory takes of one app (cluster.md 7).
_MAX_RECORD_BYTES: Final = 16 * 1024


class RecordError(Exception):
    """A change that can't be made. The text is a sentence for whoever asked for it."""


def check_name(whose: str, name: str) -> None:
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise RecordError(f"{whose} name is 1 to 200 printable characters")


def check_rules(app_id: str, rules: Sequence[HistoryRule]) -> None:
    if len(rules) > MAX_HISTORY_RULES:
        raise RecordError(f"an app has at most {MAX_HISTORY_RULES} history rules")
    known: dict[tuple[str, bool], HistoryRule] = {}
    for rule in rules:
        fault = history_fault(rule)
        if fault is not None:
            raise RecordError(fault)
        other = known.setdefault((rule.name, rule.prefix), rule)
        if other is not rule:
            what = f"channels that begin with {rule.name!r}" if rule.prefix else f"the channel {rule.name!r}"
            raise RecordError(
                f"app {app_id} has the rule {other.id} for {what} already: remove it first "
                f"(redpoll history rule remove {app_id} {other.id})"
            )


def check_size(app: App) -> None:
    size = len(msgspec.json.encode(app))
    if size > _MAX_RECORD_BYTES:
        raise RecordError(f"with that, app {app.id} would have {size} bytes; every worker keeps {_MAX_RECORD_BYTES}")


def check_roster(app: App, max_roster_bytes: int) -> None:
    """A roster goes out as one message, and what is owed beyond the bound costs the client its socket. The bound is
    half of the setting `max_owed_bytes`."""
    member_bytes = app.max_user_info_bytes + MAX_USER_ID_CHARS
    if app.max_presence_members * member_bytes > max_roster_bytes:
        raise RecordError(
            f"{app.max_presence_members} members of {member_bytes} bytes (max_user_info_bytes and an id of "
            f"{MAX_USER_ID_CHARS}) do not fit into {max_roster_bytes} bytes, half of max_owed_bytes"
        )
