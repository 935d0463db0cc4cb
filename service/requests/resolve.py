"""From a validated body to requests that the engine takes.

Resolves what a field means for this model (what fits, which tokens stop, which seed) and refuses,
with the numbers, what cannot run. Nothing is read here (`bodies.py`), encoded (`prompts.py`) or
queued (`queueing.py`).
"""

import re
import secrets
from collections.abc import Sequence

from model.inference.constraints.compiler import Constraint
from model.inference.engine.requests import (
    AttentionWeights,
    GenerationRequest,
    HiddenStates,
    Logits,
    OutputsRequest,
    ScoreRequest,
)
from model.inference.sampling.params import SamplingParams
from model.text.tokenizer import Tokenizer
from service.core.errors import bad_request, clip, context_too_long
from service.core.ids import new_id
from service.core.state import Served
from service.requests.prompts import check_ids
from service.requests.submit import deadline_of, engine_refusals
from service.schemas import generate as schemas
from service.schemas.tensors import PositionChoice, PositionRange, Processing

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""An id as the key of a JSON object: one spelling each, so that no key overwrites another."""


def generation_requests(
    body: schemas.GenerateRequest,
    prompts: list[tuple[int, ...]],
    served: Served,
    constraint: Constraint | None,
    deadline: float | None,
) -> list[GenerationRequest]:
    """One engine request per prompt, or ApiError."""
    seed = secrets.randbits(63) if body.seed is None else body.seed
    tokenizer = served.checkpoint.tokenizer
    requests = []
    for prompt in prompts:
        room = served.context_length - len(prompt)
        max_tokens = max(room, 0) if body.max_tokens is None else body.max_tokens
        if room < 1 or max_tokens > room:
            raise context_too_long(len(prompt), max_tokens, served.context_length)
        requests.append(
            GenerationRequest(
                request_id=new_id("gen"),
                token_ids=prompt,
                params=_sampling_params(body, max_tokens, seed, tokenizer, constraint),
                n=body.n,
                prompt_logprobs=_prompt_logprobs(body),
                priority=body.priority,
                prefix_reuse=body.prefix_reuse,
                deadline=deadline,
            )
        )
    _check_generation_logprobs(body, requests, served)
    return requests


def _sampling_params(
    body: schemas.GenerateRequest,
    max_tokens: int,
    seed: int,
    tokenizer: Tokenizer,
    constraint: Constraint | None,
) -> SamplingParams:
    stop_token_ids = set(body.stop_token_ids)
    if tokenizer.end_of_text is not None and not body.ignore_eos:
        stop_token_ids.add(tokenizer.end_of_text)
    with engine_refusals():
        return SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=logit_bias(body.logit_bias),
            allowed_token_ids=(
                None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
            ),
            constraint=constraint,
            stop_token_ids=frozenset(stop_token_ids),
            min_tokens=body.min_tokens,
            logprobs=body.logprobs,
            logprobs_stage=body.logprobs_stage,
        )


def logit_bias(biases: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings; ours are ids."""
    for key in biases:
        if not TOKEN_ID.fullmatch(key):
            raise bad_request(
                f"logit_bias has the key {clip(key)!r}; keys are token ids", "logit_bias"
            )
    return {int(key): bias for key, bias in biases.items()}


def _prompt_logprobs(body: schemas.GenerateRequest) -> int | None:
    """Those of the prompt's tokens: asked for as such, or by an echo with logprobs."""
    echoed = body.logprobs if body.echo else None
    return max((k for k in (body.prompt_logprobs, echoed) if k is not None), default=None)


def _check_generation_logprobs(
    body: schemas.GenerateRequest, requests: list[GenerationRequest], served: Served
) -> None:
    """Refuse a request whose reply could hold more logprobs than are allowed in one."""
    generated = sum(request.params.max_tokens for request in requests) * body.n
    prompted = sum(len(request.token_ids) for request in requests)
    count, param = 0, "logprobs"
    if body.prompt_logprobs is not None:
        count, param = prompted * (1 + body.prompt_logprobs), "prompt_logprobs"
    if body.logprobs is not None:
        echoed = prompted * body.n if body.echo else 0
        count, param = count + (generated + echoed) * (1 + body.logprobs), "logprobs"
    check_logprobs(param, count, served)


