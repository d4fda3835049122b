"""The outbox: events that are stored in the transaction that they belong to."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models

__all__ = ["OutboxEvent", "OutboxLease"]


def new_correlation_id() -> str:
    return uuid.uuid4().hex


class OutboxEvent(models.Model):
    """An event to publish. Its row is deleted once the server has it. `correlation_id` goes with every attempt, so that
    the server publishes it once. `failed_at` and `reason` are set when the server refused it."""

    id = models.BigAutoField(primary_key=True)
    correlation_id = models.CharField(max_length=32, default=new_correlation_id, editable=False)
    channel = models.CharField(max_length=200)
    name = models.CharField(max_length=200)
    data = models.TextField()
    socket_id = models.CharField(max_length=64, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    failed_at = models.DateTimeField(null=True)
    reason = models.TextField(blank=True)

    class Meta:
        app_label = "redpoll"
        indexes: ClassVar = [models.Index(fields=["channel", "id"], name="redpoll_outbox_order")]

    def __str__(self) -> str:
        return f"{self.id}: {self.name} to {self.channel}"


class OutboxLease(models.Model):
    """Which sender may send, on databases without SKIP LOCKED; until when, in Unix seconds."""

    id = models.IntegerField(primary_key=True)
    holder = models.CharField(max_length=32)
    until = models.FloatField()

    class Meta:
        app_label = "redpoll"

    def __str__(self) -> str:
        return f"{self.holder} until {self.until}"
