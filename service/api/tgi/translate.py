"""From a body of TGI's to the native one, which is then handled as /generate does."""

from typing import Any

from pydantic import ValidationError

from logitd.service.api.requests.encode import encode_all
from logitd.service.core.errors import bad_request, from_validation
from logitd.service.core.models import Served
from logitd.service.schemas.generate import GenerateRequest
from logitd.service.schemas.tgi import (
    NEW_TOKENS,
    TextGenerationParameters,
    TextGenerationRequest,
    TextGrammar,
)

PARAMS = {
    "prompt": "inputs",
    **dict.fromkeys(
        ("max_tokens", "temperature", "top_k", "stop", "json_schema", "regex", "logprobs"),
        "parameters",
    ),
}
"""Native fields, and those that a client knows them by in errors."""
SAME = ("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "seed", "stop")
"""Parameters that mean what the native fields of these names do."""


async def native_generation(
    body: TextGenerationRequest, served: Served, *, stream: bool
) -> GenerateRequest:
    """The same request for /generate, or ApiError."""
    parameters = body.parameters or TextGenerationParameters()
    prompt: str | list[int] = body.inputs
    if parameters.truncate is not None:
        with served.admission.hold(1, "inputs", served.caller):
            (ids,) = await encode_all([body.inputs], "prompt", served)
        prompt = list(ids[-parameters.truncate :])
    sampled = parameters.do_sample or any(
        value is not None for value in (parameters.temperature, parameters.top_k, parameters.top_p)
    )
    same = {name: value for name in SAME if (value := getattr(parameters, name)) is not None}
    fields = {
        **same,
        "prompt": prompt,
        "max_tokens": parameters.max_new_tokens or NEW_TOKENS,
        "temperature": (parameters.temperature or 1.0) if sampled else 0.0,
        "logprobs": parameters.top_n_tokens or 0 if stream or parameters.details else None,
        "stream": stream,
        **_constraint(parameters.grammar),
    }
    try:
        return GenerateRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from error


def _constraint(grammar: TextGrammar | None) -> dict[str, Any]:
    if grammar is None:
        return {}
    if (grammar.type == "regex") != isinstance(grammar.value, str):
        raise bad_request(
            "a grammar of the type 'regex' has a string for its value, of the type 'json' a schema",
            "parameters",
        )
    if grammar.type == "regex":
        return {"regex": grammar.value}
    value: Any = grammar.value
    if grammar.type == "json_schema" and isinstance(value.get("schema"), dict):
        value = value["schema"]  # as OpenAI wraps it
    return {"json_schema": value}
