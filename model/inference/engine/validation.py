"""Validation: checks each request against the model's shape once, before it is queued.

Checks the context length, token ids, counts, and the work of interventions in one step. Every
error is an `InvalidRequest` with the field, the numbers and the fix. `Engine.add` calls
`check_request`; callers of `Engine.accept` call it themselves, in their own thread. The other
checks are for callers that have only a part of a request.

Some checks are made elsewhere and not repeated here: of positions, layers, heads and stages when
they are resolved (`model/inference/selection.py`), of the bounds of sampling parameters
(`model/inference/sampling/params.py`) and of other fields (`model/operations/`), and of the limits
of the queue (admission).
"""

from collections import Counter
from collections.abc import Collection, Sequence

from logitd.model.inference.attribution.task import AttributionTask
from logitd.model.inference.circuit.task import CircuitTask
from logitd.model.inference.engine.cost import MOST_CHANGED, step_cost
from logitd.model.inference.engine.requests import (
    LARGEST_LENS_VOCABULARY,
    AttributionRequest,
    GenerationRequest,
    Lens,
    Logits,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from logitd.model.inference.interventions import PARAM, check_interventions
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.plural import pluralize
from logitd.model.transformer.config import ModelConfig
from logitd.model.transformer.size import parameter_count
from logitd.model.transformer.stages import match_stages


def check_requests(requests: Sequence[Request], config: ModelConfig) -> None:
    """Check several requests. Lists of ids that they share are checked once, because a list may
    name the whole vocabulary."""
    checked = set[int]()
    for request in requests:
        check_request(request, config, checked)


def check_request(request: Request, config: ModelConfig, checked: set[int] | None = None) -> None:
    """Raise InvalidRequest, with the request's id, if a model of this shape cannot compute the
    request. `checked` has the `id` of each list that needs no check; checked lists are added."""
    try:
        _check(request, config, set() if checked is None else checked)
    except InvalidRequest as error:
        error.request_id = request.request_id
        raise


def _check(request: Request, config: ModelConfig, checked: set[int]) -> None:
    if not request.token_ids:
        raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
    check_token_ids("prompt", request.token_ids, config.vocab_size)
    check_interventions(request.interventions, config, len(request.token_ids))
    _check_changes(request, config)
    match request:
        case GenerationRequest():
            _check_generation(request, config, checked)
        case OutputsRequest():
            _check_outputs(request, config, checked)
        case ScoreRequest():
            _check_scores(request, config)
        case AttributionRequest(task=AttributionTask() as task):
            _check_attribution(task, len(request.token_ids), config)
        case AttributionRequest(task=CircuitTask() as circuit):
            _check_target(circuit, len(request.token_ids), config)


def check_generation_fits(length: int, max_tokens: int, context_length: int) -> None:
    """Raise ContextLengthExceeded unless a prompt of `length` tokens and `max_tokens` more fit into
    the context."""
    if not max_tokens:
        check_prompt_fits(length, context_length)
    elif length >= context_length:
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens; the model's context is {context_length} and at least "
            "one token must be left for the completion. Shorten the prompt by "
            f"{pluralize(length - context_length + 1, 'token')}",
            "prompt",
        )
    elif (excess := length + max_tokens - context_length) > 0:
        enough = excess < length
        fix = f"Shorten the prompt by {pluralize(excess, 'token')} or lower" if enough else "Lower"
        raise ContextLengthExceeded(
            f"the prompt has {pluralize(length, 'token')} and max_tokens is {max_tokens}: together "
            f"{length + max_tokens}, but the model's context is {context_length}. {fix} max_tokens "
            f"to {max_tokens - excess}",
            "prompt" if enough else "max_tokens",
        )


def check_prompt_fits(length: int, context_length: int, *, continued: bool = False) -> None:
    """Raise ContextLengthExceeded unless a prompt fits into the context. `continued`: the length
    includes a continuation."""
    if length > context_length:
        subject = "a prompt with its continuation has" if continued else "the prompt has"
        raise ContextLengthExceeded(
            f"{subject} {length} tokens; the model's context is {context_length}. Shorten it by "
            f"{pluralize(length - context_length, 'token')}",
            "continuations" if continued else "prompt",
        )


def check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise InvalidRequest if an id is outside the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return  # fast for long lists
    outside = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise InvalidRequest(
        f"token id {outside} in {param} is outside the vocabulary of {vocab_size} ids "
        f"(0 to {vocab_size - 1})",
        param,
    )


def check_count(param: str, count: int | None, vocab_size: int, least: int = 0) -> None:
    """Raise InvalidRequest if a number of ids (top_k, logprobs) is below `least` or exceeds the
    vocabulary's size."""
    if count is not None and not least <= count <= vocab_size:
        limits = f"{least} to {vocab_size}, the size of the vocabulary"
        raise InvalidRequest(f"{param} is {count}; it must be from {limits}", param)


def _check_changes(request: Request, config: ModelConfig) -> None:
    """Raise InvalidRequest if the interventions would make a single step too long."""
    count, changed = len(request.interventions), step_cost(request, config).changed
    if changed > (most := max(MOST_CHANGED, parameter_count(config))):
        raise InvalidRequest(
            f"{pluralize(count, 'intervention')}, one for each chosen layer, would cost {changed} "
            f"elements in one step, but the limit is {most}. Send fewer interventions, or "
            "choose fewer layers, heads or directions",
            PARAM,
        )


