"""The HTTP interface fuzzed from its own OpenAPI document: what fits the schema and what does not."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_process import ServerProcess

from ludus.serve.openapi import openapi_document

SCHEMA = schemathesis.openapi.from_dict(openapi_document("test"))
SCHEMA.config.generation.update(modes=list(schemathesis.GenerationMode))
CHECKS = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    allow_header_conformance,
]
LENIENT = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def check(case: schemathesis.Case, server: ServerProcess) -> None:
    """No server error (a 503 is how a full or stopping server refuses), and all as documented."""
    response = case.call(base_url=server.address, timeout=20)
    checks = list(CHECKS)
    if response.status_code != 503:
        checks.append(not_a_server_error)
    if response.status_code != 413:  # a refusal too, which this check does not know
        checks.append(negative_data_rejection)
    case.validate_response(response, checks=checks)


@SCHEMA.parametrize()
@settings(max_examples=6, suppress_health_check=LENIENT, phases=[Phase.explicit, Phase.generate])
def test_every_operation_answers_as_documented(case: schemathesis.Case, server: ServerProcess) -> None:
    check(case, server)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@SCHEMA.parametrize()
@settings(max_examples=1000, suppress_health_check=LENIENT)
def test_every_operation_answers_as_documented_at_length(
    case: schemathesis.Case, server: ServerProcess
) -> None:
    check(case, server)
