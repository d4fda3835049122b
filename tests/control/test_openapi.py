"""The OpenAPI document: that it tells what the handlers do, tried by schemathesis on a running server."""

import contextlib
import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from redpoll.protocol.errors import HTTP_STATUS
from server import Server

# Of the API, but of no route's own: a method that an address doesn't know. And one of the dashboard's alone.
ELSEWHERE = {"method_not_allowed", "forbidden"}


@pytest.fixture
async def document(plane):
    reply = await plane.ask("GET", "/api/v1/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    return reply.json()


async def test_every_route_of_the_api_is_in_it_and_no_other(plane, document):
    told = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    served = {
        (route.method, pattern)
        for route in plane.plane.routes.all
        for pattern in ("/api/v1" + route.pattern, route.pattern)
        if route.pattern.startswith(("/apps/", "/users/"))
    }
    assert told <= served
    assert {path.removeprefix("/api/v1") for _, path in told} == {
        path for _, path in served if path.startswith(("/apps/", "/users/"))
    }


async def test_every_route_that_wants_a_credential_names_a_scope(plane):
    for route in plane.plane.routes.all:
        assert (route.access.name in ("OPEN", "SESSION")) is (route.scope == "")
        assert (route.pattern.startswith(("/apps/", "/users/"))) is (route.about is not None)


def test_every_field_of_a_body_has_its_sentence(document_schemas):
    for name in ("Trigger", "Batch", "Item", "Auth"):
        for field in document_schemas[name]["properties"].values():
            assert field["description"]


@pytest.fixture
def document_schemas(document):
    return document["components"]["schemas"]


async def test_every_error_code_stands_at_some_route_and_has_its_status(document):
    told = set()
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if int(status) >= 400 and status != "408":
                    codes = {word.strip("`") for word in response["description"].split(", ")}
                    assert {HTTP_STATUS[code] for code in codes} == {int(status)}
                    told |= codes
    assert told == set(HTTP_STATUS) - ELSEWHERE


async def test_it_is_the_same_for_everybody_and_holds_no_apps_data(plane, document):
    text = json.dumps(document)
    assert "278d425bdf160c739803" not in text
    with_credential = await plane.ask("GET", "/api/v1/openapi.json", headers={"Authorization": "Bearer x"})
    assert with_credential.json() == document


# -- schemathesis -----------------------------------------------------------------------------------------------

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server():
    with Server(workers=1, trigger_rate_per_minute=0) as server:
        yield server


@pytest.mark.parametrize(
    ("shows_its_key", "mode", "examples"),
    [(True, GenerationMode.POSITIVE, 40), (True, GenerationMode.NEGATIVE, 25), (False, GenerationMode.POSITIVE, 10)],
)
def test_no_call_has_an_answer_that_the_document_does_not_know(server, shows_its_key, mode, examples):
    """Bodies and parameters as the document wants them, and as it doesn't; signatures are made up, so 401 then."""
    credentials = {"X-Service-Key": server.app_key, "X-Service-Secret": server.app_secret} if shows_its_key else {}
    seen = set()

    def check(case):
        if "app_id" in case.path_parameters and shows_its_key:
            case.path_parameters["app_id"] = server.app_id
        response = case.call(headers=credentials)
        seen.add((case.operation.label, response.status_code))
        case.validate_response(response, checks=CHECKS)

    for found in schemathesis.openapi.from_url(f"{server.public_url}/api/v1/openapi.json").get_all_operations():
        operation = found.ok()
        bounded = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        with contextlib.suppress(Unsatisfiable):
            # Negative: an operation that takes nothing can't be called wrongly.
            bounded(given(case=operation.as_strategy(generation_mode=mode))(check))()
    if mode is GenerationMode.POSITIVE and shows_its_key:
        # The calls were no empty ones.
        reached = {label for label, status in seen if status in (200, 204)}
        assert len(reached) > 4, seen
