"""Attributions: from a body to the engine's requests, one for each prompt."""

from logitd.model.inference.attribution.task import DEFAULT_STEPS, AttributionTask
from logitd.model.inference.engine.requests import AttributionRequest
from logitd.model.inference.selection import resolve_indices
from logitd.service.api.requests.encode import encode_all
from logitd.service.api.requests.resolve import deadline_of, single_token
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.schemas.attributions import AttributionsRequest


async def resolve_attributions(
    body: AttributionsRequest, served: Served
) -> list[AttributionRequest]:
    """The requests of a body. Raises InvalidRequest or ApiError for what cannot be computed, or
    does not fit into a reply."""
    deadline = deadline_of(body.timeout, served)
    with served.admission.hold(len(body.prompts), "prompt", served.caller):
        prompts = await encode_all(body.prompts, "prompt", served)
    tokenizer = served.checkpoint.tokenizer
    token, minus = body.token_id, body.minus_id
    if body.token is not None:
        token = single_token(body.token, tokenizer, "token")
    if body.minus is not None:
        minus = single_token(body.minus, tokenizer, "minus")
    requests = [
        AttributionRequest(
            request_id=new_id("attribution"),
            token_ids=prompt,
            task=AttributionTask(
                position=_position(body.position, len(prompt)),
                token_id=token,
                minus_id=minus,
                methods=tuple(body.methods),
                steps=DEFAULT_STEPS if body.steps is None else body.steps,
                baseline=body.baseline if isinstance(body.baseline, int) else None,
            ),
            caller=served.caller,
            deadline=deadline,
        )
        for prompt in prompts
    ]
    _check_reply(body, prompts, served)
    return requests


def _position(position: int, length: int) -> int:
    """From the start; any for an empty prompt, which validation rejects."""
    if not length:
        return 0
    (resolved,) = resolve_indices("position", [position], length, f"the prompt has {length} tokens")
    return resolved


def _check_reply(body: AttributionsRequest, prompts: list[tuple[int, ...]], served: Served) -> None:
    """Reject more tokens and parts than one reply may list."""
    config = served.checkpoint.config
    # Heads, MLP and bias of each block with the biases of two norms; embedding, two biases.
    parts = config.n_layer * (config.n_head + 4) + 3 if "direct" in body.methods else 0
    listed = sum(map(len, prompts)) + parts * len(prompts)
    served.reply_budget.check_listed(listed, "tokens and parts", "prompt")
