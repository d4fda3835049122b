"""Publishes to, subscribes at, and signs for redpoll and other servers that speak Pusher Channels."""

from redpoll_client.async_publisher import AsyncPublisher
from redpoll_client.calls import Answer
from redpoll_client.errors import (
    BadRequest,
    ConnectionRefused,
    DecryptionFailed,
    Forbidden,
    InvalidWebhook,
    NotFound,
    Overflow,
    RateLimited,
    RedpollError,
    Refused,
    SignInRefused,
    SubscriptionRefused,
    TooLarge,
    Unauthorized,
    Unavailable,
    Unconfirmed,
    Unreachable,
)
from redpoll_client.publisher import Publisher
from redpoll_client.publishing import History, Message
from redpoll_client.signatures import sign_channel, sign_user
from redpoll_client.version import __version__
from redpoll_client.webhooks import Delivery, WebhookEvent, verify_webhook

__all__ = [
    "Answer",
    "AsyncPublisher",
    "BadRequest",
    "ConnectionRefused",
    "DecryptionFailed",
    "Delivery",
    "Forbidden",
    "History",
    "InvalidWebhook",
    "Message",
    "NotFound",
    "Overflow",
    "Publisher",
    "RateLimited",
    "RedpollError",
    "Refused",
    "SignInRefused",
    "SubscriptionRefused",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "Unconfirmed",
    "Unreachable",
    "WebhookEvent",
    "__version__",
    "sign_channel",
    "sign_user",
    "verify_webhook",
]
