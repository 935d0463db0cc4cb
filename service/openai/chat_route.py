"""POST /v1/chat/completions: a conversation in OpenAI's shape."""

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.operations import generate
from logitd.model.operations.operation import Completions
from logitd.service.access.auth import note_user
from logitd.service.http import completions, sse
from logitd.service.http.body import body_of, described_by
from logitd.service.http.endpoint import make_plan
from logitd.service.models.state import Ready
from logitd.service.openai.chat import ChatFormat, chat_prompt
from logitd.service.openai.schemas import ChatReply, ChatRequest
from logitd.service.openai.translate import constraint_names, native_chat, param_names

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
    context = models.of(body.model, body.timeout)
    names = {"prompt": "messages", "logprobs": "top_logprobs", **constraint_names(body)}
    with param_names(**names):
        # A full queue is reported before anything is rendered.
        with context.model.admission.hold(body.n or 1, "n", context.caller):
            prompt = await chat_prompt(body, context.subject)
        native = native_chat(body, prompt, context.checkpoint.tokenizer)
        planning = generate.plan(native, context.subject, clamp_max_tokens=True)
        plan = cast(Completions, await make_plan(planning, native, context))
        response_format = ChatFormat(body, context.model.name, context.checkpoint)
        generation = completions.Generation(plan, context, response_format)
    return await completions.respond(generation, context, stream=native.stream)
