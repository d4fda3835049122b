"""The command `redpoll`: its words, flags, output and exit codes. What they do is done elsewhere.

Exit codes: 0 done, 1 it could not be done (one sentence says why), 2 wrong flags or settings (every fault is
told). A module for each noun; what they share: common.py, asking.py.
"""

import click

from redpoll.cli import apps, history, keys, server, tokens, users, webhooks

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
):
    main.add_command(_command)
