"""Checks of whole records: names, history rules, and sizes. Each check raises RecordError."""

from collections.abc import Sequence
from typing import Final

import msgspec

from redpoll.protocol.apps import MAX_HISTORY_RULES, App, HistoryRule, history_fault
from redpoll.protocol.presence import MAX_USER_ID_CHARS

__all__ = ["RecordConflict", "RecordError", "check_name", "check_roster", "check_rules", "check_size"]

# The largest app record in the directory; every worker has a copy of it.
_MAX_RECORD_BYTES: Final = 16 * 1024
_DEFAULT: Final = App(id="", name="", keys=())
_DEFAULT_SIZES: Final = (_DEFAULT.max_presence_members, _DEFAULT.max_user_info_bytes)


class RecordError(Exception):
    """A change of records that isn't possible. The text is a sentence for the person who requested it."""


class RecordConflict(RecordError):
    """What is requested would be possible, if other records were different: another app has the key, for example."""


def check_name(whose: str, name: str) -> None:
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise RecordError(f"{whose} name must have 1 to 200 printable characters")


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
                f"app {app_id} already has the rule {other.id} for {what}; remove it first "
                f"(redpoll history rule remove {app_id} {other.id})"
            )


def check_size(app: App) -> None:
    # Without the console's fields: they are the server's, and who looks at a full record's app must not be refused.
    size = len(msgspec.json.encode(msgspec.structs.replace(app, console_key=None, console_until=0.0)))
    if size > _MAX_RECORD_BYTES:
        raise RecordError(f"the record of app {app.id} would have {size} bytes; the maximum is {_MAX_RECORD_BYTES}")


def check_roster(app: App, before: App | None, max_roster_bytes: int) -> None:
    """Checks that the roster of a full presence channel fits into `max_roster_bytes`, half of the setting
    `max_unsent_bytes`. A roster is sent as one message, and a client with more unsent bytes than that setting is
    closed. The sizes of `before`, and those that apps have by default, are taken as they are: whoever sets another
    `max_unsent_bytes` must still be able to change the rest."""
    sizes = (app.max_presence_members, app.max_user_info_bytes)
    if sizes in (_DEFAULT_SIZES, before and (before.max_presence_members, before.max_user_info_bytes)):
        return
    member_bytes = app.max_user_info_bytes + MAX_USER_ID_CHARS
    if app.max_presence_members * member_bytes > max_roster_bytes:
        raise RecordError(
            f"{app.max_presence_members} members of {member_bytes} bytes (max_user_info_bytes and an id of "
            f"{MAX_USER_ID_CHARS}) do not fit into {max_roster_bytes} bytes, half of max_unsent_bytes"
        )
