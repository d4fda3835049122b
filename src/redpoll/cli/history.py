"""`redpoll history …`: the rules for which channels store messages, and a look at the stored messages."""

from typing import Any

import click

from redpoll.cli.common import refuse, safe, time_text
from redpoll.cli.records_command import AppCommand, executes

__all__ = ["history"]


@click.group()
def history() -> None:
    """Manage message history, from which clients catch up on missed messages.

    \b
    Examples:
      redpoll history rule add 1234567 --prefix news- --keep 1000 --seconds 3600
      redpoll history show 1234567 news-today
    """


@history.group()
def rule() -> None:
    """Manage history rules: which channels store messages, how many and for how long, and how often they send.

    Channels that no rule matches store nothing, and send each event at once.

    \b
    Examples:
      redpoll history rule add 1234567 --prefix news- --keep 1000 --seconds 3600
      redpoll history rule list 1234567
    """


def _print_rule(rule: dict[str, Any]) -> None:
    words = [rule["id"], f"{rule['name']}{'*' if rule['prefix'] else ''}"]
    words.append(f"keep {rule['keep']} for {rule['seconds']} s" if rule["keep"] else "keep none")
    if rule["replay"]:
        words.append(f"replay the last {rule['replay']}")
    if rule["replay_seconds"]:
        words.append(f"replay the last {rule['replay_seconds']} s")
    if rule["client_events"]:
        words.append("client events too")
    if rule["max_rate"]:
        what = f"join {rule['join']}" if rule["join"] else "latest"
        by = f" by {rule['by']}" if rule["by"] else ""
        words.append(f"at most {rule['max_rate']} a second, {what}{by}")
    click.echo("  ".join(words))


def _print_rules(rules: list[dict[str, Any]]) -> None:
    for row in rules:
        _print_rule(row)


@rule.command("add", cls=AppCommand)
@click.argument("app_id", required=False)
@click.option("--prefix", metavar="P", help="Channels whose names begin with P; '' for all.")
@click.option("--channel", metavar="NAME", help="This channel only. An exact name beats prefixes.")
@click.option("--keep", type=int, metavar="N", help="Messages stored per channel. 0: none.")
@click.option("--seconds", type=int, default=0, metavar="S", help="How long a message is stored.")
@click.option("--replay", type=int, default=0, metavar="N", help="Send each new subscriber the last N messages.")
@click.option("--replay-seconds", type=int, default=0, metavar="T", help="Or the messages of the last T seconds.")
@click.option("--client-events", is_flag=True, help="Store client events too.")
@click.option("--max-rate", type=int, metavar="N", help="Frames a second that a subscriber gets of a channel.")
@click.option("--latest", is_flag=True, help="Beyond it, only the newest event of each name.")
@click.option("--join", default="", metavar="PATH", help="Beyond it, the texts at PATH in the data are joined.")
@click.option("--by", default="", metavar="PATH", help="Only texts with the same value here are joined.")
@executes("history rule add", _print_rule)
def rule_add(
    app_id: str, prefix: str | None, channel: str | None, keep: int | None, max_rate: int | None, **others: Any
) -> dict[str, Any]:
    """Add a rule. It applies at once, in every process, to messages published from then on.

    When several prefixes match a channel, the longest one decides.

    \b
    Examples:
      redpoll history rule add 1234567 --prefix news- --keep 1000 --seconds 3600 --replay 10
      redpoll history rule add 1234567 --channel news-secret --keep 0
      redpoll history rule add 1234567 --prefix cursors- --max-rate 20 --latest
      redpoll history rule add 1234567 --prefix chat- --keep 500 --seconds 600 --max-rate 20 --join delta
    """
    from redpoll.protocol.apps import HistoryRule, history_fault

    name = prefix if prefix is not None else channel
    if name is None or (prefix is not None and channel is not None):
        refuse(["give either --prefix or --channel"])
    if keep is None and max_rate is None:
        refuse(["give --keep, how many messages are stored, or --max-rate"])
    fields = {"name": name, "prefix": prefix is not None, "keep": keep or 0, "max_rate": max_rate, **others}
    fault = history_fault(HistoryRule(id="000000", **fields))
    if fault is not None:
        refuse([fault])
    return {"app": app_id, **fields}


@rule.command("list", cls=AppCommand)
@click.argument("app_id", required=False)
@executes("history rule list", _print_rules)
def rule_list(app_id: str) -> dict[str, Any]:
    """List the rules of an app.

    \b
    Examples:
      redpoll history rule list 1234567
    """
    return {"app": app_id}


@rule.command("remove", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("rule_id")
@executes("history rule remove", _print_rule)
def rule_remove(app_id: str, rule_id: str) -> dict[str, Any]:
    """Remove a rule. Messages stored under it stay until they expire or `history clear` deletes them.

    \b
    Examples:
      redpoll history rule remove 1234567 RULE_ID
    """
    return {"app": app_id, "rule": rule_id}


def _print_page(page: dict[str, Any]) -> None:
    for message in page["messages"]:
        columns = (
            time_text(message["time_ms"] / 1000),
            message["offset"],
            safe(message["event"]),
            safe(message["data"]),
        )
        click.echo("  ".join(map(str, columns)))
    if page["next"] is not None:
        click.echo(f"more: --cursor {page['next']}")


@history.command("show", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("channel")
@click.option("--limit", metavar="N", help="How many, at most 1000. Default: 100.")
@click.option("--backwards", is_flag=True, help="Newest first.")
@click.option("--since", metavar="PLACE", help="After EPOCH:OFFSET, or from a Unix time in ms on.")
@click.option("--until", metavar="PLACE", help="Up to EPOCH:OFFSET or a Unix time in ms, included.")
@click.option("--cursor", metavar="CURSOR", help="Continue where the previous page ended.")
@executes("history show", _print_page)
def history_show(app_id: str, channel: str, backwards: bool, **query: str | None) -> dict[str, Any]:
    """Show a channel's stored messages, by default the newest. Needs a running server.

    \b
    Examples:
      redpoll history show 1234567 news-today --limit 20
      redpoll history show 1234567 news-today --since 1700000000000 --json
    """
    parameters = {name: value for name, value in query.items() if value is not None}
    if backwards:
        parameters["direction"] = "backwards"
    return {"app": app_id, "channel": channel, "query": parameters}


def _print_cleared(cleared: dict[str, Any]) -> None:
    click.echo(f"cleared; the new epoch is {cleared['epoch']}" if cleared["epoch"] else "nothing was stored")


@history.command("clear", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("channel")
@executes("history clear", _print_cleared)
def history_clear(app_id: str, channel: str) -> dict[str, Any]:
    """Delete a channel's stored messages and give its history a new epoch. Needs a running server.

    \b
    Examples:
      redpoll history clear 1234567 news-today
    """
    return {"app": app_id, "channel": channel}
