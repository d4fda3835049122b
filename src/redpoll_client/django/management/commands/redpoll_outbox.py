"""`manage.py redpoll_outbox`: publishes what is in the outbox."""

from __future__ import annotations

import signal
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from redpoll_client.django.configuration import get_publisher
from redpoll_client.django.models import OutboxEvent
from redpoll_client.django.outbox import Sender


class Command(BaseCommand):
    """Runs until SIGTERM or SIGINT; then it ends after the rows that are being sent."""

    help = "Publishes the events of the outbox. Several may run."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default="default", help="the alias of the database with the outbox")
        parser.add_argument("--once", action="store_true", help="send what is there, and end")
        parser.add_argument("--failed", action="store_true", help="list the events that the server refused")
        parser.add_argument("--retry", type=int, metavar="ID", help="send a refused event again")

    def handle(self, *arguments: Any, **options: Any) -> None:
        rows = OutboxEvent.objects.using(options["database"])
        if options["failed"]:
            for row in rows.exclude(failed_at=None).order_by("id"):
                self.stdout.write(f"{row} ({row.failed_at:%Y-%m-%d %H:%M:%S}): {row.reason}")
            return
        if options["retry"] is not None:
            if not rows.filter(id=options["retry"]).exclude(failed_at=None).update(failed_at=None, reason=""):
                raise CommandError(f"no refused event has the id {options['retry']}")
            self.stdout.write(f"{options['retry']} will be sent again")
            return
        sender = Sender(get_publisher(), options["database"], lambda text: self.stderr.write(text))
        if options["once"]:
            sender.run_once()
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sender.stop())
        sender.run()
