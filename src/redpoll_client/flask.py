"""Flask: the routes of auth, sign-in and webhooks as a blueprint, and a publisher.

    realtime = Realtime(rules, get_user=lambda: current_user, user_id=lambda user: user.get_id())
    app.register_blueprint(realtime.blueprint(), url_prefix="/realtime")

`get_user()` returns the user who is logged in, or None. A page of the same origin needs a session cookie with
`SameSite=Lax` (`SESSION_COOKIE_SAMESITE`), or Flask-WTF's token in the header `X-CSRFToken`, so that no other site can
ask in the user's name; exempt only the webhook from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import urlencode

from flask import Blueprint, Response, jsonify, request
from werkzeug.exceptions import RequestEntityTooLarge

from redpoll_client.errors import InvalidWebhook
from redpoll_client.publisher import Publisher
from redpoll_client.rules import (
    MAX_AUTH_BYTES,
    BadAuthRequest,
    Rules,
    authorize_sync,
    grant_sync,
    parse_auth,
    sign_in_sync,
)
from redpoll_client.webhooks import MAX_WEBHOOK_BYTES, SeenDeliveries, WebhookEvent, verify_webhook

__all__ = ["Realtime"]


class Realtime:
    """An app's publisher, rules and webhooks.

    - `user_id(user)` returns the id under which others see the user, a string.
    - `publisher` is by default one from REDPOLL_URL or PUSHER_URL, made at its first use.
    - `on_webhook(event)` gets each WebhookEvent. If it raises, the server repeats the delivery.
    - `endpoint_secret`: those of `redpoll webhook create`; without them, only Pusher's format is accepted, and
      only signed with the publisher's key.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        get_user: Callable[[], Any],
        user_id: Callable[[Any], str],
        publisher: Publisher | None = None,
        on_webhook: Callable[[WebhookEvent], object] | None = None,
        endpoint_secret: str | Sequence[str] = (),
    ) -> None:
        self.rules = rules
        self._publisher = publisher
        self._get_user = get_user
        self._user_id = user_id
        self._on_webhook = on_webhook
        self._endpoint_secret = endpoint_secret
        self._seen = SeenDeliveries()

    @property
    def publisher(self) -> Publisher:
        """The app's publisher. A test may set another one. Raises ValueError if none was given and neither REDPOLL_URL
        nor PUSHER_URL is set."""
        if self._publisher is None:
            self._publisher = Publisher()
        return self._publisher

    @publisher.setter
    def publisher(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def blueprint(self, name: str = "redpoll") -> Blueprint:
        """`/auth`, `/user-auth`, `/grant`, and with `on_webhook` `/webhook`; all POST."""
        blueprint = Blueprint(name, __name__)
        blueprint.add_url_rule("/auth", "auth", self.auth, methods=["POST"])
        blueprint.add_url_rule("/user-auth", "user_auth", self.user_auth, methods=["POST"])
        blueprint.add_url_rule("/grant", "grant", self.grant, methods=["POST"])
        if self._on_webhook is not None:
            blueprint.add_url_rule("/webhook", "webhook", self.webhook, methods=["POST"])
        return blueprint

    def auth(self) -> tuple[Response, int]:
        """Signs the channels that the rules let the user join."""
        return self._answer(authorize_sync)

    def user_auth(self) -> tuple[Response, int]:
        """Signs the user's connection in."""
        return self._answer(sign_in_sync)

    def grant(self) -> tuple[Response, int]:
        """Makes one grant for the channels that the rules let the user join."""
        return self._answer(grant_sync)

    def webhook(self) -> tuple[Response, int]:
        """Verifies a webhook, ignores a repeat of one that was handled, and hands its events over."""
        end = self.publisher.endpoint
        try:
            delivery = verify_webhook(
                _body(MAX_WEBHOOK_BYTES),
                dict(request.headers),
                key=end.key,
                secret=end.secret,
                endpoint_secret=self._endpoint_secret,
            )
        except (BadAuthRequest, InvalidWebhook) as error:
            return jsonify(error="not accepted"), error.status
        assert self._on_webhook is not None
        if not self._seen.has(delivery.id):
            for event in delivery.events:
                self._on_webhook(event)
            self._seen.add(delivery.id)
        return jsonify(), 200

    def _answer(self, decide: Callable[..., tuple[int, dict[str, Any]]]) -> tuple[Response, int]:
        try:
            asked = parse_auth(request.headers.get("Content-Type", ""), _body(MAX_AUTH_BYTES))
        except BadAuthRequest as error:
            return jsonify(error=str(error)), error.status
        user = self._get_user()
        # Flask-Login has an object for nobody.
        if user is not None and not getattr(user, "is_authenticated", True):
            user = None
        user_id = None if user is None else self._user_id(user)
        status, content = decide((self.rules, self.publisher, asked, user, user_id), _run)
        return jsonify(content), status


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def _body(limit: int) -> bytes:
    """The body. Raises BadAuthRequest with 413 if it is longer than `limit`."""
    request.max_content_length = limit
    try:
        body = request.get_data(cache=False)
        # Something before us has read the form, such as a CSRF protection.
        return body or urlencode(list(request.form.items(multi=True))).encode()
    except RequestEntityTooLarge:
        raise BadAuthRequest(f"at most {limit} bytes are allowed", 413) from None
