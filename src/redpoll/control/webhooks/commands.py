"""The operator's commands about webhooks and dead letters (decisions.md). How they get here: control/commands.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from redpoll.control.context import CommandError, Context
from redpoll.store.deliveries import Delivery
from redpoll.store.webhooks import Endpoint

if TYPE_CHECKING:
    from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["COMMANDS"]

# What a list of dead letters holds at most, the youngest.
_MOST_LISTED: Final = 10_000


def endpoint_shape(webhooks: Webhooks, endpoint: Endpoint) -> dict[str, Any]:
    """An endpoint without its secret. `pin` is the certificate's SHA-256 or null; `failing_since` null: it isn't."""
    since = webhooks.failing_since(endpoint)
    return {
        "id": endpoint.id,
        "url": endpoint.url,
        "events": endpoint.events,
        "format": endpoint.format,
        "enabled": endpoint.enabled,
        "channels": endpoint.channels,
        "pin": endpoint.pin or None,
        "failing_since": None if since is None else int(since),
    }


def _webhooks(context: Context) -> Webhooks:
    if context.webhooks is None:
        raise CommandError("webhooks are not there yet; try again in a moment")
    return context.webhooks


async def _create(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    made = await webhooks.create(
        args["app"],
        args["url"],
        events=args["events"],
        format=args["format"],
        channels=args["channels"],
        pin=args["pin"],
    )
    return endpoint_shape(webhooks, made) | {"secret": made.secret}


async def _list(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return [endpoint_shape(webhooks, each) for each in webhooks.endpoints_of(args["app"])]


async def _enable(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.set_enabled(args["id"], True))


async def _disable(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.set_enabled(args["id"], False))


async def _delete(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.delete(args["id"]))


async def _pin(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.pin(args["id"]))


async def _unpin(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    return endpoint_shape(webhooks, await webhooks.unpin(args["id"]))


async def _rotate(context: Context, args: dict[str, Any]) -> Any:
    changed = await _webhooks(context).rotate(args["id"])
    return {"id": changed.id, "secret": changed.secret, "overlap_until": int(changed.previous_until)}


async def _test(context: Context, args: dict[str, Any]) -> Any:
    told = await _webhooks(context).test(args["id"])
    return {
        "id": args["id"],
        "ok": told.ok,
        "status": told.status,
        "reason": told.reason,
        "duration_ms": told.duration_ms,
    }


async def _dead_letters(context: Context, args: dict[str, Any]) -> Any:
    webhooks = _webhooks(context)
    found = await webhooks.deliveries(args["app"], states=("failed",), limit=_MOST_LISTED)
    depths = await webhooks.depths(args["app"])
    letters = [
        {
            "id": each.id,
            "event": each.event,
            "endpoint_id": each.endpoint_id,
            "failed_at": int(each.at),
            "attempts": each.attempts,
            "channel": each.channel,
        }
        for each in found
    ]
    return {"letters": letters, "total": sum(depth.failed for depth in depths.values())}


async def _show(context: Context, args: dict[str, Any]) -> Any:
    delivery, endpoint, made = await _webhooks(context).delivery(args["id"])
    return {
        "id": delivery.id,
        "event": delivery.event,
        "endpoint_id": delivery.endpoint_id,
        "url": endpoint.url,
        "channel": delivery.channel,
        "state": delivery.dead_letter or delivery.state,
        "failed_at": int(delivery.at) if delivery.state == "failed" else None,
        "payload": delivery.body.decode(),
        "attempts": [
            {
                "at": each.at,
                "status": each.status,
                "duration_ms": each.duration_ms,
                "reason": each.reason,
                "response": each.response.decode("utf-8", "replace"),
            }
            for each in made
        ],
    }


async def _retry(context: Context, args: dict[str, Any]) -> Any:
    return [_state_shape(each) for each in await _webhooks(context).retry(args["ids"])]


async def _discard(context: Context, args: dict[str, Any]) -> Any:
    return [_state_shape(each) for each in await _webhooks(context).discard(args["ids"])]


def _state_shape(delivery: Delivery) -> dict[str, Any]:
    return {"id": delivery.id, "state": delivery.dead_letter}


COMMANDS: Final[dict[str, Callable[[Context, dict[str, Any]], Awaitable[Any]]]] = {
    # {app, url, events, format, channels, pin} -> webhook with its secret, which no other command tells
    "webhook create": _create,
    "webhook list": _list,  # {app} -> [webhook]
    "webhook enable": _enable,  # {id} -> webhook
    "webhook disable": _disable,  # {id} -> webhook
    "webhook delete": _delete,  # {id} -> webhook, as it was
    "webhook pin": _pin,  # {id} -> webhook
    "webhook unpin": _unpin,  # {id} -> webhook
    "webhook rotate": _rotate,  # {id} -> {id, secret, overlap_until}
    "webhook test": _test,  # {id} -> {id, ok, status, reason, duration_ms}
    # {app} -> {letters: [{id, event, endpoint_id, failed_at, attempts, channel}], total}, the youngest of very many
    "dead-letter list": _dead_letters,
    "dead-letter show": _show,  # {id} -> everything of one
    "dead-letter retry": _retry,  # {ids} -> [{id, state}], all or none
    "dead-letter discard": _discard,  # {ids} -> [{id, state}], all or none
}
