"""Ollama's endpoints below /api, as far as its clients generate text and look for models."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.version import VERSION
from logitd.service.api.ollama.formats import (
    LINES,
    MEDIA_TYPE,
    OllamaFormat,
    described,
    details,
    line,
    modified,
)
from logitd.service.api.ollama.translate import PARAMS, model_name, native_chat, native_completion
from logitd.service.api.openai.translate import param_names
from logitd.service.api.requests.body import body_of, described_by
from logitd.service.api.requests.resolve import resolve_generation
from logitd.service.api.responses.generation import Generation, respond
from logitd.service.core.errors import ERRORS
from logitd.service.core.models import Served
from logitd.service.core.state import Ready
from logitd.service.schemas.generate import GenerateRequest
from logitd.service.schemas.ollama import (
    OllamaChatReply,
    OllamaChatRequest,
    OllamaGenerateReply,
    OllamaGenerateRequest,
    OllamaModels,
    OllamaRequest,
    OllamaShowReply,
    OllamaShowRequest,
    OllamaVersion,
)

router = APIRouter(tags=["ollama"])

GenerateBody = Annotated[OllamaGenerateRequest, Depends(body_of(OllamaGenerateRequest))]
ChatBody = Annotated[OllamaChatRequest, Depends(body_of(OllamaChatRequest))]
ShowBody = Annotated[OllamaShowRequest, Depends(body_of(OllamaShowRequest))]

STREAMS: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {
        "content": {
            MEDIA_TYPE: {
                "schema": {
                    "type": "string",
                    "description": "A reply as JSON on each line, unless `stream` is false; an "
                    'error after the first byte is `{"error": "..."}`.',
                }
            }
        }
    },
}
SHOWN = {status: error for status, error in ERRORS.items() if status not in (429, 504)}
LISTS: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 431, 503)}


@router.post(
    "/api/generate",
    response_model=OllamaGenerateReply,
    responses=STREAMS,
    openapi_extra=described_by(OllamaGenerateRequest),
    summary="Continue a text, as Ollama does",
)
async def generate(body: GenerateBody, models: Ready, request: Request) -> Response:
    """Lines of JSON, the last of which says why it ended and how long it took; with `"stream":
    false` one reply."""
    served = models.of(model_name(body.model))
    told = OllamaFormat(served.checkpoint.name, "response")
    if not body.prompt:
        media_type = "application/json" if body.stream is False else MEDIA_TYPE
        return Response(line(told.loaded()), media_type=media_type)
    with param_names(**PARAMS):
        native = await native_completion(body, served)
        return await _generated(native, told, body, served, request)


@router.post(
    "/api/chat",
    response_model=OllamaChatReply,
    responses=STREAMS,
    openapi_extra=described_by(OllamaChatRequest),
    summary="Answer in a conversation, as Ollama does",
)
async def chat(body: ChatBody, models: Ready, request: Request) -> Response:
    """Write the messages by the checkpoint's chat template and continue them. Lines of JSON; with
    `"stream": false` one reply."""
    served = models.of(model_name(body.model))
    told = OllamaFormat(served.checkpoint.name, "message")
    with param_names(**PARAMS, prompt="messages"):
        native = await native_chat(body, served)
        return await _generated(native, told, body, served, request)


@router.get("/api/tags", responses=LISTS, summary="The models served, as Ollama lists them")
async def tags(models: Ready) -> OllamaModels:
    """Those that were loaded."""
    return OllamaModels.model_validate({"models": [described(m) for m in models.all.served]})


@router.get("/api/ps", responses=LISTS, summary="The models in memory, as Ollama lists them")
async def running(models: Ready) -> OllamaModels:
    """The same ones."""
    return await tags(models)


@router.post(
    "/api/show",
    response_model=OllamaShowReply,
    responses=SHOWN,
    openapi_extra=described_by(OllamaShowRequest),
    summary="A model that is served, as Ollama describes it",
)
async def show(body: ShowBody, models: Ready) -> dict[str, Any]:
    """What it can do, and its shape."""
    served = models.of(model_name(body.model))
    checkpoint = served.checkpoint
    config = checkpoint.config
    shape = {
        "context_length": config.context_length,
        "block_count": config.n_layer,
        "embedding_length": config.d_model,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_kv_head,
        "vocab_size": config.vocab_size,
    }
    return {
        "modified_at": modified(checkpoint.training.created),
        "template": "",
        "parameters": "",
        "details": details(served),
        "model_info": {
            "general.architecture": "gpt",
            "general.parameter_count": served.computation.parameters,
            **{f"gpt.{name}": value for name, value in shape.items()},
        },
        "capabilities": ["completion"],
    }


@router.get("/api/version", responses={401: ERRORS[401], 431: ERRORS[431]}, summary="The version")
async def version() -> OllamaVersion:
    """Of logitd."""
    return OllamaVersion(version=VERSION)


async def _generated(
    native: GenerateRequest,
    told: OllamaFormat,
    body: OllamaRequest,
    served: Served,
    request: Request,
) -> Response:
    limit = None if body.options is None else body.options.num_predict
    fit = limit is None or limit < 0
    requests = await resolve_generation(native, served, request, fit=fit)
    submission = served.session.submit(requests)
    generation = Generation(native, requests, submission, served, told, LINES)
    return await respond(request, generation, stream=body.stream is not False)
