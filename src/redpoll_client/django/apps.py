"""The app `redpoll_client.django`, with the label `redpoll`."""

from django.apps import AppConfig


class RedpollConfig(AppConfig):
    """Has one table: the outbox."""

    name = "redpoll_client.django"
    label = "redpoll"
    verbose_name = "redpoll"
    default_auto_field = "django.db.models.BigAutoField"
