"""The command `redpoll`: its subcommands, flags, output and exit codes.

Each noun (app, key, token, …) has a module. common.py has what they share. execute.py runs a command in the server that
owns the data folder, or in this process when no server runs.

Exit codes: 0 success, 1 failure (one sentence says why), 2 wrong flags or settings (every fault is printed).
"""

import click

from redpoll.cli import apps, doctor, history, keys, server, tokens, users, webhooks

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A self-hosted real-time messaging server that speaks the Pusher Channels protocol."""


for _command in (
    *server.COMMANDS,
    apps.app,
    keys.key,
    tokens.token,
    history.history,
    webhooks.webhook,
    webhooks.dead_letter,
    users.user,
    doctor.doctor,
):
    main.add_command(_command)
