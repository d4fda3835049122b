"""`redpoll doctor [URL]`: why clients can't connect, or whether this machine is fit to serve."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import click

from redpoll.cli.common import fail, need_engine, print_json, refuse, settings_of, with_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from redpoll.doctor.report import Finding
    from redpoll.doctor.target import Target

__all__ = ["doctor"]


@click.command()
@click.argument("url", required=False)
@click.option("--env", "of_environment", is_flag=True, help="Check the address in PUSHER_URL instead of URL.")
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(0, 3600),
    default=65.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait in silence for a proxy's idle timeout; 0 skips this check.",
)
@click.option("--channel", metavar="NAME", help="Read this channel, which has history, over HTTP as well.")
@click.option("--data-dir", metavar="FOLDER", help="The server's data folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_config
def doctor(
    url: str | None,
    of_environment: bool,
    patience_s: float,
    channel: str | None,
    data_dir: str | None,
    as_json: bool,
    config_path: str | None,
) -> None:
    """Find out why it doesn't connect.

    Without URL: checks this machine and its settings (limits, memory, disk, clock, certificate, Redis, versions).
    With URL: checks a server from outside, as a browser connects, through every proxy in between: DNS, TCP, TLS,
    HTTP, Upgrade, subscribe, publish, receive, stream, idle timeout, webhooks by pull. Each failure comes with its
    likely cause and a remedy.
    With --env, the address is that of PUSHER_URL: every user of the machine can read a secret on a command line.

    \b
    Examples:
      redpoll doctor
      redpoll doctor wss://ws.example.com/app/KEY
      redpoll doctor --env --patience 0

    Exit codes: 0 nothing failed, 1 a check failed, 2 the address or the settings are wrong.
    """
    from redpoll.doctor.report import Verdict, as_text, worst
    from redpoll.doctor.report import as_json as json_of

    url = _url_of_environment(url) if of_environment else url
    findings: list[Finding] = []

    def show(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            click.echo(as_text(finding))

    if url is None:
        _check_machine(config_path, data_dir, show)
    else:
        target = _target_of(url)
        if patience_s and not as_json:
            click.echo(f"the last check waits {patience_s:g} s in silence; --patience 0 skips it")
        asyncio.run(_check_server(target, patience_s, channel, show))
    if as_json:
        print_json([json_of(finding) for finding in findings])
    if worst(findings) is Verdict.FAILED:
        fail("a check failed; the cause and the remedy are above")


def _check_machine(config_path: str | None, data_dir: str | None, show: Callable[[Finding], None]) -> None:
    need_engine("redpoll doctor without URL, which checks a machine that serves,")
    from redpoll.doctor import machine

    settings = settings_of(config_path, {"data_dir": data_dir}, read_files=False)
    for finding in asyncio.run(machine.examine(settings)):
        show(finding)


async def _check_server(
    target: Target, patience_s: float, channel: str | None, show: Callable[[Finding], None]
) -> None:
    from redpoll.doctor import outside

    async for finding in outside.examine(target, patience_s, channel):
        show(finding)


def _target_of(url: str) -> Target:
    from redpoll.doctor.target import TargetError, parse

    try:
        return parse(url)
    except TargetError as error:
        refuse([f"redpoll: {error}"])


def _url_of_environment(url: str | None) -> str:
    if url is not None:
        refuse(["give either URL or --env"])
    return os.environ.get("PUSHER_URL") or refuse(["PUSHER_URL isn't set"])
