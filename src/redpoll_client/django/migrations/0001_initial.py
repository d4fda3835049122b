"""The tables of the outbox."""

from typing import ClassVar

from django.db import migrations, models

import redpoll_client.django.models


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar = [
        migrations.CreateModel(
            name="OutboxEvent",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "correlation_id",
                    models.CharField(
                        default=redpoll_client.django.models.new_correlation_id, editable=False, max_length=32
                    ),
                ),
                ("channel", models.CharField(max_length=200)),
                ("name", models.CharField(max_length=200)),
                ("data", models.TextField()),
                ("socket_id", models.CharField(blank=True, max_length=64)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("failed_at", models.DateTimeField(null=True)),
                ("reason", models.TextField(blank=True)),
            ],
        ),
        migrations.AddIndex(
            model_name="outboxevent",
            index=models.Index(fields=["channel", "id"], name="redpoll_outbox_order"),
        ),
        migrations.CreateModel(
            name="OutboxLease",
            fields=[
                ("id", models.IntegerField(primary_key=True, serialize=False)),
                ("holder", models.CharField(max_length=32)),
                ("until", models.FloatField()),
            ],
        ),
    ]
