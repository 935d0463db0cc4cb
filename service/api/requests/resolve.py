"""Resolve: from a parsed body to the requests that the engine takes.

Everything that a field means is decided here: texts become token ids, negative indices count from
the end, absent limits become what fits, a seed is drawn, a constraint is compiled. What the model
cannot compute is checked once, when the requests are submitted
(`model/inference/engine/validation.py`). What only a reply depends on, such as how many logprobs
it lists, is checked here.

A full queue is reported before any text is encoded: each function holds room in the queue while it
works. Not here: how a body is read (`body.py`), and how a text becomes ids (`encode.py`).
"""

import json
import re
import secrets
from dataclasses import dataclass

from fastapi import Request

from logitd.model.inference.constraints.compiler import Constraint, Source
from logitd.model.inference.engine.requests import (
    Activations,
    AttentionWeights,
    GenerationRequest,
    HiddenStates,
    Lens,
    Logits,
    Output,
    OutputsRequest,
    ScoreRequest,
)
from logitd.model.inference.engine.validation import check_count, check_token_ids
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.selection import resolve_heads, resolve_indices, resolve_stages
from logitd.model.text.tokenizer import NO_VOCABULARY, Tokenizer
from logitd.service.api.requests.body import unless_gone
from logitd.service.api.requests.encode import encode_all, encode_text, no_vocabulary
from logitd.service.api.requests.interventions import resolve_interventions
from logitd.service.api.requests.positions import resolve_positions
from logitd.service.core.errors import bad_request, clip
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.schemas import generate as schemas
from logitd.service.schemas import tensors
from logitd.service.schemas.activations import ActivationsRequest
from logitd.service.schemas.lens import LensRequest
from logitd.service.schemas.tensors import Processing

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""An id as the key of a JSON object: one spelling each, so that no key overwrites another."""
DEFAULT_PROBS = 10
"""Tokens that /probs lists when the body does not say how many."""

TensorRequest = (
    tensors.LogitsRequest
    | tensors.HiddenStatesRequest
    | tensors.AttentionRequest
    | ActivationsRequest
    | LensRequest
)


# Generations


async def resolve_generation(
    body: schemas.GenerateRequest,
    served: Served,
    request: Request,
    arrived: float | None = None,
    *,
    fit: bool = False,
) -> list[GenerationRequest]:
    """One engine request per prompt. `arrived` is the time from which the timeout counts, where
    that is before this call. `fit`: more tokens than the context has room for are not refused, the
    text then ends at its end."""
    deadline, source = deadline_of(body.timeout, served, arrived), constraint_source(body)
    if not served.checkpoint.tokenizer.has_text:
        _reject_texts(body, source)
    constraint = None
    with served.admission.hold(
        len(body.prompts) * body.n, "prompt" if body.n == 1 else "n", served.caller
    ):
        prompts = await encode_all(body.prompts, "prompt", served)
        if source is not None:
            constraint = await unless_gone(
                request, served.constraints.compiled(source, served.caller)
            )
    changes = await resolve_interventions(
        body.interventions, prompts, served, request, deadline=deadline, generates=True
    )
    seed = new_seed() if body.seed is None else body.seed
    requests = [
        GenerationRequest(
            request_id=new_id("gen"),
            token_ids=prompt,
            params=_sampling_params(
                body, _max_tokens(body, prompt, served, fit=fit), seed, served, constraint
            ),
            n=body.n,
            prompt_logprobs=_prompt_logprobs(body),
            priority=body.priority,
            caller=served.caller,
            prefix_reuse=body.prefix_reuse,
            deadline=deadline,
            interventions=interventions,
        )
        for prompt, interventions in zip(prompts, changes, strict=True)
    ]
    _check_generation_logprobs(body, requests, served)
    return requests


def new_seed() -> int:
    """The seed of a request that brings none: below 2**63, as JSON's readers take it."""
    return secrets.randbits(63)


