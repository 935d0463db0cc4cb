"""Validation: the one place where a request is checked against the model, before it is queued.

Covers the context length, token ids, counts of ids, and lists of positions, layers and heads. Every
error is an `InvalidRequest` that names the numbers, the field and the way out. `Engine.add` calls
`check_request`, or who gives requests to a thread of the engine calls it at once (`Engine.accept`);
the smaller checks are for callers that know a part of a request earlier. Not here: what indices and
patterns mean (`model/inference/selection.py`), bounds of sampling parameters that hold for every
model (`model/inference/sampling/params.py`), and how much may wait (admission).
"""

from collections import Counter
from collections.abc import Collection

from logitd.model.inference.attribution.task import METHODS, AttributionTask
from logitd.model.inference.engine.requests import (
    LARGEST_LENS_VOCABULARY,
    Activations,
    AttentionWeights,
    AttributionRequest,
    GenerationRequest,
    HiddenStates,
    Lens,
    Logits,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from logitd.model.inference.interventions import check_interventions
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.selection import resolve_heads, resolve_indices, resolve_stages
from logitd.model.transformer.config import GPTConfig


def check_request(request: Request, config: GPTConfig) -> None:
    """Raise InvalidRequest, with the request's id, for what a model of this shape cannot
    compute."""
    try:
        _check(request, config)
    except InvalidRequest as error:
        error.request_id = request.request_id
        raise


def _check(request: Request, config: GPTConfig) -> None:
    if not request.token_ids:
        raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
    check_token_ids("prompt", request.token_ids, config.vocab_size)
    check_interventions(request.interventions, config, len(request.token_ids))
    match request:
        case GenerationRequest():
            _check_generation(request, config)
        case OutputsRequest():
            _check_outputs(request, config)
        case ScoreRequest():
            _check_scores(request, config)
        case AttributionRequest(task=task):
            _check_attribution(task, len(request.token_ids), config)


def check_generation_fits(length: int, max_tokens: int, context_length: int) -> None:
    """Raise ContextLengthExceeded unless a prompt of `length` tokens and `max_tokens` after it fit
    into the context."""
    if not max_tokens:
        check_prompt_fits(length, context_length)
    elif length >= context_length:
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens; the model's context is {context_length} and at least "
            "one token must be left for the completion. Shorten the prompt by "
            f"{_tokens(length - context_length + 1)}",
            "prompt",
        )
    elif (excess := length + max_tokens - context_length) > 0:
        enough = excess < length
        way_out = f"Shorten the prompt by {_tokens(excess)} or lower" if enough else "Lower"
        raise ContextLengthExceeded(
            f"the prompt has {_tokens(length)} and max_tokens is {max_tokens}: together "
            f"{length + max_tokens}, the model's context is {context_length}. {way_out} max_tokens "
            f"to {max_tokens - excess}",
            "prompt" if enough else "max_tokens",
        )


def check_prompt_fits(length: int, context_length: int, *, continued: bool = False) -> None:
    """Raise ContextLengthExceeded unless `length` tokens, of a prompt or of one with its
    continuation, fit into the context."""
    if length > context_length:
        subject = "a prompt with its continuation has" if continued else "the prompt has"
        raise ContextLengthExceeded(
            f"{subject} {length} tokens; the model's context is {context_length}. Shorten it by "
            f"{_tokens(length - context_length)}",
            "continuations" if continued else "prompt",
        )


def check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise InvalidRequest for an id that the vocabulary does not have."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):  # fast: long lists
        return
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {token_id} in {param} is outside the vocabulary of {vocab_size} ids "
                f"(0 to {vocab_size - 1})",
                param,
            )


