"""Requests made up from the server's own description: none of them makes it fail, and all answers are as described."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from amem.serve.description import description

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    found.ok()
    for found in schemathesis.openapi.from_dict(description("tiny-llama", with_keys=False)).get_all_operations()
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["as described", "otherwise"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
def test_no_made_up_request_makes_the_server_fail(shared, operation, mode):
    """Statuses, content types and bodies are those of the description."""
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case):
        if isinstance(case.body, dict):  # few tokens: the point is what is read, not what is computed
            for name in ("max_tokens", "max_completion_tokens"):
                if isinstance(case.body.get(name), int) and 64 < case.body[name] < 4000:
                    case.body[name] = 3
        response = case.call(base_url=shared.server.url)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    try:
        run()
    except Exception as error:
        if "Unsatisfiable" in type(error).__name__:
            pytest.skip("there is no request of this kind")
        raise
    assert statuses


def test_the_description_is_the_one_that_is_served(shared):
    """And after all of that the server is well."""
    assert description("tiny-llama", with_keys=False) == shared.http.get("/openapi.json").json()
    assert "tiny-llama" == shared.chat({"role": "user", "content": "Hello."})["model"]
    assert 0 == shared.server._server.config.app._desk._n_taken
