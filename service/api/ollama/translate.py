"""From a body of Ollama's to the native one, which is then handled as /generate does."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from logitd.service.api.openai.chat import render_chat, turn_ends
from logitd.service.core.errors import bad_request, from_validation
from logitd.service.core.models import Served
from logitd.service.schemas.generate import GenerateRequest
from logitd.service.schemas.ollama import (
    TEMPERATURE,
    TOP_K,
    TOP_P,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)

PARAMS = {
    "json_schema": "format",
    "repetition_penalty": "options",
    **dict.fromkeys(("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"), "options"),
    **dict.fromkeys(("stop", "presence_penalty", "frequency_penalty"), "options"),
}
"""Native fields, and those that a client knows them by in errors."""
SAME = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
"""Options that mean what the native fields of these names do."""
LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""


def model_name(name: str | None) -> str | None:
    """The name of a model, which Ollama's clients may send with a tag."""
    return None if name is None else name.removesuffix(LATEST)


async def native_completion(body: OllamaGenerateRequest, served: Served) -> GenerateRequest:
    """The same request for /generate, or ApiError. Where the checkpoint has a chat template, the
    prompt is the message of a user, unless it is `raw`."""
    prompt = body.prompt or ""
    if served.checkpoint.chat_template is None or body.raw:
        if body.system:
            raise bad_request(
                "system goes with a chat template, which the checkpoint does not have or `raw` "
                "leaves out; write it into the prompt",
                "system",
            )
        return _native(body, {"prompt": prompt}, served)
    messages = [OllamaMessage(role="user", content=prompt)]
    if body.system:
        messages.insert(0, OllamaMessage(role="system", content=body.system))
    return await _conversation(body, messages, "prompt", served)


async def native_chat(body: OllamaChatRequest, served: Served) -> GenerateRequest:
    """The same request for /generate, with the conversation as token ids; or ApiError."""
    return await _conversation(body, body.messages, "messages", served)


async def _conversation(
    body: OllamaRequest, messages: Sequence[OllamaMessage], param: str, served: Served
) -> GenerateRequest:
    with served.admission.hold(1, param, served.caller):  # a full queue before anything is rendered
        known = [{"role": message.role, "content": message.content} for message in messages]
        prompt = await render_chat(known, served)
    ends = turn_ends(served.checkpoint.tokenizer)
    return _native(body, {"prompt": list(prompt), "stop_token_ids": ends}, served)


def _native(body: OllamaRequest, prompt: dict[str, Any], served: Served) -> GenerateRequest:
    _check_loading(body, served)
    options = body.options or OllamaOptions()
    fields: dict[str, Any] = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
    fields |= {name: value for name in SAME if (value := getattr(options, name)) is not None}
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    if options.seed is not None and options.seed >= 0:
        fields["seed"] = options.seed
    if options.num_predict is not None and options.num_predict >= 0:
        fields["max_tokens"] = options.num_predict
    if body.format:
        schema = body.format if isinstance(body.format, dict) else {"type": "object"}
        fields["json_schema"] = schema
    try:
        return GenerateRequest.model_validate({**fields, **prompt})
    except ValidationError as error:
        raise from_validation(error) from error


def _check_loading(body: OllamaRequest, served: Served) -> None:
    """Raise ApiError for what Ollama would load the model anew for."""
    if body.keep_alive in (0, "0", "0s", "0m"):
        raise bad_request(
            "keep_alive is 0, and the model is not unloaded here; leave it out", "keep_alive"
        )
    wanted = None if body.options is None else body.options.num_ctx
    if wanted is not None and wanted > served.context_length:
        raise bad_request(
            f"num_ctx is {wanted}; this model's context is {served.context_length} tokens",
            "options",
        )