def _reject_texts(body: schemas.GenerateRequest, source: Source | None) -> None:
    """Raise ApiError for what needs texts besides the prompt."""
    if body.stop_texts:
        raise no_vocabulary("stop")
    if source is not None:
        raise bad_request(
            f"{source.kind} is about text, and {NO_VOCABULARY}; allowed_token_ids limits the ids "
            "that may come",
            source.kind,
            "no_vocabulary",
        )


def deadline_of(
    timeout: float | None, served: Served, arrived: float | None = None
) -> float | None:
    """When a request that arrived now, or at `arrived`, is ended, on the engine's clock."""
    if timeout is None:
        return None
    return timeout + (served.engine.now() if arrived is None else arrived)


def constraint_source(body: schemas.GenerateRequest) -> Source | None:
    """The constraint of a body, which has one at most."""
    if body.regex is not None:
        return Source("regex", body.regex)
    if body.grammar is not None:
        return Source("grammar", body.grammar)
    if body.choice is not None:
        return Source("choice", json.dumps(body.choice))
    if body.json_schema is None:
        return None
    try:
        return Source("json_schema", json.dumps(body.json_schema, allow_nan=False))
    except ValueError as error:
        raise bad_request("json_schema has a number that is too large", "json_schema") from error


def _max_tokens(
    body: schemas.GenerateRequest, prompt: tuple[int, ...], served: Served, *, fit: bool
) -> int:
    """The tokens after a prompt: what fits, where the body does not say, and at most where that is
    what `fit` asks for."""
    # Validation rejects a prompt that leaves no room for one.
    room = max(1, served.context_length - len(prompt))
    if body.max_tokens is None:
        return room
    return min(body.max_tokens, room) if fit else body.max_tokens


def _sampling_params(
    body: schemas.GenerateRequest,
    max_tokens: int,
    seed: int,
    served: Served,
    constraint: Constraint | None,
) -> SamplingParams:
    """How one prompt's sequences are sampled."""
    allowed = body.allowed_token_ids
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
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        constraint=constraint,
        stop_token_ids=_stop_token_ids(body, served.checkpoint.tokenizer),
        min_tokens=body.min_tokens,
        logprobs=body.logprobs,
        logprobs_stage=body.logprobs_stage,
    )


def _stop_token_ids(body: schemas.GenerateRequest, tokenizer: Tokenizer) -> frozenset[int]:
    """The stop tokens of a body, and the end of text unless that is ignored."""
    end = () if body.ignore_eos or tokenizer.end_of_text is None else (tokenizer.end_of_text,)
    return frozenset((*body.stop_token_ids, *end))


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
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
    """Reject a request whose reply could list more logprobs than one reply may hold."""
    generated = sum(request.params.max_tokens for request in requests) * body.n
    prompted = sum(len(request.token_ids) for request in requests)
    count, param = 0, "logprobs"
    if body.prompt_logprobs is not None:
        count, param = prompted * (1 + body.prompt_logprobs), "prompt_logprobs"
    if body.logprobs is not None:
        echoed = prompted * body.n if body.echo else 0
        count, param = count + (generated + echoed) * (1 + body.logprobs), "logprobs"
    served.reply_budget.check_logprobs(count, param)


# Outputs: logits, hidden states, attention weights


async def resolve_logits(
    body: tensors.LogitsRequest, served: Served, request: Request
) -> list[OutputsRequest]:
    """One engine request per prompt, for the rows and columns that a body chooses."""
    columns = None if body.token_ids is None else tuple(body.token_ids)
    output = _logits(body.stage, body.processing, columns)
    requests = await _resolve_outputs(body, output, served, request)
    check_count("top_k", body.top_k, served.checkpoint.config.vocab_size)
    if body.top_k is not None:
        listed = body.top_k * sum(len(request.positions) for request in requests)
        served.reply_budget.check_logprobs(listed, "top_k")
    return requests


