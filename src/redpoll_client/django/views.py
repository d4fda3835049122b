"""The views. Django's protection against forged requests stays on for auth and sign-in: a page sends its token in the
header `X-CSRFToken` (pusher-js: `channelAuthorization.headers`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from django.core.cache import cache
from django.core.exceptions import RequestDataTooBig
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.request import RawPostDataException, UnreadablePostError
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from redpoll_client.django.configuration import endpoint_secrets, get_publisher, get_rules, user_id_of
from redpoll_client.django.signals import webhook_received
from redpoll_client.errors import InvalidWebhook
from redpoll_client.rules import MAX_AUTH_BYTES, BadAuthRequest, authorize_sync, grant_sync, parse_auth, sign_in_sync
from redpoll_client.webhooks import MAX_WEBHOOK_BYTES, verify_webhook

__all__ = ["auth", "grant", "user_auth", "webhook"]

# The longest time over which redpoll repeats a delivery by itself is 6.5 minutes; an operator may repeat it later.
_REMEMBERED_S = 7 * 24 * 3600


def _body(request: HttpRequest, limit: int) -> bytes:
    """The body. Raises BadAuthRequest with 413 if it is longer than `limit`. A multipart form, as Django's test client
    posts it, becomes a urlencoded one."""
    try:
        if int(request.META.get("CONTENT_LENGTH") or 0) > limit:
            raise RequestDataTooBig
        multipart = request.content_type == "multipart/form-data"
        body: bytes = request.POST.urlencode().encode() if multipart else request.body
    except RawPostDataException:
        # Something before this view has read the form.
        body = request.POST.urlencode().encode()
    except (RequestDataTooBig, ValueError):
        raise BadAuthRequest(f"at most {limit} bytes are allowed", 413) from None
    except UnreadablePostError:
        raise BadAuthRequest("the body ended early") from None
    return body


def _answer(request: HttpRequest, decide: Callable[..., tuple[int, dict[str, Any]]]) -> HttpResponse:
    try:
        asked = parse_auth(request.headers.get("Content-Type", ""), _body(request, MAX_AUTH_BYTES))
    except BadAuthRequest as error:
        return JsonResponse({"error": str(error)}, status=error.status)
    user = getattr(request, "user", None)
    if user is not None and not user.is_authenticated:
        user = None
    user_id = None if user is None else user_id_of(user)
    arguments = (get_rules(), get_publisher(), asked, user, user_id)
    status, content = decide(arguments, lambda awaitable: async_to_sync(_awaited)(awaitable))
    return JsonResponse(content, status=status)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


@require_POST
def auth(request: HttpRequest) -> HttpResponse:
    """Signs the channels that the rules let the user join."""
    return _answer(request, authorize_sync)


@require_POST
def user_auth(request: HttpRequest) -> HttpResponse:
    """Signs the user's connection in."""
    return _answer(request, sign_in_sync)


@require_POST
def grant(request: HttpRequest) -> HttpResponse:
    """Makes one grant for the channels that the rules let the user join."""
    return _answer(request, grant_sync)


def _once_committed(function: Callable[[], Any]) -> None:
    """Calls it when all transactions that are open now have committed; at once if none is open."""
    uncommitted = {one.alias for one in connections.all(initialized_only=True) if one.in_atomic_block}
    if not uncommitted:
        function()

    def committed(alias: str) -> None:
        uncommitted.remove(alias)
        if not uncommitted:
            function()

    for alias in sorted(uncommitted):
        transaction.on_commit(partial(committed, alias), using=alias)


@csrf_exempt
@require_POST
def webhook(request: HttpRequest) -> HttpResponse:
    """Verifies a webhook, ignores a repeat of one that was handled, as the default cache knows it, and sends
    `webhook_received` for each event. It needs no token of a page: it is signed."""
    end = get_publisher().endpoint
    try:
        body = _body(request, MAX_WEBHOOK_BYTES)
        delivery = verify_webhook(
            body, request.headers, key=end.key, secret=end.secret, endpoint_secret=endpoint_secrets()
        )
    except (BadAuthRequest, InvalidWebhook) as error:
        return JsonResponse({"error": "not accepted"}, status=error.status)
    seen = f"redpoll:delivery:{delivery.id}"
    if not (delivery.id and cache.get(seen)):
        for event in delivery.events:
            webhook_received.send(sender=None, event=event)
        if delivery.id:
            # With ATOMIC_REQUESTS the commit comes after this view. If it fails, the repeat must be handled.
            _once_committed(partial(cache.set, seen, True, _REMEMBERED_S))
    return HttpResponse(status=200)
