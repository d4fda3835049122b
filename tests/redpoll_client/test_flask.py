"""The routes for Flask: what is refused, and webhooks."""

import json

import flask as flask_library
import pytest

from redpoll_client import Publisher
from redpoll_client.flask import Realtime
from redpoll_client.rules import Rules
from redpoll_client.signatures import hex_hmac

FORM = {"socket_id": "1.2", "channel_name": "private-anna"}


class Nobody:
    is_authenticated = False


@pytest.fixture
def received():
    return []


@pytest.fixture
def client(received):
    rules = Rules(grant_s=60)

    @rules.channel("private-{name}")
    async def own(user, name):
        return name == user

    def on_webhook(event):
        received.append(event.channel)
        if event.channel == "fails":
            raise LookupError

    realtime = Realtime(
        rules,
        get_user=lambda: flask_library.request.headers.get("X-User") or Nobody(),
        user_id=str,
        publisher=Publisher("1", "k", "s", host="127.0.0.1", port=1),
        on_webhook=on_webhook,
        endpoint_secret="e",
    )
    app = flask_library.Flask(__name__)
    app.register_blueprint(realtime.blueprint(), url_prefix="/realtime")
    return app.test_client()


def test_auth_routes(client):
    signer = Publisher("1", "k", "s", host="127.0.0.1", port=1)

    def post(path, user=None, **fields):
        answer = client.post(f"/realtime/{path}", data=fields, headers={"X-User": user} if user else {})
        return answer.status_code, answer.json

    assert post("auth", "anna", **FORM) == (200, signer.authenticate("private-anna", "1.2"))
    assert post("auth", "bert", **FORM) == (403, {"error": "forbidden"})
    assert post("auth", **FORM) == (403, {"error": "forbidden"})
    assert post("auth", "anna", socket_id="1.2")[0] == 400
    assert post("auth", "anna", socket_id="x" * 70_000)[0] == 413
    assert post("user-auth", "anna", **FORM) == (200, signer.authenticate_user("1.2", {"id": "anna"}))
    assert post("user-auth", **FORM)[0] == 403
    granted = post("grant", "anna", **{"channel_name[]": "private-anna"})[1]
    assert (granted["channels"], granted["auth"][:2]) == (["private-anna"], "k:")
    assert post("grant", **{"channel_name[]": "private-anna"}) == (403, {"error": "forbidden"})


def test_auth_after_somebody_has_read_the_form(client):
    """As Flask-WTF's CSRF protection does before each request."""
    client.application.before_request(lambda: flask_library.request.form.get("csrf_token") and None)
    answer = client.post("/realtime/auth", data=FORM, headers={"X-User": "anna"})
    signer = Publisher("1", "k", "s", host="127.0.0.1", port=1)
    assert (answer.status_code, answer.json) == (200, signer.authenticate("private-anna", "1.2"))


def test_webhooks(client, received):
    def hook(channel, delivery, secret="e"):
        body = json.dumps({"event": "channel.occupied", "data": {"channel": channel}, "timestamp": 1}).encode()
        headers = {"X-Service-Signature": hex_hmac(secret, body), "X-Service-Delivery": delivery}
        return client.post("/realtime/webhook", data=body, headers=headers).status_code

    assert [hook("a", "1"), hook("a", "1"), hook("a", "2", "wrong")] == [200, 200, 401]
    assert hook("x" * (1024 * 1024), "3") == 413
    assert [hook("fails", "4"), hook("fails", "4")] == [500, 500]
    assert received == ["a", "fails", "fails"]
