"""Calls of an API that follow from its OpenAPI document, each answer compared with the document.

Import it in the test: schemathesis takes half a second, which every process that collects tests would spend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def compare(
    url: str,
    operations: str,
    mode: str,
    examples: int,
    headers: Mapping[str, str],
    fill: Callable[[], Callable[[dict[str, object]], None]],
) -> set[tuple[str, int]]:
    """Calls each operation whose id matches `operations`, with valid ("positive") or invalid ("negative") input.

    `fill()` is called for each operation; what it returns changes the generated parameters of the path. Returns the
    operations with the statuses of their answers.
    """
    seen: set[tuple[str, int]] = set()
    bounded = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    schema = schemathesis.openapi.from_url(f"{url}/api/v1/openapi.json", timeout=60)
    for found in schema.include(operation_id_regex=operations).get_all_operations():
        operation, change = found.ok(), fill()
        strategy = operation.as_strategy(generation_mode=GenerationMode(mode))
        # An operation without parameters has no invalid call.
        with contextlib.suppress(Unsatisfiable):
            bounded(given(case=strategy)(_check(headers, change, seen)))()
    return seen


def _check(
    headers: Mapping[str, str], change: Callable[[dict[str, object]], None], seen: set[tuple[str, int]]
) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        change(case.path_parameters)
        response: Response = case.call(headers=headers, timeout=60)
        seen.add((case.operation.label, response.status_code))
        case.validate_response(response, checks=_CHECKS)

    return check
