"""The command `redpoll`: its subcommands, flags, output and exit codes.

Each noun (app, key, token, …) has a module. common.py has what they share. execute.py runs a command in the server that
owns the data folder, or in this process when no server runs. remote.py reaches an app over the network.

deploy/README.md "Command line" lists the exit codes.
"""

import click

from redpoll import __version__
from redpoll.cli import (
    apps,
    backup,
    connections,
    debug,
    doctor,
    first_login,
    history,
    imports,
    keys,
    messages,
    migrate,
    nodes,
    server,
    store,
    subscribe,
    tokens,
    tools,
    usage,
    users,
    webhooks,
)

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="redpoll", message="%(prog)s %(version)s")
def main() -> None:
    """A self-hosted real-time messaging server that speaks the Pusher Channels protocol.

    \b
    Examples:
      redpoll serve
      redpoll subscribe news
      redpoll publish news headline '{"title":"Hello"}'
      redpoll doctor
    """


for _command in (
    *server.COMMANDS,
    *messages.COMMANDS,
    subscribe.subscribe,
    apps.app,
    imports.import_,
    keys.key,
    tokens.token,
    history.history,
    webhooks.webhook,
    webhooks.dead_letter,
    users.user,
    first_login.first_login,
    connections.connections,
    debug.debug,
    usage.usage,
    *nodes.COMMANDS,
    *backup.COMMANDS,
    *store.COMMANDS,
    migrate.migrate,
    doctor.doctor,
    *tools.COMMANDS,
):
    main.add_command(_command)
