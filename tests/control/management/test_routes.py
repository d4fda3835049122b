"""The management API as a whole: who may use it, where it is, and whether it answers as its document says."""

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request

import pytest

from helpers.lengths import amount
from helpers.server import Server
from helpers.wire import Socket, end_all
from redpoll.control.http.router import Access
from redpoll.protocol.tokens import MANAGE, SCOPES

# Calls of each operation and kind of input.
EXAMPLES = amount(1, 200)


def target(route, app_id):
    """A path of the route in an app that exists."""
    path = route.pattern.replace("{app_id}", app_id)
    return re.sub(r"\{\w+\}", "x", path)


async def test_scope_manage_opens_the_management_and_nothing_else(plane, manager):
    bearer = {"Authorization": f"Bearer {manager.plain}"}
    seen = set()
    for route in plane.plane.routes.all:
        if not route.wants_credential:
            continue
        reply = await plane.ask(route.method, target(route, "3"), b"{}", bearer)
        if route.access is Access.MANAGE:
            assert reply.status not in (401, 403), (route.name, reply.body)
        else:
            assert (reply.status, reply.json()["code"]) == (403, "insufficient_scope"), (route.name, reply.body)
        seen.add(route.access)
    assert seen == {Access.APP, Access.ANY_APP, Access.MANAGE}


@pytest.mark.parametrize("scope", SCOPES)
async def test_no_other_scope_opens_the_management(plane, scope):
    _, of_app = await plane.records.create_token("3", "of the app", [scope])
    managing = [route for route in plane.plane.routes.all if route.access is Access.MANAGE]
    assert len(managing) == 25
    before = dict(plane.records.apps)
    for route in managing:
        assert route.scope == MANAGE
        reply = await plane.ask(
            route.method, target(route, "3"), b"{}", {"Authorization": f"Bearer {of_app}", "If-Match": "*"}
        )
        assert (reply.status, reply.json()["code"]) == (403, "insufficient_scope"), route.name
    assert plane.records.apps == before


async def test_no_other_credential_opens_the_management(plane, manager):
    pair = {"X-Service-Key": "278d425bdf160c739803", "X-Service-Secret": "7ad3773142a6692b25b8"}
    assert (await plane.call("GET", "/api/v1/apps/3")).json()["code"] == "unauthorized"
    for headers in (pair, {}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {manager.plain}"}):
        reply = await plane.ask("GET", "/api/v1/apps/3", headers=headers)
        assert (reply.status, reply.json()["code"]) == (401, "unauthorized")
        assert reply.headers["www-authenticate"].startswith("Bearer")
    await plane.records.revoke_tokens([manager.token.id])
    assert (await manager("GET")).json()["code"] == "token_revoked"


async def test_wrong_tokens_are_limited_by_address_and_the_right_one_is_accepted(make_plane, redis):
    plane = await make_plane(redis.url, auth_failures_per_minute=3)
    _, plain = await plane.records.create_token(None, "platform", [MANAGE])
    wrong = {"Authorization": "Bearer wrong"}
    statuses = [(await plane.ask("GET", "/api/v1/apps", headers=wrong)).status for _ in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    assert (await plane.ask("GET", "/api/v1/apps")).status == 429
    assert (await plane.ask("GET", "/api/v1/apps", headers={"Authorization": f"Bearer {plain}"})).status == 200


async def test_public_port_hides_the_management(workers_request, manager):
    fields = {"Authorization": f"Bearer {manager.plain}", "If-Match": "*"}
    for method, path in (("GET", ""), ("POST", ""), ("PUT", ""), ("GET", "/3"), ("DELETE", "/3"), ("GET", "/3/keys")):
        reply = await workers_request(method, f"/api/v1/apps{path}", b"", fields=fields)
        assert (reply.status, reply.json()["code"]) == (404, "not_found")
    assert (await workers_request("GET", "/api/v1/apps/3/webhooks/verify")).headers["allow"] == "post"
    assert "3" in manager.records.apps
    assert (await manager("PUT")).headers["allow"] == "GET, POST"


# -- a running server -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with Server(workers=1, manage_on_public_port=1) as server:
        yield server


@pytest.fixture(scope="module")
def manage(server):
    """`manage("POST", "", {…})`: status and body of a request to the public port, with a token that a command made."""
    made = subprocess.run(
        [sys.executable, "-m", "redpoll", "token", "create", "--manage", "--name", "platform", "--json"],
        env={**os.environ, "REDPOLL_DATA_DIR": str(server.folder / "data")},
        check=True,
        capture_output=True,
    )
    headers = {"Authorization": f"Bearer {json.loads(made.stdout)['token']}", "If-Match": "*"}

    def ask(method, path, body=None):
        request = urllib.request.Request(
            f"{server.public_url}/api/v1/apps{path}",
            None if body is None else json.dumps(body).encode(),
            headers | {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = answer.read()
            return json.loads(content) if content else None

    ask.headers = headers
    return ask


async def test_clients_of_an_app_made_and_deleted_over_http(server, manage):
    app = await asyncio.to_thread(manage, "POST", "", {"name": "for a while"})
    client = await Socket.connect(server, key=app["keys"][0]["key"])
    other = await Socket.connect(server)
    await asyncio.to_thread(manage, "DELETE", f"/{app['id']}")
    # As after any deletion of a key (protocol/README.md "Close codes").
    assert await client.until_closed() == 4001
    refused = await Socket.connect(server, key=app["keys"][0]["key"], established=False)
    assert await refused.until_closed() == 4001
    await other.ping()
    await end_all([other])


def _something(manage):
    """An app with one of everything, as parameters of paths."""
    app = manage(
        "POST",
        "",
        {
            "name": "target",
            "keys": [{}, {}],
            "history_rules": [{"name": "a", "keep": 10, "seconds": 60}],
            "webhooks": [{"url": "https://receiver.example/"}],
            "tokens": [{"name": "ci", "scopes": ["read"]}],
        },
    )
    return {
        "app_id": app["id"],
        "key": app["keys"][0]["key"],
        "rule_id": app["history_rules"][0]["id"],
        "webhook_id": app["webhooks"][0]["id"],
        "token_id": app["tokens"][0]["id"],
    }


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_answers_match_the_document(server, manage, mode):
    """Valid and invalid bodies and parameters, for an app that exists, with a right token."""
    from control.generated_calls import compare

    def existing():
        parameters = _something(manage)

        def change(generated):
            if mode == "positive":
                generated.update({name: parameters[name] for name in generated})

        return change

    seen = compare(server.public_url, "^manage_", mode, EXAMPLES, manage.headers, existing)
    if mode == "positive":
        # Nearly each operation succeeded, so the checks saw real answers. A generated URL is no receiver's.
        assert len({label for label, status in seen if status < 300}) >= 20, seen
