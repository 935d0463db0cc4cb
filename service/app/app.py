"""The application: routes, middleware and the life of what is served.

`create_app` starts nothing; the application loads its checkpoint when the server starts it, while
/health already answers 503, and stops its engine when the server stops it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from model.version import VERSION
from service.app import docs as openapi
from service.app.lifespan import load
from service.app.middleware import EXPOSED_HEADERS, BugAnswer, RequestLog
from service.core import errors
from service.core.auth import ApiKeyCheck, is_public, read_api_keys
from service.core.state import ServiceState
from service.routes import (
    activations,
    attention,
    attributions,
    chat,
    completions,
    generate,
    hidden_states,
    lens,
    logits,
    models,
    operations,
    probs,
    score,
    stages,
    sweep,
    tokenize,
)
from service.settings.serve import ServeSettings

DESCRIPTION = """Serves a GPT that was trained with logitd, and every number it computes.

Prompts are texts, lists of token ids, or lists of either. Errors are
`{"error": {"message", "type", "param", "code"}}`, and the message says what to do."""


def create_app(settings: ServeSettings) -> FastAPI:
    """The service as an ASGI application; ApiKeyError if its keys cannot be used."""
    state = ServiceState(settings, read_api_keys(settings.api_keys, settings.api_key_file))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(load(state))
        try:
            yield
        finally:
            await loading
            await state.drain()

    app = FastAPI(
        title="logitd",
        version=VERSION,
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = state
    errors.install(app)
    openapi.install(app, needs_key=lambda path: _needs_key(state, path))
    for routes in (
        generate, logits, probs, score, hidden_states, attention, activations, stages, sweep, lens,
        attributions, tokenize,
        completions, chat, models, operations,
    ):  # fmt: skip
        app.include_router(routes.router)
    _serve_docs(app)
    _serve_playground(app)
    _add_middleware(app, state)
    return app


def _needs_key(state: ServiceState, path: str) -> bool:
    return bool(state.keys.names) and not is_public(path, state.settings.public_endpoints)


def _add_middleware(app: FastAPI, state: ServiceState) -> None:
    """What a request passes on its way in, the innermost first."""
    if state.keys.names:
        app.add_middleware(ApiKeyCheck, keys=state.keys, public=state.settings.public_endpoints)
    app.add_middleware(BugAnswer)
    if state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestLog, metrics=state.metrics)


def _serve_playground(app: FastAPI) -> None:
    """The page at /, which needs nothing but this server."""
    static = Path(__file__).parent / "static"
    app.mount("/static", StaticFiles(directory=static), name="static")

    @app.get("/", include_in_schema=False)
    def playground() -> Response:
        return FileResponse(static / "index.html")


def _serve_docs(app: FastAPI) -> None:
    """Swagger UI from this machine's files: /docs works without a network."""
    assets = Path(fastapi_offline.__file__).parent / "static"
    app.mount("/docs/assets", StaticFiles(directory=assets), name="docs-assets")

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="logitd",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="/docs/assets/favicon.png",
        )
