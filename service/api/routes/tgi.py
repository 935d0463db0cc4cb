"""TGI's endpoints: POST / and POST /generate_stream. That of /generate is in `generate.py`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.service.api.openai.translate import param_names
from logitd.service.api.requests.body import body_of, described_by
from logitd.service.api.requests.resolve import resolve_generation
from logitd.service.api.responses import sse
from logitd.service.api.responses.generation import Generation, respond
from logitd.service.api.tgi.formats import EVENTS, TgiFormat
from logitd.service.api.tgi.translate import PARAMS, native_generation
from logitd.service.core.models import Served
from logitd.service.core.state import Ready
from logitd.service.schemas.tgi import TextGenerationReply, TextGenerationRequest

router = APIRouter(tags=["text-generation-inference"])

TgiBody = Annotated[TextGenerationRequest, Depends(body_of(TextGenerationRequest))]


@router.post(
    "/",
    response_model=list[TextGenerationReply],
    responses=sse.RESPONSES,
    openapi_extra=described_by(TextGenerationRequest),
    summary="Continue a text, as TGI's root does",
)
async def root(body: TgiBody, models: Ready, request: Request) -> Response:
    """The reply is in a list. With `stream` it is that of /generate_stream."""
    return await generated(
        body, models.of(body.model), request, stream=bool(body.stream), listed=True
    )


@router.post(
    "/generate_stream",
    response_class=Response,
    responses={**sse.RESPONSES, 200: sse.EVENTS_ALONE},
    openapi_extra=described_by(TextGenerationRequest),
    summary="Continue a text, an event a token",
)
async def generate_stream(body: TgiBody, models: Ready, request: Request) -> Response:
    """Server-sent events `{"index", "token", "generated_text", "details"}`; the last one has the
    whole text and why it ended."""
    return await generated(body, models.of(body.model), request, stream=True)


async def generated(
    body: TextGenerationRequest,
    served: Served,
    request: Request,
    *,
    stream: bool,
    listed: bool = False,
) -> Response:
    """The answer to a body of TGI's."""
    fit = body.parameters is None or body.parameters.max_new_tokens is None
    with param_names(**PARAMS):
        native = await native_generation(body, served, stream=stream)
        requests = await resolve_generation(native, served, request, fit=fit)
        submission = served.session.submit(requests)
    seed = requests[0].params.seed
    tgi_format = TgiFormat(body, served.checkpoint.tokenizer, seed, listed=listed)
    generation = Generation(native, requests, submission, served, tgi_format, EVENTS)
    return await respond(request, generation, stream=stream)
