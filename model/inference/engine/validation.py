"""Refusals: what this model cannot compute, said before anything is queued, with the numbers.

`check_request` is called by whoever queues a request and by the engine itself. What is wrong with
sampling parameters as such, whatever the model, they say themselves
(`model/inference/sampling/params.py`).
"""

from collections.abc import Iterable

from model.inference.engine.requests import (
    AttentionWeights,
    GenerationRequest,
    HiddenStates,
    Logits,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from model.inference.errors import InvalidRequest
from model.inference.sampling.params import SamplingParams
from model.transformer.config import GPTConfig


def check_request(request: Request, config: GPTConfig) -> None:
    """Raise InvalidRequest for what a model of this shape cannot compute."""
    if not request.token_ids:
        raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
    _check_ids("prompt", request.token_ids, config.vocab_size)
    match request:
        case GenerationRequest():
            _check_generation(request, config)
        case OutputsRequest():
            _check_rows(request, config)
        case ScoreRequest():
            _check_scores(request, config)


def _check_generation(request: GenerationRequest, config: GPTConfig) -> None:
    length, params = len(request.token_ids), request.params
    if length + params.max_tokens > config.context_length:
        raise InvalidRequest(
            f"the prompt has {length} tokens and max_tokens is {params.max_tokens}: together "
            f"{length + params.max_tokens}, the model's context is {config.context_length}. "
            "Shorten the prompt or lower max_tokens",
            "max_tokens",
        )
    if request.n < 1:
        raise InvalidRequest(f"n is {request.n}; it must be at least 1", "n")
    _check_params(params, config)
    _check_count("logprobs", params.logprobs, config)
    _check_count("prompt_logprobs", request.prompt_logprobs, config)


def _check_params(params: SamplingParams, config: GPTConfig) -> None:
    _check_ids("logit_bias", params.logit_bias, config.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), config.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, config.vocab_size)
    if params.constraint is not None and params.constraint.vocab_size != config.vocab_size:
        raise InvalidRequest(
            f"the constraint is for a vocabulary of {params.constraint.vocab_size} ids, the model "
            f"has {config.vocab_size}",
            params.constraint.kind,
        )
    if params.min_tokens and len(params.stop_token_ids) == config.vocab_size:
        raise InvalidRequest(
            f"stop_token_ids holds all {config.vocab_size} ids, which min_tokens forbids",
            "min_tokens",
        )


def _check_rows(request: OutputsRequest, config: GPTConfig) -> None:
    length = len(request.token_ids)
    _check_fits(length, config)
    _check_places("positions", request.positions, length, f"the prompt has {length} tokens")
    match request.output:
        case Logits(columns=columns, processing=processing):
            if columns is not None:
                if not columns:
                    raise InvalidRequest("token_ids is empty; no column is chosen", "token_ids")
                _check_ids("token_ids", columns, config.vocab_size)
            if processing is not None:
                _check_params(processing, config)
        case HiddenStates(layers=layers):
            states = config.n_layer + 1
            _check_places("layers", layers, states, f"there are {states} hidden states")
        case AttentionWeights(layers=layers, heads=heads):
            _check_places("layers", layers, config.n_layer, f"there are {config.n_layer} layers")
            _check_places("heads", heads, config.n_head, f"there are {config.n_head} heads")


def _check_scores(request: ScoreRequest, config: GPTConfig) -> None:
    for continuation in request.continuations:
        if not continuation:
            raise InvalidRequest("a continuation is empty; nothing can be scored", "continuations")
        _check_ids("continuations", continuation, config.vocab_size)
    longest = max(map(len, request.continuations), default=0)
    _check_fits(len(request.token_ids) + longest, config)
    _check_count("top", request.top, config)


def _check_fits(length: int, config: GPTConfig) -> None:
    if length > config.context_length:
        raise InvalidRequest(
            f"the prompt has {length} tokens; the model's context is {config.context_length}. "
            "Shorten the prompt",
            "prompt",
        )


def _check_count(param: str, count: int | None, config: GPTConfig) -> None:
    if count is not None and not 0 <= count <= config.vocab_size:
        raise InvalidRequest(
            f"{param} is {count}; the vocabulary has {config.vocab_size} ids", param
        )


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {token_id} in {param} is outside the vocabulary of {vocab_size} ids "
                f"(0 to {vocab_size - 1})",
                param,
            )


def _check_places(param: str, chosen: tuple[int, ...], count: int, what: str) -> None:
    """Chosen indices are ascending, distinct, some, and within [0, count)."""
    if not chosen or list(chosen) != sorted(set(chosen)):
        raise InvalidRequest(f"{param} must be ascending, distinct and at least one", param)
    if chosen[0] < 0 or chosen[-1] >= count:
        raise InvalidRequest(
            f"{param} run from {chosen[0]} to {chosen[-1]}; {what}, {param} 0 to {count - 1}", param
        )