def _check_generation(request: GenerationRequest, config: ModelConfig, checked: set[int]) -> None:
    params = request.params
    check_generation_fits(len(request.token_ids), params.max_tokens, config.context_length)
    if params.seed < 0:
        raise InvalidRequest(f"seed is {params.seed}; it must be from 0 to 2^64 - 1", "seed")
    _check_params(params, config, checked)
    check_count("logprobs", params.logprobs, config.vocab_size)
    check_count("prompt_logprobs", request.prompt_logprobs, config.vocab_size)


def _check_params(params: SamplingParams, config: ModelConfig, checked: set[int]) -> None:
    allowed = params.allowed_token_ids or ()
    check_token_ids("logit_bias", params.logit_bias, config.vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, config.vocab_size)
    if id(allowed) not in checked:
        check_token_ids("allowed_token_ids", allowed, config.vocab_size)
        _check_distinct(allowed, config.vocab_size)
        checked.add(id(allowed))
    if params.constraint is not None and params.constraint.vocab_size != config.vocab_size:
        raise InvalidRequest(
            f"the constraint is for a vocabulary of {params.constraint.vocab_size} ids, but the "
            f"model has {config.vocab_size}",
            params.constraint.kind,
        )
    if params.min_tokens and len(params.stop_token_ids) == config.vocab_size:
        raise InvalidRequest(
            f"stop_token_ids holds all {config.vocab_size} ids, so min_tokens leaves no token to "
            "sample: remove one of the two",
            "min_tokens",
        )


def _check_distinct(allowed: Sequence[int], vocab_size: int) -> None:
    if len(set(allowed)) < len(allowed):
        twice = next(token_id for token_id, count in Counter(allowed).items() if count > 1)
        raise InvalidRequest(
            f"allowed_token_ids has {len(allowed)} ids and names {twice} more than once; name each "
            f"id once (the vocabulary has {vocab_size})",
            "allowed_token_ids",
        )


def _check_outputs(request: OutputsRequest, config: ModelConfig, checked: set[int]) -> None:
    length = len(request.token_ids)
    check_prompt_fits(length, config.context_length)
    match request.output:
        case Logits(columns=columns, processing=processing, completion_start=start):
            if start is not None and start > length:
                raise InvalidRequest(
                    f"completion_start is {start}, but must be at most {length}, the number of "
                    "tokens in the prompt",
                    "processing",
                )
            if columns is not None and id(columns) not in checked:
                check_token_ids("token_ids", columns, config.vocab_size)
                checked.add(id(columns))
            if processing is not None:
                _check_params(processing, config, checked)
        case Lens() as lens:
            _check_lens(lens, config)


def _check_scores(request: ScoreRequest, config: ModelConfig) -> None:
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


def _check_lens(lens: Lens, config: ModelConfig) -> None:
    check_count("top_k", lens.top_k, config.vocab_size, least=1)
    check_token_ids("token_ids", lens.token_ids, config.vocab_size)
    if config.vocab_size > LARGEST_LENS_VOCABULARY:
        raise InvalidRequest(
            f"the vocabulary has {config.vocab_size} ids; a lens supports "
            f"{LARGEST_LENS_VOCABULARY} at most",
            "prompt",
        )


def _check_attribution(task: AttributionTask, length: int, config: ModelConfig) -> None:
    _check_target(task, length, config)
    if task.baseline is not None:
        check_token_ids("baseline", (task.baseline,), config.vocab_size)
    _check_gradients(task, length, config)


def _check_target(task: AttributionTask | CircuitTask, length: int, config: ModelConfig) -> None:
    """Check the length of the prompt and the compared tokens of a task."""
    check_prompt_fits(length, config.context_length)
    for param in ("token_id", "minus_id"):
        token_id = getattr(task, param)
        check_token_ids(param, () if token_id is None else (token_id,), config.vocab_size)
    if task.token_id is not None and task.token_id == task.minus_id:
        raise InvalidRequest(
            f"token and minus are both {task.token_id}: their difference is 0", "minus"
        )


def _check_gradients(task: AttributionTask, length: int, config: ModelConfig) -> None:
    """Check the stages whose gradients are requested, and the probe."""
    probe = task.probe
    stages = match_stages(task.stages, config) if task.stages else ()
    probed = match_stages([probe.stage], config) if probe is not None else ()
    for stage in (*stages, *probed):
        if stage.has_features:
            raise InvalidRequest(
                f"gradients of an autoencoder's features, {stage.name}, are not supported: name "
                f"the stage that the autoencoder reads, {stage.name.partition('.sae.')[0]}",
                "stages" if stage in stages else "direction",
            )
    if "logits" in task.stages:
        raise InvalidRequest(
            "the logits are the target, so their gradients are 1 and -1; name an earlier stage",
            "stages",
        )
    if probe is None:
        return
    if probe.stage == "logits":
        raise InvalidRequest(
            "direction.stage is 'logits'; name an earlier stage, or leave direction out and choose "
            "logits with token and minus",
            "direction",
        )
    if not {"gradient_times_input"}.issuperset(task.methods):
        raise InvalidRequest(
            f"methods is {list(task.methods)}; with a direction only gradient_times_input is "
            "possible",
            "methods",
        )
    (stage,) = probed
    if (shape := stage.shape(config, length)) != probe.direction.shape:
        raise InvalidRequest(
            f"direction.values have the shape {list(probe.direction.shape)}; {stage.name} has "
            f"{list(shape)} at each position",
            "direction",
        )