def _check_distinct(param: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InvalidRequest for ids that the vocabulary does not have, or that are named twice."""
    check_token_ids(param, token_ids, vocab_size)
    if len(set(token_ids)) < len(token_ids):
        twice = next(i for i, count in Counter(token_ids).items() if count > 1)
        raise InvalidRequest(
            f"{param} has {len(token_ids)} ids and names {twice} more than once; name each id once "
            f"(the vocabulary has {vocab_size})",
            param,
        )


def check_count(param: str, count: int | None, vocab_size: int) -> None:
    """Raise InvalidRequest for a count of ids (top_k, logprobs) that the vocabulary cannot give."""
    if count is not None and not 0 <= count <= vocab_size:
        raise InvalidRequest(f"{param} is {count}; the vocabulary has {vocab_size} ids", param)


def _check_generation(request: GenerationRequest, config: GPTConfig) -> None:
    params = request.params
    check_generation_fits(len(request.token_ids), params.max_tokens, config.context_length)
    if params.seed < 0:
        raise InvalidRequest(f"seed is {params.seed}; draw one from 0 to 2^64 - 1", "seed")
    if request.n < 1:
        raise InvalidRequest(f"n is {request.n}; it must be at least 1", "n")
    _check_params(params, config)
    check_count("logprobs", params.logprobs, config.vocab_size)
    check_count("prompt_logprobs", request.prompt_logprobs, config.vocab_size)


def _check_params(params: SamplingParams, config: GPTConfig) -> None:
    check_token_ids("logit_bias", params.logit_bias, config.vocab_size)
    if params.allowed_token_ids is not None:
        _check_distinct("allowed_token_ids", params.allowed_token_ids, config.vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, config.vocab_size)
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


def _check_outputs(request: OutputsRequest, config: GPTConfig) -> None:
    length = len(request.token_ids)
    check_prompt_fits(length, config.context_length)
    _check_indices("positions", request.positions, length, f"the prompt has {length} tokens")
    match request.output:
        case Logits(columns=columns, processing=processing):
            if columns is not None:
                if not columns:
                    raise InvalidRequest("token_ids is empty; choose at least one", "token_ids")
                check_token_ids("token_ids", columns, config.vocab_size)
            if processing is not None:
                _check_params(processing, config)
        case HiddenStates(layers=layers):
            states = config.n_layer + 1
            _check_indices("layers", layers, states, f"there are {states} hidden states")
        case AttentionWeights(layers=layers, heads=heads):
            _check_indices("layers", layers, config.n_layer, f"there are {config.n_layer} layers")
            _check_indices("heads", heads, config.n_head, f"there are {config.n_head} heads")
        case Lens() as lens:
            _check_lens(lens, config)
            if lens.following and request.positions[-1] == length - 1:
                raise InvalidRequest(
                    f"positions end with {length - 1}, the prompt's last token, and none follows "
                    "it: leave it out, or ask without the token that follows",
                    "positions",
                )
        case Activations(stages=stages, heads=heads):
            _check_activations(stages, heads, config)


def _check_scores(request: ScoreRequest, config: GPTConfig) -> None:
    length = len(request.token_ids)
    check_prompt_fits(length, config.context_length)
    for continuation in request.continuations:
        if not continuation:
            raise InvalidRequest(
                "a continuation is empty; give at least one token", "continuations"
            )
        check_token_ids("continuations", continuation, config.vocab_size)
        check_prompt_fits(length + len(continuation), config.context_length, continued=True)
    check_count("logprobs", request.top, config.vocab_size)


def _check_lens(lens: Lens, config: GPTConfig) -> None:
    states = config.n_layer + 1
    _check_indices("layers", lens.layers, states, f"there are {states} hidden states")
    if not 1 <= lens.top_k <= config.vocab_size:
        raise InvalidRequest(
            f"top_k is {lens.top_k}; the vocabulary has {config.vocab_size} ids", "top_k"
        )
    check_token_ids("token_ids", lens.token_ids, config.vocab_size)
    if config.vocab_size > LARGEST_LENS_VOCABULARY:
        raise InvalidRequest(
            f"the vocabulary has {config.vocab_size} ids; a lens tells {LARGEST_LENS_VOCABULARY} "
            "apart",
            "prompt",
        )


def _check_attribution(task: AttributionTask, length: int, config: GPTConfig) -> None:
    check_prompt_fits(length, config.context_length)
    _check_indices("position", (task.position,), length, f"the prompt has {length} tokens")
    for param, token_id in (
        ("token_id", task.token_id),
        ("minus_id", task.minus_id),
        ("baseline", task.baseline),
    ):
        check_token_ids(param, () if token_id is None else (token_id,), config.vocab_size)
    if task.token_id is not None and task.token_id == task.minus_id:
        raise InvalidRequest(
            f"token and minus are both {task.token_id}: their difference is 0", "minus"
        )
    if not task.methods or len(set(task.methods)) < len(task.methods):
        raise InvalidRequest(
            f"methods {list(task.methods[:20])} must be at least one of {list(METHODS)}, each at "
            "most once",
            "methods",
        )
    for method in task.methods:
        if method not in METHODS:
            raise InvalidRequest(
                f"the method {method!r} does not exist; there are {list(METHODS)}", "methods"
            )
    if task.steps < 1:
        raise InvalidRequest(f"steps is {task.steps}; it must be at least 1", "steps")


def _check_activations(
    names: tuple[str, ...], heads: tuple[int, ...] | None, config: GPTConfig
) -> None:
    stages = resolve_stages(names, config)
    if tuple(stage.name for stage in stages) != names:
        raise InvalidRequest(
            f"stages {list(names[:20])} must be names, each once, in the order of GET /stages",
            "stages",
        )
    if heads is not None and resolve_heads(heads, stages, config) != heads:
        raise InvalidRequest(f"heads {list(heads[:20])} must be counted from 0", "heads")


def _check_indices(param: str, indices: Collection[int], count: int, what: str) -> None:
    """Raise InvalidRequest unless indices are what `resolve_indices` gives."""
    for index in indices:
        if not 0 <= index < count:
            raise InvalidRequest(f"{param} has {index}; {what} (0 to {count - 1})", param)
    resolve_indices(param, tuple(indices), count, what)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
