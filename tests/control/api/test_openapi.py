"""The OpenAPI document matches the handlers. schemathesis checks it on a running server."""

import json

import pytest

from helpers.lengths import amount
from helpers.server import Server
from redpoll.protocol.errors import HTTP_STATUS

# `method_not_allowed` belongs to no route of its own, and only the dashboard uses `forbidden`.
ELSEWHERE = {"method_not_allowed", "forbidden"}


@pytest.fixture
async def document(plane):
    reply = await plane.ask("GET", "/api/v1/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    return reply.json()


async def test_document_lists_exactly_the_routes_of_the_api(plane, document):
    documented = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    served = {
        (route.method, pattern)
        for route in plane.plane.routes.all
        for pattern in ("/api/v1" + route.pattern, route.pattern)
        if route.pattern.startswith(("/apps/", "/users/", "/api/v1/apps"))
    }
    assert documented <= served
    assert {path.removeprefix("/api/v1") for _, path in documented} == {
        path.removeprefix("/api/v1") for _, path in served if path.startswith(("/apps/", "/users/", "/api/v1/apps"))
    }


async def test_every_route_with_credentials_names_a_scope(plane):
    for route in plane.plane.routes.all:
        assert (route.access.name in ("OPEN", "SESSION")) is (route.scope == "")
        assert (route.pattern.startswith(("/apps/", "/users/", "/api/v1/apps"))) is (route.about is not None)


def test_every_field_of_a_body_has_a_description(document_schemas):
    for name in ("Trigger", "Batch", "Item", "Auth"):
        for field in document_schemas[name]["properties"].values():
            assert field["description"]


@pytest.fixture
def document_schemas(document):
    return document["components"]["schemas"]


async def test_every_error_code_is_documented_with_its_status(document):
    documented = set()
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if int(status) >= 400 and status != "408":
                    codes = {word.strip("`") for word in response["description"].split(", ")}
                    assert {HTTP_STATUS[code] for code in codes} == {int(status)}
                    documented |= codes
    assert documented == set(HTTP_STATUS) - ELSEWHERE


async def test_streams_are_documented_with_their_kinds_of_answers(document):
    answers = document["paths"]["/api/v1/apps/{app_id}/channels/{channel}/stream"]["get"]["responses"]
    assert {"200", "204", "304", "410"} <= set(answers)
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "content" not in answers["204"]


async def test_document_is_the_same_for_all_callers_and_contains_no_data_of_apps(plane, document):
    text = json.dumps(document)
    assert "278d425bdf160c739803" not in text
    with_credential = await plane.ask("GET", "/api/v1/openapi.json", headers={"Authorization": "Bearer x"})
    assert with_credential.json() == document


# -- schemathesis -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with Server(workers=1, trigger_rate_per_minute=0) as server:
        yield server


@pytest.mark.parametrize(
    ("shows_its_key", "mode", "examples"),
    [
        (True, "positive", amount(2, 100)),
        (True, "negative", amount(1, 100)),
        (False, "positive", amount(1, 100)),
    ],
)
def test_answers_match_the_document(server, shows_its_key, mode, examples):
    """Valid and invalid bodies and parameters. Generated signatures are wrong, so those calls get 401."""
    from control.generated_calls import compare

    def change(parameters: dict[str, object]) -> None:
        if "app_id" in parameters and shows_its_key:
            parameters["app_id"] = server.app_id

    credentials = {"X-Service-Key": server.app_key, "X-Service-Secret": server.app_secret} if shows_its_key else {}
    # tests/control/management/test_routes.py has those that manage.
    seen = compare(server.public_url, "^(?!manage_)", mode, examples, credentials, lambda: change)
    if mode == "positive" and shows_its_key:
        # Some calls succeeded, so the checks saw real answers.
        reached = {label for label, status in seen if status in (200, 204)}
        assert len(reached) > 4, seen
