"""`redpoll demo`: a page with four examples that work at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from redpoll.cli.common import fail, print_json, refuse

if TYPE_CHECKING:
    from redpoll.demo.demo import Running

__all__ = ["demo"]


@click.command()
@click.option(
    "--url",
    metavar="URL",
    help="An app of a running server: http[s]://KEY:SECRET@HOST[:PORT]/apps/ID. Default: start a server for the demo.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the page and the server listen.")
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="The page's port. Default: a free one.")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, when the page can be opened.")
def demo(url: str | None, host: str, port: int, opens: bool, as_json: bool) -> None:
    """Show what redpoll does: four examples with their code, on a page that works at once.

    Starts a server in a temporary folder, with an app and a small back end, and prints the address of the page. A
    button on it kills a worker, and the page shows what its users notice. Ctrl-C stops everything and leaves nothing.

    \b
    Examples:
      redpoll demo
      redpoll demo --open
      redpoll demo --host 0.0.0.0 --port 8000
      redpoll demo --url http://KEY:SECRET@127.0.0.1:6001/apps/ID
    """
    from redpoll.demo.backend import AddressError, account_of
    from redpoll.demo.demo import DemoError, run

    try:
        account = account_of(url) if url is not None else None
    except AddressError as error:
        refuse([f"--url: {error}"])

    def started(running: Running) -> None:
        if as_json:
            print_json(running._asdict())
        else:
            _print(running, host)
        if opens:
            import webbrowser

            webbrowser.open(running.page)

    if account is None and not as_json:
        click.echo("starting a server …")
    try:
        run(account, host, port, started)
    except DemoError as error:
        fail(error)


def _print(running: Running, host: str) -> None:
    click.echo(f"\n  page       {running.page}")
    if running.dashboard is not None:
        click.echo(f"  dashboard  {running.dashboard}  (user admin, password {running.password})")
    click.echo(f"  shell      {running.publish}\n")
    if running.rules:
        click.echo("The ticker, the chat and the text keep a history if the app has these rules:\n")
        for rule in running.rules:
            click.echo(f"  {rule}")
        click.echo()
    if running.dashboard is not None and host not in ("127.0.0.1", "localhost", "::1"):
        click.echo(
            "Everybody who can open the page can publish with the secret on it, and kill workers of this demo.\n"
        )
    click.echo("Open the page in two windows. Ctrl-C ends the demo.")