async def resolve_hidden_states(
    body: tensors.HiddenStatesRequest, served: Served, request: Request
) -> list[OutputsRequest]:
    """One engine request per prompt, for the layers and positions that a body chooses."""
    states = served.checkpoint.config.n_layer + 1
    layers = resolve_indices("layers", body.layers, states, f"there are {states} hidden states")
    return await _resolve_outputs(body, HiddenStates(layers=layers), served, request)


async def resolve_lens(body: LensRequest, served: Served, request: Request) -> list[OutputsRequest]:
    """One engine request per prompt, for the layers and positions that a body chooses."""
    states = served.checkpoint.config.n_layer + 1
    layers = resolve_indices("layers", body.layers, states, f"there are {states} hidden states")
    named = tuple(body.token_ids or ())
    if body.tokens is not None:
        tokenizer = served.checkpoint.tokenizer
        with served.admission.hold(len(body.prompts), "prompt", served.caller):
            named = tuple(single_token(text, tokenizer, "tokens") for text in body.tokens)
    lens = Lens(layers=layers, top_k=body.top_k, token_ids=named)
    requests = await _resolve_outputs(body, lens, served, request)
    rows = len(layers) * sum(len(resolved.positions) for resolved in requests)
    served.reply_budget.check_logprobs(rows * (body.top_k + len(named)), "top_k")
    return requests


async def resolve_attention(
    body: tensors.AttentionRequest, served: Served, request: Request
) -> list[OutputsRequest]:
    """One engine request per prompt, for the layers, heads and positions that a body chooses."""
    config = served.checkpoint.config
    layers = resolve_indices(
        "layers", body.layers, config.n_layer, f"there are {config.n_layer} layers"
    )
    heads = resolve_indices("heads", body.heads, config.n_head, f"there are {config.n_head} heads")
    weights = AttentionWeights(layers=layers, heads=heads)
    return await _resolve_outputs(body, weights, served, request)


async def resolve_activations(
    body: ActivationsRequest, served: Served, request: Request
) -> list[OutputsRequest]:
    """One engine request per prompt, for the stages, heads and positions that a body chooses."""
    config = served.checkpoint.config
    stages = resolve_stages(body.stages, config)
    heads = None if body.heads is None else resolve_heads(body.heads, stages, config)
    activations = Activations(stages=tuple(stage.name for stage in stages), heads=heads)
    return await _resolve_outputs(body, activations, served, request)


async def _resolve_outputs(
    body: TensorRequest, output: Output, served: Served, request: Request
) -> list[OutputsRequest]:
    deadline = deadline_of(body.timeout, served)
    with served.admission.hold(len(body.prompts), "prompt", served.caller):
        prompts = await encode_all(body.prompts, "prompt", served)
    changes = await resolve_interventions(
        body.interventions, prompts, served, request, deadline=deadline
    )
    return [
        OutputsRequest(
            request_id=new_id("outputs"),
            token_ids=prompt,
            positions=resolve_positions(body.positions, len(prompt)),
            output=output,
            caller=served.caller,
            deadline=deadline,
            interventions=interventions,
        )
        for prompt, interventions in zip(prompts, changes, strict=True)
    ]


def _logits(
    stage: str, processing: Processing | None, columns: tuple[int, ...] | None = None
) -> Logits:
    """Raw logits, or what the steps of the sampler make of them."""
    if stage == "raw":
        return Logits(columns=columns)
    fields = processing or Processing()
    allowed = fields.allowed_token_ids
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
        logit_bias=_logit_bias(fields.logit_bias),
        allowed_token_ids=None if allowed is None else tuple(allowed),
    )
    return Logits(columns=columns, processing=params, completion_start=fields.completion_start)


# Probabilities and scores