def outputs_request(
    prompt: tuple[int, ...],
    positions: PositionChoice,
    output: Logits | HiddenStates | AttentionWeights,
    served: Served,
    *,
    timeout: float | None = None,
) -> OutputsRequest:
    """What the model computes at some positions of one prompt, or ApiError."""
    check_length(len(prompt), "prompt", served)
    return OutputsRequest(
        request_id=new_id("rows"),
        token_ids=prompt,
        positions=_positions(positions, len(prompt)),
        output=output,
        deadline=deadline_of(timeout, served),
    )


def _positions(positions: PositionChoice, length: int) -> tuple[int, ...]:
    match positions:
        case "last":
            return (length - 1,)
        case "all":
            return tuple(range(length))
        case PositionRange():
            found = tuple(range(length)[positions.start : positions.to])
            if not found:
                raise bad_request(
                    f"positions from {positions.start} to {positions.to} of a prompt of {length} "
                    "tokens are none; `to` is the first position left out",
                    "positions",
                )
            return found
        case _:
            return chosen("positions", positions, length, f"the prompt has {length} tokens")


def chosen(param: str, places: Sequence[int] | None, count: int, what: str) -> tuple[int, ...]:
    """Indices into `count` things, negative ones from the end, ascending; all of them for None."""
    if places is None:
        return tuple(range(count))
    for place in places:
        if not -count <= place < count:
            raise bad_request(
                f"{param} has {place}; {what} (0 to {count - 1}, or -{count} to -1 from the end)",
                param,
            )
    resolved = [place % count for place in places]
    if resolved != sorted(set(resolved)):
        raise bad_request(f"{param} {resolved[:20]} must be ascending and distinct", param)
    return tuple(resolved)


def requested_logits(
    stage: str, processing: Processing | None, columns: Sequence[int] | None = None
) -> Logits:
    """What a body asks for of its logits: which columns, raw or processed."""
    chosen_columns = None if columns is None else tuple(columns)
    if stage == "raw":
        return Logits(columns=chosen_columns)
    fields = processing or Processing()
    allowed = fields.allowed_token_ids
    with engine_refusals():
        params = SamplingParams(
            max_tokens=1,
            seed=0,  # nothing is sampled
            temperature=fields.temperature,
            top_k=fields.top_k,
            top_p=fields.top_p,
            min_p=fields.min_p,
            repetition_penalty=fields.repetition_penalty,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            logit_bias=logit_bias(fields.logit_bias),
            allowed_token_ids=None if allowed is None else tuple(allowed),
        )
    return Logits(
        columns=chosen_columns, processing=params, completion_start=fields.completion_start
    )


def score_request(
    prompt: tuple[int, ...],
    continuations: Sequence[tuple[int, ...]],
    served: Served,
    *,
    top: int,
    timeout: float | None = None,
) -> ScoreRequest:
    """The logprobs of a prompt, or of continuations of it, or ApiError."""
    check_length(len(prompt), "prompt", served)
    for continuation in continuations:
        check_length(len(prompt) + len(continuation), "continuations", served)
    return ScoreRequest(
        request_id=new_id("score"),
        token_ids=prompt,
        continuations=tuple(continuations),
        top=top,
        deadline=deadline_of(timeout, served),
    )


def check_length(length: int, param: str, served: Served) -> None:
    """Refuse more tokens than the model's context holds."""
    if length > served.context_length:
        what = "the prompt has" if param == "prompt" else "a prompt with its continuation has"
        raise bad_request(
            f"{what} {length} tokens; the model's context is {served.context_length}. "
            f"Shorten it by {length - served.context_length} tokens",
            param,
            "context_length_exceeded",
        )


def check_choice(token_ids: list[int] | None, top_k: int | None, served: Served) -> None:
    """Refuse ids outside the vocabulary, or more of them than it has."""
    vocab_size = served.checkpoint.tokenizer.vocab_size
    if token_ids is not None:
        check_ids("token_ids", token_ids, vocab_size)
    check_count("top_k", top_k, served)


def check_count(param: str, count: int | None, served: Served) -> None:
    """Refuse to list more ids than the vocabulary has."""
    vocab_size = served.checkpoint.tokenizer.vocab_size
    if count is not None and count > vocab_size:
        raise bad_request(f"{param} is {count}; the vocabulary has {vocab_size} ids", param)


def check_logprobs(param: str, count: int, served: Served) -> None:
    """Refuse more logprobs than one reply may hold: they are in memory together."""
    limit = served.settings.max_logprobs
    if count > limit:
        raise bad_request(
            f"the reply could hold {count} logprobs; {limit} are allowed in one. Ask for less, or "
            "raise --max-logprobs",
            param,
        )
