"""Django's views: the rules with its users, its protection against forged requests, webhooks."""

import contextlib
import json

import pytest
from django.core.cache import cache
from django.db import IntegrityError, connections, transaction
from django.test import Client, override_settings

from helpers.outbox_site import rules
from redpoll_client import Publisher
from redpoll_client.signatures import hex_hmac

URL = "http://k:s@127.0.0.1:1/apps/1"
FORM = {"socket_id": "1.2", "channel_name": "private-anna"}


@rules.channel("private-{name}")
async def own(user, name):
    return name == user.username


@rules.channel("presence-{name}")
def room(user, name):
    return {"name": user.username}


@pytest.fixture
def client(django_site):
    """Sends the token that pages send."""
    from django.contrib.auth import get_user_model

    cache.clear()
    get_user_model().objects.create_user("anna", password="p")
    with override_settings(REDPOLL={"url": URL, "rules": "helpers.outbox_site.rules", "endpoint_secret": "e"}):
        yield Client(enforce_csrf_checks=True, headers={"X-CSRFToken": "c" * 32})


def post(client, path, **fields):
    client.cookies["csrftoken"] = "c" * 32
    answer = client.post(path, fields)
    return answer.status_code, answer.json() if answer["Content-Type"] == "application/json" else None


def test_auth_routes(client):
    from django.contrib.auth import get_user_model

    signer = Publisher(url=URL)
    assert post(client, "/auth", **FORM) == (403, {"error": "forbidden"})
    assert post(client, "/user-auth", **FORM) == (403, {"error": "forbidden"})
    assert client.login(username="anna", password="p")
    assert post(client, "/auth", **FORM) == (200, signer.authenticate("private-anna", "1.2"))
    assert post(client, "/auth", **{**FORM, "channel_name": "private-bert"})[0] == 403
    answer = post(client, "/auth", **{**FORM, "channel_name": "presence-a"})[1]
    user_id = json.loads(answer["channel_data"])["user_id"]
    assert post(client, "/user-auth", **FORM) == (200, signer.authenticate_user("1.2", {"id": user_id}))
    assert post(client, "/auth", socket_id="1.2")[0] == 400
    assert post(client, "/grant", **{"channel_name[]": "private-anna"})[0] == 404
    rules.grant_s = 60
    granted = post(client, "/grant", **{"channel_name[]": "private-anna"})[1]
    assert (granted["channels"], granted["user_id"]) == (["private-anna"], user_id)
    rules.grant_s = None
    assert post(client, "/auth", socket_id="x" * 70_000)[0] == 413
    assert client.get("/auth").status_code == 405
    # A multipart form that nothing has read before.
    unchecked = Client()
    unchecked.force_login(get_user_model().objects.get())
    assert unchecked.post("/auth", FORM).json() == signer.authenticate("private-anna", "1.2")
    client.cookies.clear()
    assert client.post("/auth", FORM).status_code == 403
    assert b"CSRF" in client.post("/auth", FORM).content


def hook(channel, delivery, secret="e"):
    """Posts a webhook; the answer's status."""
    body = json.dumps({"event": "channel.occupied", "data": {"channel": channel}, "timestamp": 1}).encode()
    headers = {"X-Service-Signature": hex_hmac(secret, body), "X-Service-Delivery": delivery}
    return Client().post("/webhook", body, "application/json", headers=headers).status_code


def test_webhooks(client):
    from redpoll_client.django.signals import webhook_received

    received = []

    def receive(sender, event, **_):
        received.append(event.channel)
        if event.channel == "fails":
            raise LookupError

    webhook_received.connect(receive)
    try:
        assert [hook("a", "1"), hook("a", "1"), hook("a", "2", "wrong")] == [200, 200, 401]
        assert hook("x" * (1024 * 1024), "3") == 413
        for _ in range(2):
            with pytest.raises(LookupError):
                hook("fails", "4")
        assert received == ["a", "fails", "fails"]
    finally:
        webhook_received.disconnect(receive)


def test_a_webhook_whose_transaction_fails_is_handled_again(client, monkeypatch):
    from django.contrib.auth.models import Permission
    from django.contrib.contenttypes.models import ContentType

    from redpoll_client.django.signals import webhook_received

    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    content_types = [0, ContentType.objects.create(app_label="a", model="a").id]

    def receive(sender, event, **_):
        # A foreign key is checked at the commit.
        Permission.objects.create(name=event.channel, codename="c", content_type_id=content_types.pop(0))

    webhook_received.connect(receive)
    try:
        with pytest.raises(IntegrityError):
            hook("a", "transaction-1")
        assert [hook("a", "transaction-1"), hook("a", "transaction-1")] == [200, 200]
        assert content_types == []
        assert Permission.objects.filter(name="a").count() == 1
    finally:
        webhook_received.disconnect(receive)


def test_what_waits_for_commits_waits_for_all_of_them(django_site, monkeypatch):
    from redpoll_client.django.views import _once_committed

    monkeypatch.setitem(connections.settings, "other", {**connections.settings["default"], "NAME": ":memory:"})
    done = []
    try:
        for end in ("commit", "rollback"):
            with contextlib.suppress(LookupError), transaction.atomic("default"):
                with transaction.atomic("other"):
                    _once_committed(lambda end=end: done.append(end))
                done.append(f"before the {end}")
                if end == "rollback":
                    raise LookupError
        assert done == ["before the commit", "commit", "before the rollback"]
    finally:
        connections["other"].close()
        del connections["other"]