@dataclass(frozen=True, slots=True)
class ResolvedProbs:
    """What /probs asks the engine for, and what it lists of the answers.

    outputs    the logits of each prompt's last position
    scores     for the perplexity of each prompt, where that is asked for
    token_ids  ids to list; None: the `top_k` likeliest
    """

    outputs: list[OutputsRequest]
    scores: list[ScoreRequest]
    token_ids: list[int] | None
    top_k: int


async def resolve_probs(
    body: tensors.ProbsRequest, served: Served, request: Request
) -> ResolvedProbs:
    """The engine's requests of a body, and the tokens that it names."""
    vocab_size = served.checkpoint.config.vocab_size
    check_count("top_k", body.top_k, vocab_size)
    check_token_ids("token_ids", body.token_ids or (), vocab_size)
    deadline = deadline_of(body.timeout, served)
    output = _logits(body.stage, body.processing)
    with served.admission.hold(len(body.prompts), "prompt", served.caller):
        prompts = await encode_all(body.prompts, "prompt", served)
    changes = await resolve_interventions(
        body.interventions, prompts, served, request, deadline=deadline
    )
    token_ids, top_k = body.token_ids, body.top_k or DEFAULT_PROBS
    if body.tokens is not None:
        token_ids = [
            single_token(text, served.checkpoint.tokenizer, "tokens") for text in body.tokens
        ]
    listed = top_k if token_ids is None else len(token_ids)
    param = "top_k" if token_ids is None else "token_ids"
    served.reply_budget.check_logprobs(listed * len(prompts), param)
    return ResolvedProbs(
        outputs=[
            OutputsRequest(
                request_id=new_id("outputs"),
                token_ids=prompt,
                positions=resolve_positions("last", len(prompt)),
                output=output,
                caller=served.caller,
                deadline=deadline,
                interventions=interventions,
            )
            for prompt, interventions in zip(prompts, changes, strict=True)
        ],
        scores=[
            ScoreRequest(
                request_id=new_id("score"),
                token_ids=prompt,
                caller=served.caller,
                deadline=deadline,
                interventions=interventions,
            )
            for prompt, interventions in zip(prompts, changes, strict=True)
            if body.perplexity
        ],
        token_ids=token_ids,
        top_k=top_k,
    )


def single_token(text: str, tokenizer: Tokenizer, param: str) -> int:
    """The id of a text that is one token, or the name of a special one; `param` is its field."""
    if text in tokenizer.special_tokens:
        return tokenizer.special_tokens[text]
    ids = encode_text(text, tokenizer, param)
    if len(ids) != 1:
        raise bad_request(
            f"{clip(text)!r} is {len(ids)} tokens ({clip(str(ids))}); {param} takes single ones",
            param,
        )
    return ids[0]


async def resolve_score(
    body: tensors.ScoreRequest, served: Served, request: Request
) -> list[ScoreRequest]:
    """One engine request per prompt, each with all continuations."""
    deadline = deadline_of(body.timeout, served)
    texts = body.continuations or []
    per_prompt = max(1, len(texts))
    param = "prompt" if per_prompt == 1 else "continuations"
    with served.admission.hold(len(body.prompts) * per_prompt, param, served.caller):
        prompts = await encode_all(body.prompts, "prompt", served)
        continuations = tuple(await encode_all(texts, "continuations", served))
    changes = await resolve_interventions(
        body.interventions, prompts, served, request, deadline=deadline, generates=bool(texts)
    )
    # One more than asked for, so that it is known whether a token was the likeliest.
    top = max(1, body.logprobs or 0)
    scored = [sum(map(len, continuations)) or len(prompt) for prompt in prompts]
    served.reply_budget.check_logprobs(sum(scored) * (1 + top), "logprobs")
    return [
        ScoreRequest(
            request_id=new_id("score"),
            token_ids=prompt,
            continuations=continuations,
            top=top,
            caller=served.caller,
            deadline=deadline,
            interventions=interventions,
        )
        for prompt, interventions in zip(prompts, changes, strict=True)
    ]
