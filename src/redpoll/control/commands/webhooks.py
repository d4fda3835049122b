"""The operator's commands for webhooks and dead letters.

Each takes the command's arguments as a dictionary and returns what the command line prints with `--json`. commands.py
receives the commands and calls these functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from redpoll.control.commands.context import Context
from redpoll.ipc.command_socket import CommandError
from redpoll.store.audit import COMMAND_LINE
from redpoll.store.deliveries import Delivery, Depth
from redpoll.store.webhooks import Endpoint

if TYPE_CHECKING:
    from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["COMMANDS"]

# A list of dead letters holds the newest of them, at most this many.
_MAX_LISTED: Final = 10_000


def endpoint_shape(webhooks: Webhooks, endpoint: Endpoint) -> dict[str, Any]:
    """An endpoint without its secret.

    `url` is null if its deliveries are pulled. `pin` is the SHA-256 of the certificate in hex, or null.
    `failing_since` is in Unix seconds, null if it isn't failing.
    """
    since = webhooks.failing_since(endpoint)
    return {
        "id": endpoint.id,
        "url": endpoint.url or None,
        "events": endpoint.events,
        "client_events": endpoint.client_events,
        "format": endpoint.format,
        "batch": endpoint.batch,
        "enabled": endpoint.enabled,
        "channels": endpoint.channels,
        "pin": endpoint.pin or None,
        "failing_since": None if since is None else int(since),
    }


def _webhooks(context: Context) -> Webhooks:
    if context.webhooks is None:
        raise CommandError("the server is still starting; try again in a moment")
    return context.webhooks


async def _create(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    endpoint = await webhooks.endpoints.create(
        args["app"],
        args["url"],
        events=args["events"],
        format=args["format"],
        channels=args["channels"],
        pin=args["pin"],
        client_events=args.get("client_events", ()),
        batch=args.get("batch", False),
        by=COMMAND_LINE,
    )
    counts = context.records.apps[args["app"]].subscription_count
    return endpoint_shape(webhooks, endpoint) | {"secret": endpoint.secret, "subscription_count": counts}


async def _list(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    endpoints = webhooks.endpoints.of_existing_app(args["app"])
    depths = await webhooks.depths(args["app"])
    counts = {one.id: depths.get(one.id, Depth(0, 0, None)) for one in endpoints}
    return [
        endpoint_shape(webhooks, one) | {"waiting": counts[one.id].waiting, "dropped": counts[one.id].dropped}
        for one in endpoints
    ]


async def _enable(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.endpoints.set_enabled(args["id"], True, by=COMMAND_LINE))


async def _disable(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.endpoints.set_enabled(args["id"], False, by=COMMAND_LINE))


async def _delete(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.endpoints.delete(args["id"], by=COMMAND_LINE))


async def _pin(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.endpoints.pin(args["id"], by=COMMAND_LINE))


async def _unpin(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.endpoints.unpin(args["id"], by=COMMAND_LINE))


async def _rotate(context: Context, args: dict[str, Any]) -> Any:
    changed = await _webhooks(context).endpoints.rotate(args["id"], by=COMMAND_LINE)
    return {"id": changed.id, "secret": changed.secret, "overlap_until": int(changed.previous_until)}


async def _test(context: Context, args: dict[str, Any]) -> Any:
    attempt = await _webhooks(context).test(args["id"], by=COMMAND_LINE)
    return {
        "id": args["id"],
        "ok": attempt.ok,
        "status": attempt.status,
        "reason": attempt.reason,
        "duration_ms": attempt.duration_ms,
    }


async def _dead_letters(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    failed = await webhooks.deliveries(args["app"], states=("failed",), limit=_MAX_LISTED)
    depths = await webhooks.depths(args["app"])
    letters = [
        {
            "id": delivery.id,
            "event": delivery.event,
            "endpoint_id": delivery.endpoint_id,
            "failed_at": int(delivery.at),
            "attempts": delivery.attempts,
            "channel": delivery.channel,
        }
        for delivery in failed
    ]
    return {
        "letters": letters,
        "total": sum(depth.failed for depth in depths.values()),
        "dropped": sum(depth.dropped for depth in depths.values()),
    }


async def _show(context: Context, args: dict[str, Any]) -> Any:
    delivery, endpoint, attempts = await _webhooks(context).delivery(args["id"])
    return {
        "id": delivery.id,
        "event": delivery.event,
        "endpoint_id": delivery.endpoint_id,
        "url": endpoint.url or None,
        "channel": delivery.channel,
        "state": delivery.dead_letter or delivery.state,
        "failed_at": int(delivery.at) if delivery.state == "failed" else None,
        "payload": delivery.body.decode(),
        "attempts": [
            {
                "at": attempt.at,
                "status": attempt.status,
                "duration_ms": attempt.duration_ms,
                "reason": attempt.reason,
                "response": attempt.response.decode("utf-8", "replace"),
            }
            for attempt in attempts
        ],
    }


async def _retry(context: Context, args: dict[str, Any]) -> Any:
    changed = await _webhooks(context).dead_letters.retry(args["ids"], by=COMMAND_LINE)
    return [_state_shape(delivery) for delivery in changed]


async def _discard(context: Context, args: dict[str, Any]) -> Any:
    changed = await _webhooks(context).dead_letters.discard(args["ids"], by=COMMAND_LINE)
    return [_state_shape(delivery) for delivery in changed]


def _state_shape(delivery: Delivery) -> dict[str, Any]:
    return {"id": delivery.id, "state": delivery.dead_letter}


COMMANDS: Final[dict[str, Callable[[Context, dict[str, Any]], Awaitable[Any]]]] = {
    # {app, url, events, format, channels, client_events, batch, pin} -> webhook with its secret, and the app's setting
    # subscription_count, without which that event is never sent; only this and `rotate` show a secret. `url` null: its
    # deliveries are pulled.
    "webhook create": _create,
    "webhook list": _list,  # {app} -> [webhook]
    "webhook enable": _enable,  # {id} -> webhook
    "webhook disable": _disable,  # {id} -> webhook
    "webhook delete": _delete,  # {id} -> webhook, as it is after its deletion
    "webhook pin": _pin,  # {id} -> webhook
    "webhook unpin": _unpin,  # {id} -> webhook
    "webhook rotate": _rotate,  # {id} -> {id, secret, overlap_until}
    "webhook test": _test,  # {id} -> {id, ok, status, reason, duration_ms}
    # {app} -> {letters: [{id, event, endpoint_id, failed_at, attempts, channel}], total}, newest first
    "dead-letter list": _dead_letters,
    "dead-letter show": _show,  # {id} -> {id, event, endpoint_id, url, channel, state, failed_at, payload, attempts}
    "dead-letter retry": _retry,  # {ids} -> [{id, state}], all or none
    "dead-letter discard": _discard,  # {ids} -> [{id, state}], all or none
}
