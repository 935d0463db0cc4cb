"""The application: its routes and middleware.

`create_app` itself starts nothing. The models are loaded when the server starts the application
(until then, /health answers 503), and their engines are stopped when the server stops the
application.
"""

import asyncio
import contextlib
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles

from logitd.model.version import VERSION
from logitd.service import errors
from logitd.service.access.auth import ApiKeyCheck, is_public, read_api_keys
from logitd.service.access.held import ReleaseHeld
from logitd.service.access.hosts import HostCheck, host_check
from logitd.service.application import docs
from logitd.service.application.lifespan import live
from logitd.service.application.middleware import EXPOSED_HEADERS, BugAnswer, HeadAsGet, RequestLog
from logitd.service.http import endpoint
from logitd.service.http.routes import admin, facts, features, status, weights
from logitd.service.models.state import ServiceState
from logitd.service.openai import routes as openai_routes
from logitd.service.settings.serve import ServeSettings
from logitd.service.tracing.attributes import Ended
from logitd.service.tracing.traces import traces_of

DESCRIPTION = """Serves a GPT and every number that it computes.

Prompts are texts, lists of token ids, or lists of either. Errors are
`{"error": {"message", "type", "param", "code"}}`, and the message says what to do."""


def create_app(settings: ServeSettings) -> FastAPI:
    """The service as an ASGI application. Raises ApiKeyError, and TracesError if the settings
    enable traces but OpenTelemetry's packages are missing."""
    state = ServiceState(settings, read_api_keys(settings.api_keys, settings.api_key_file))
    traces = traces_of(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        life = asyncio.create_task(live(state))
        if traces is not None:
            traces.open()
        try:
            yield
        finally:
            if state.waits_for is None:
                await state.settled.wait()  # loading cannot be interrupted
            life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await life
            await state.drain()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = FastAPI(
        title="logitd",
        version=VERSION,
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = state
    errors.install(app)
    guarded, public = bool(state.keys.names), settings.public_endpoints
    docs.install(app, needs_key=lambda path: guarded and not is_public(path, public))
    others = (facts, features, weights, openai_routes, status, admin)
    routers = [endpoint.router(), *(routes.router for routes in others)]
    for router in routers:
        # include_router would prepare the routes at the first request, which delays all requests.
        app.router.routes.extend(router.routes)
    _serve_docs(app)
    _serve_playground(app)
    _add_middleware(app, state, None if traces is None else traces.record)
    return app


def _add_middleware(
    app: FastAPI, state: ServiceState, trace: Callable[[Ended], str | None] | None
) -> None:
    """Add the middleware, the innermost first."""
    app.add_middleware(HeadAsGet)
    if state.keys.names:
        app.add_middleware(ApiKeyCheck, keys=state.keys, public=state.settings.public_endpoints)
    app.add_middleware(ReleaseHeld)
    app.add_middleware(HostCheck, **host_check(state.settings))
    app.add_middleware(BugAnswer)
    if state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestLog, metrics=state.metrics, trace=trace)


def _serve_playground(app: FastAPI) -> None:
    static = Path(__file__).parents[1] / "playground"
    app.mount("/static", StaticFiles(directory=static), name="static")

    @app.get("/", include_in_schema=False)
    def playground() -> Response:
        return FileResponse(static / "index.html", headers=_page_headers())


def _serve_docs(app: FastAPI) -> None:
    """Serve Swagger UI from local files, so that /docs works without a network."""
    assets = Path(fastapi_offline.__file__).parent / "static"
    page = bytes(
        get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="logitd",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="/docs/assets/favicon.png",
        ).body
    )
    inline = page.partition(b"<script>")[2].partition(b"</script>")[0]
    digest = b64encode(sha256(inline).digest()).decode()
    headers = _page_headers(f"'sha256-{digest}'")
    app.mount("/docs/assets", StaticFiles(directory=assets), name="docs-assets")

    once = asyncio.Lock()  # several threads would each create the document

    @cache
    def written() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:
        async with once:  # in a thread: takes a quarter of a second at first
            content = await asyncio.to_thread(written)
        return Response(content, media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    def docs_page() -> Response:
        return HTMLResponse(page, headers=headers)


def _page_headers(*scripts: str) -> dict[str, str]:
    """Headers of a page that may run only this server's scripts and inline scripts with these
    hashes, may send requests only to this server, and may not be shown in a frame."""
    sources = " ".join(("'self'", *scripts))
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
