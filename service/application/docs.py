"""Additions to the OpenAPI document that FastAPI generates.

FastAPI does not know the schemas of request bodies, because `body_of` reads the bodies itself. If
the server has API keys, the document also says which endpoints need one.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.body import RequestBody
from logitd.service.http.routes.admin import ReloadRequest
from logitd.service.openai.chat_schemas import ChatRequest
from logitd.service.openai.schemas import CompletionRequest

REQUEST_BODIES: tuple[type[RequestBody], ...] = (
    *(operation.body for operation in OPERATIONS),
    CompletionRequest,
    ChatRequest,
    ReloadRequest,
)


def install(app: FastAPI, needs_key: Callable[[str], bool]) -> None:
    """Add the request bodies to the application's OpenAPI document, and mark the paths that need an
    API key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            _, bodies = models_json_schema(
                [(model, "validation") for model in REQUEST_BODIES],
                ref_template="#/components/schemas/{model}",
            )
            schema["components"]["schemas"].update(bodies["$defs"])
            _remove_422(schema)
            _add_keys(schema, needs_key)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _remove_422(schema: dict[str, Any]) -> None:
    """Remove the status that FastAPI lists for wrong parameters. The server sends 400 instead."""
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)


def _add_keys(schema: dict[str, Any], needs_key: Callable[[str], bool]) -> None:
    """Mark operations that need an API key, so that /docs has a field for it."""
    operations = [
        operation
        for path, methods in schema["paths"].items()
        for operation in methods.values()
        if needs_key(path)
    ]
    if operations:
        bearer = {"type": "http", "scheme": "bearer"}
        schema["components"]["securitySchemes"] = {"api_key": bearer}
    for operation in operations:
        operation["security"] = [{"api_key": []}]
