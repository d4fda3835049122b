"""`redpoll history …`: the rules by which channels are kept, and a look at what is kept of one."""

from typing import Any

import click

from redpoll import config
from redpoll.cli.asking import run
from redpoll.cli.common import print_json, records_command, refuse, safe, when

__all__ = ["history"]


@click.group()
def history() -> None:
    """Messages that are kept of channels, so that clients can be told what they missed."""


@history.group()
def rule() -> None:
    """Rules: which channels of an app are kept, how many messages of each, and for how long. Without one, none."""


@rule.command("add")
@click.argument("app_id")
@click.option("--prefix", metavar="P", help="For channels whose names begin so; '' for all.")
@click.option("--channel", metavar="NAME", help="For this channel alone. It goes before prefixes, a longer one first.")
@click.option("--keep", type=int, required=True, metavar="N", help="Messages of each channel. 0: none, an exception.")
@click.option("--seconds", type=int, default=0, metavar="S", help="For how long a message is kept.")
@click.option("--replay", type=int, default=0, metavar="N", help="Tell whoever subscribes the last N messages.")
@click.option("--replay-seconds", type=int, default=0, metavar="T", help="Or those of the last T seconds.")
@click.option("--client-events", is_flag=True, help="Keep events that clients send, too.")
@records_command
def rule_add(
    app_id: str, prefix: str | None, channel: str | None, settings: config.Settings, as_json: bool, **numbers: Any
) -> None:
    """Make one more rule. In force at once, in every process, for what is published from then on."""
    from redpoll.protocol.apps import HistoryRule, history_fault

    name = prefix if prefix is not None else channel
    if name is None or (prefix is not None and channel is not None):
        refuse(["a rule is for --prefix or for --channel, one of them"])
    asked = {"name": name, "prefix": prefix is not None, **numbers}
    fault = history_fault(HistoryRule(id="000000", **asked))
    if fault is not None:
        refuse([fault])
    _tell_rule(run(settings, "history rule add", {"app": app_id, **asked}), as_json)


@rule.command("list")
@click.argument("app_id")
@records_command
def rule_list(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """List the rules of an app."""
    rules = run(settings, "history rule list", {"app": app_id})
    if as_json:
        print_json(rules)
        return
    for each in rules:
        _tell_rule(each, as_json)


@rule.command("remove")
@click.argument("app_id")
@click.argument("rule_id")
@records_command
def rule_remove(app_id: str, rule_id: str, settings: config.Settings, as_json: bool) -> None:
    """Take a rule away. What was kept by it goes when its time is over, or by `history clear`."""
    _tell_rule(run(settings, "history rule remove", {"app": app_id, "rule": rule_id}), as_json)


def _tell_rule(rule: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(rule)
        return
    words = [rule["id"], f"{rule['name']}{'*' if rule['prefix'] else ''}"]
    words.append(f"keep {rule['keep']} for {rule['seconds']} s" if rule["keep"] else "keep none")
    if rule["replay"]:
        words.append(f"replay the last {rule['replay']}")
    if rule["replay_seconds"]:
        words.append(f"replay the last {rule['replay_seconds']} s")
    if rule["client_events"]:
        words.append("client events too")
    click.echo("  ".join(words))


@history.command("show")
@click.argument("app_id")
@click.argument("channel")
@click.option("--limit", metavar="N", help="How many, at most 1000. Default: 100.")
@click.option("--backwards", is_flag=True, help="Newest first.")
@click.option("--since", metavar="PLACE", help="Behind EPOCH:OFFSET, or not before a time in ms.")
@click.option("--until", metavar="PLACE", help="Up to EPOCH:OFFSET, or not after a time in ms.")
@click.option("--cursor", metavar="CURSOR", help="Go on where an answer ended.")
@records_command
def history_show(
    app_id: str, channel: str, backwards: bool, settings: config.Settings, as_json: bool, **query: str | None
) -> None:
    """Show what is kept of a channel; without bounds the newest messages. Needs the server to run."""
    asked = {name: value for name, value in query.items() if value is not None}
    if backwards:
        asked["direction"] = "backwards"
    page = run(settings, "history show", {"app": app_id, "channel": channel, "query": asked})
    if as_json:
        print_json(page)
        return
    for each in page["messages"]:
        click.echo(f"{when(each['time_ms'] / 1000)}  {each['offset']}  {safe(each['event'])}  {safe(each['data'])}")
    if page["next"] is not None:
        click.echo(f"and more: --cursor {page['next']}")


@history.command("clear")
@click.argument("app_id")
@click.argument("channel")
@records_command
def history_clear(app_id: str, channel: str, settings: config.Settings, as_json: bool) -> None:
    """Forget what is kept of a channel; it goes on with a new epoch. Needs the server to run."""
    cleared = run(settings, "history clear", {"app": app_id, "channel": channel})
    if as_json:
        print_json(cleared)
    else:
        click.echo(f"cleared; its epoch is {cleared['epoch']} now" if cleared["epoch"] else "there was nothing kept")
