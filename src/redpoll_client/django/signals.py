"""Signals of this app."""

from django.dispatch import Signal

__all__ = ["webhook_received"]

# Sent for each event of a webhook, with `event`, a redpoll_client.WebhookEvent. If a receiver raises, or the
# transaction around the view doesn't commit, the server repeats the delivery.
webhook_received = Signal()
