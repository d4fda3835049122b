"""Publishes to, subscribes at, and signs for redpoll and other servers that speak Pusher Channels."""

from redpoll_client.async_publisher import AsyncPublisher
from redpoll_client.calls import Answer
from redpoll_client.channel import Channel, Event, Members, Position
from redpoll_client.errors import (
    BadRequest,
    ConnectionRefused,
    DecryptionFailed,
    Forbidden,
    Gone,
    InvalidWebhook,
    NotFound,
    Overflow,
    ProtocolError,
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
from redpoll_client.grants import mint_grant
from redpoll_client.publisher import Publisher
from redpoll_client.publishing import History, Message
from redpoll_client.reading import AsyncReader, Reader
from redpoll_client.signatures import sign_channel, sign_user
from redpoll_client.subscriber import Subscriber
from redpoll_client.subscribing import State
from redpoll_client.users import SignedIn, WatchlistEvent
from redpoll_client.version import __version__
from redpoll_client.webhooks import Delivery, WebhookEvent, verify_webhook

__all__ = [
    "Answer",
    "AsyncPublisher",
    "AsyncReader",
    "BadRequest",
    "Channel",
    "ConnectionRefused",
    "DecryptionFailed",
    "Delivery",
    "Event",
    "Forbidden",
    "Gone",
    "History",
    "InvalidWebhook",
    "Members",
    "Message",
    "NotFound",
    "Overflow",
    "Position",
    "ProtocolError",
    "Publisher",
    "RateLimited",
    "Reader",
    "RedpollError",
    "Refused",
    "SignInRefused",
    "SignedIn",
    "State",
    "Subscriber",
    "SubscriptionRefused",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "Unconfirmed",
    "Unreachable",
    "WatchlistEvent",
    "WebhookEvent",
    "__version__",
    "mint_grant",
    "sign_channel",
    "sign_user",
    "verify_webhook",
]
