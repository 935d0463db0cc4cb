"""/docs: every body is described, every example is accepted, every file is local."""

import re
from typing import Any

import pytest

from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.body import RequestBody
from logitd.service.http.routes.admin import ReloadRequest
from logitd.service.openai.chat_schemas import ChatRequest
from logitd.service.openai.schemas import CompletionRequest
from tests.service.serving import Serving

BODIES: dict[str, type[RequestBody]] = {
    **{operation.path: operation.body for operation in OPERATIONS},
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
UNQUEUED = {one.path for one in OPERATIONS if one.form == "vocabulary"}
"""Endpoints that do not use the engine."""
GETS = (
    *("/health", "/health/live", "/health/ready", "/info", "/card", "/history", "/version"),
    "/metrics",
    "/tokenizer_info",
    *("/weights", "/weights/{name}", "/stages", "/features", "/features/{index}"),
    *("/v1/models", "/v1/models/{model}"),
)


@pytest.fixture(scope="module")
def document(server: Serving) -> dict[str, Any]:
    response = server.client.get("/openapi.json")
    assert response.status_code == 200
    return dict(response.json())


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for part in value.values() for found in references(part)]
    if isinstance(value, list):
        return [found for part in value for found in references(part)]
    return []


def test_every_endpoint_is_described(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {*BODIES, *GETS, "/admin/reload"}
    for path, methods in document["paths"].items():
        assert set(methods) == {"get" if path in GETS else "post"}
        for operation in methods.values():
            assert operation["summary"], path
            assert operation["tags"], path


def test_every_reference_exists(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert found
    for reference in found:
        value: Any = document
        for part in reference.removeprefix("#/").split("/"):
            value = value[part]


@pytest.mark.parametrize("path", BODIES)
def test_every_field_of_a_body_is_described(document: dict[str, Any], path: str) -> None:
    model = BODIES[path]
    body = document["paths"][path]["post"]["requestBody"]
    assert body["required"] is True
    reference = body["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert set(schema["properties"]) == set(model.model_fields)
    assert schema["additionalProperties"] is False
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    assert schema["required"] == required
    assert all(field["description"] for field in schema["properties"].values())


@pytest.mark.parametrize(
    ("path", "summary"), [(path, one) for path, model in BODIES.items() for one in model.examples]
)
def test_every_documented_example_is_accepted(
    document: dict[str, Any], chatter: Serving, path: str, summary: str
) -> None:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert set(content["examples"]) == set(BODIES[path].examples)
    response = chatter.post(path, content["examples"][summary]["value"])
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        assert response.json()["model"] == "chatty"
    else:
        assert response.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", BODIES)
def test_errors_are_documented(document: dict[str, Any], path: str) -> None:
    responses = document["paths"][path]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "415", "431", "500", "503"} <= set(responses)
    assert ({"429", "504"} <= set(responses)) == (path not in UNQUEUED)
    for status, response in responses.items():
        if status != "200":
            assert response["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorReply")
            assert response["description"]


def test_reload_is_described(document: dict[str, Any]) -> None:
    operation = document["paths"]["/admin/reload"]["post"]
    assert {"200", "400", "401", "403", "409", "413", "415", "500"} <= set(operation["responses"])
    assert not operation["requestBody"]["required"]
    examples = operation["requestBody"]["content"]["application/json"]["examples"]
    for example in examples.values():
        ReloadRequest.model_validate(example["value"])


@pytest.mark.parametrize("path", GETS)
def test_errors_of_get_are_documented(document: dict[str, Any], path: str) -> None:
    responses = set(document["paths"][path]["get"]["responses"])
    assert {"200", "400", "403", "431"} <= responses
    assert ("401" in responses) != path.startswith("/health")


def test_only_statuses_that_are_sent_are_documented(document: dict[str, Any]) -> None:
    """FastAPI lists 422 for each endpoint with parameters."""
    for methods in document["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_undocumented_status_fails_a_test(server: Serving) -> None:
    """`Serving.client` checks that the OpenAPI document lists the status of each reply."""
    app = server.app
    described = app.openapi()
    try:
        app.openapi_schema = {"paths": {"/generate": {"post": {"responses": {"200": {}}}}}}
        with pytest.raises(AssertionError, match="/generate"):
            server.post("/generate", {"prompt": ""})
    finally:
        app.openapi_schema = described
    assert server.post("/generate", {"prompt": ""}).status_code == 400


def test_page_uses_local_files_only(server: Serving) -> None:
    page = server.client.get("/docs")
    assert page.status_code == 200
    assert server.client.get("/redoc").status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(?:https?:)?//[a-z0-9]", page.text, flags=re.IGNORECASE)
    files = re.findall(r"(?:href|src)=[\"']([^\"']+)", page.text)
    assert {file.rpartition(".")[2] for file in files} == {"css", "js", "png"}
    for file in [*files, "/openapi.json"]:
        assert file in page.text
        response = server.client.get(file)
        assert response.status_code == 200, file
        assert len(response.content) > 500, file


@pytest.mark.parametrize("path", ["/", "/docs"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_pages_forbid_unneeded_features(server: Serving, path: str, method: str) -> None:
    headers = server.client.request(method, path).headers
    policy = dict(
        part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == policy["style-src"] == "'self'"
    assert re.fullmatch(r"'self'( 'sha256-[A-Za-z0-9+/=]{44}')?", policy["script-src"])
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_stream_is_documented(server: Serving, document: dict[str, Any], path: str) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "text/event-stream"}
    assert content["text/event-stream"]["schema"]["required"] == ["data"]
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    if "chat" not in path:  # needs a template
        with server.client.stream("POST", path, json=body) as reply:
            assert reply.headers["content-type"].partition(";")[0] in content
    for other in ("/probs", "/score", "/logits"):
        content = document["paths"][other]["post"]["responses"]["200"]["content"]
        assert "text/event-stream" not in content
