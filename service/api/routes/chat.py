"""POST /v1/chat/completions: a conversation in OpenAI's shape."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.service.api.openai.chat import ChatFormat, chat_prompt
from logitd.service.api.openai.translate import constraint_names, native_chat, param_names
from logitd.service.api.requests.body import body_of, described_by
from logitd.service.api.requests.resolve import resolve_generation
from logitd.service.api.responses import sse
from logitd.service.api.responses.generation import Generation, respond
from logitd.service.core.auth import note_user
from logitd.service.core.state import Ready
from logitd.service.schemas.openai import ChatReply, ChatRequest

router = APIRouter()

ChatBody = Annotated[ChatRequest, Depends(body_of(ChatRequest))]


@router.post(
    "/v1/chat/completions",
    response_model=ChatReply,
    responses=sse.RESPONSES,
    openapi_extra=described_by(ChatRequest),
    summary="Answer in a conversation, as OpenAI's API does",
    tags=["openai"],
)
async def chat_completions(body: ChatBody, models: Ready, request: Request) -> Response:
    """Write the messages by the checkpoint's chat template and continue them, as /generate does
    after those token ids. An answer ends at any special token. With `tools` and a `tool_choice`
    that asks for a call, it is one, whose arguments fit the function's schema.

    With `stream`, server-sent events: the role, the text or the arguments as they grow, the reason
    of the end, then `[DONE]`."""
    note_user(request, body.user)
    served = models.of(body.model)
    arrived = served.engine.now()
    names = {"prompt": "messages", "logprobs": "top_logprobs", **constraint_names(body)}
    with param_names(**names):
        # A full queue is reported before anything is rendered.
        with served.admission.hold(body.n or 1, "n", served.caller):
            prompt = await chat_prompt(body, served)
        native = native_chat(body, prompt, served.checkpoint.tokenizer)
        requests = await resolve_generation(native, served, request, arrived, fit=True)
        submission = served.session.submit(requests)
    response_format = ChatFormat(body, served.checkpoint)
    generation = Generation(native, requests, submission, served, response_format)
    return await respond(request, generation, stream=native.stream)
