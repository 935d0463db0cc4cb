"""Cost of a request: in memory, in one step, and in total.

Memory is counted in elements of outputs, the numbers computed at each requested position: logits of
the whole vocabulary, hidden states, attention weights or values of named stages. A digest of logits
counts as the logits that it is computed from. Admission limits the elements of all requests.

The work of a step is also counted in elements (`StepCost`): the elements of outputs, and the
elements that interventions change. The scheduler limits their number.

The price of a whole request is counted in tokens (`prices`): the length of a plain prompt that
takes as long to compute. An attribution costs its tokens times its passes over them. The costs of
interventions and of processed logits are added at the rates below. Admission limits the price of
one request and the total price of all waiting requests.

All functions are pure functions of a request and the model's shape.
"""

import math
from dataclasses import dataclass
from typing import Any

from logitd.model.inference.attribution.task import AttributionTask, kept_elements
from logitd.model.inference.circuit.task import CircuitTask, circuit_elements
from logitd.model.inference.engine.requests import (
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
    is_tapped,
    sequence_lengths,
)
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.sampling.lens import lens_width
from logitd.model.inference.selection import gpt_only
from logitd.model.owner_code.config import CodeConfig
from logitd.model.transformer.config import BLOCK, ModelConfig
from logitd.model.transformer.features import GPTWithFeatures
from logitd.model.transformer.size import count_elements
from logitd.model.transformer.stages import match_stages, stages_of

# Rates measured on a CPU with the bundled checkpoint. An element takes about 1 ns.
CHANGE_ELEMENTS = 2**14
"""Fixed cost of one change to one stage, in elements."""
PART_ELEMENTS = 2**2
"""Cost, in elements, of each chosen unit of a stage and of each component of a direction."""
PROCESSED_ELEMENTS = 2**6
"""Cost of each logit that the sampler filters, in elements."""
LISTED_ELEMENTS = 2**7
"""Cost of each listed logprob of a prompt, in elements."""
PRODUCTS_PER_ELEMENT = 2**5
"""Number of multiplications in a matrix product that take as long as computing one element."""
TAPPED_PASSES = 2
"""Time of a tapped pass, not counting its changes, as a multiple of the time of a plain pass."""
TAPPED_TOKEN = 12
"""Price of one token generated with interventions, in prompt tokens."""
SHORTEST_PASS = 128
"""Lowest price of one pass of an attribution, in prompt tokens."""
MOST_CHANGED = 2**27
"""Limit of the elements that a request's interventions cost in one block of positions, and in one
generated row. A model with more parameters allows one element for each, which takes about as long
as its pass. A step computes at least that much, so the limit bounds its time. Outputs and
features need no limit, because the model's shape already bounds their number in a block."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The work, in elements, that one position of a sequence adds to a step, not counting the
    model's pass.

    output    work for the outputs of a requested position
    position  work for interventions and listed logprobs at a position of the prompt, on average
    row       work for interventions at a generated position
    changed   upper bound of the work for interventions in a block of positions, and in a row
    """

    output: int = 0
    position: int = 0
    row: int = 0
    changed: int = 0


def step_cost(request: Request, config: ModelConfig) -> StepCost:
    """The cost of each position of a request in a step."""
    output = 0
    if isinstance(request, OutputsRequest):
        each = PROCESSED_ELEMENTS if _is_processed(request) else 1
        output = position_elements(request, config) * each
    length = max(sequence_lengths(request)) + _generated(request)
    recorded, row = _encodings(request, config)
    position = float(LISTED_ELEMENTS * _listed(request) + recorded)
    changed_row = changed_block = 0
    for change in request.interventions:
        width, changed = _width(change, config, length), change.positions
        fixed = CHANGE_ELEMENTS * (1 + 2 * len(change.directions))
        if changed in ("all", "generated"):
            changed_row += width + fixed
        everywhere = width + fixed / BLOCK
        if changed in ("all", "prompt"):
            position += everywhere
            changed_block += BLOCK * width + fixed
        elif changed != "generated":  # listed positions, averaged over the prompt
            position += min(everywhere, len(changed) * (width + fixed) / length)
            changed_block += min(BLOCK, len(changed)) * width + fixed
    changed_most = max(changed_row, changed_block)
    return StepCost(output, math.ceil(position), row + changed_row, changed_most)


def prices(request: Request, config: ModelConfig) -> list[int]:
    """The price of each sequence of a request: the length of a plain prompt that takes the same
    time."""
    if isinstance(request, AttributionRequest):
        return [max(SHORTEST_PASS, request.task.position + 1) * request.task.passes]
    lengths, tapped = sequence_lengths(request), is_tapped(request)
    if not (tapped or _is_processed(request) or _listed(request)):
        return lengths
    cost, passes = step_cost(request, config), TAPPED_PASSES if tapped else 1
    rows = len(request.positions) if isinstance(request, OutputsRequest) else 0
    token = _products(config) / PRODUCTS_PER_ELEMENT  # elements of one token
    outputs = rows * cost.output / token
    generated = _generated(request) * (TAPPED_TOKEN + cost.row / token) if tapped else 0
    return [
        math.ceil(length * (passes + cost.position / token) + outputs + generated)
        for length in lengths
    ]


def _products(config: ModelConfig) -> int:
    """Number of multiplications for one token, not counting the head. If the owner's code computes
    the model, this is the number of parameters, which is an upper bound."""
    if isinstance(config, CodeConfig):
        return max(1, config.parameters)
    return count_elements(config).block_matrices


def _encodings(request: Request, config: ModelConfig) -> tuple[int, int]:
    """Cost, in elements, of computing the autoencoder features at one position of the prompt, and
    at one generated position."""
    if not isinstance(config, GPTWithFeatures):
        return 0, 0
    each = {
        features.key: 2 * features.count * features.width // PRODUCTS_PER_ELEMENT
        for features in config.features
    }
    names = [change.stage for change in request.interventions]
    recorded = names
    if isinstance(request, OutputsRequest) and isinstance(request.output, Activations):
        recorded = [*names, *request.output.stages]
    prompt, generated = (
        sum(each.get(stage.key, 0) for stage in match_stages(stages, config)) if stages else 0
        for stages in (recorded, names)
    )
    return prompt, generated


def _listed(request: Request) -> int:
    """Number of most likely tokens listed at each position of a prompt."""
    match request:
        case ScoreRequest(top=top) | GenerationRequest(prompt_logprobs=int(top)):
            return top
        case _:
            return 0


def _is_processed(request: Request) -> bool:
    output = request.output if isinstance(request, OutputsRequest) else None
    return isinstance(output, Logits) and output.processing is not None


def _generated(request: Request) -> int:
    return request.params.max_tokens if isinstance(request, GenerationRequest) else 0


def _width(change: Intervention, config: ModelConfig, length: int) -> int:
    """Cost, in elements, of applying a change at one position, without the fixed cost."""
    (stage,) = match_stages([change.stage], config)
    shape = stage.shape(config, length)
    whole = math.prod(shape if change.heads is None else (len(change.heads), *shape[1:]))
    chosen = whole
    if change.units is not None:
        chosen = PART_ELEMENTS * (whole // shape[-1]) * len(change.units)
    return chosen + PART_ELEMENTS * whole * len(change.directions)


def position_elements(request: OutputsRequest, config: ModelConfig) -> int:
    """Number of elements computed at one position. Logits count in full, even if only some columns
    are returned."""
    match request.output:
        case Logits(columns=columns):  # an id may occur several times
            return max(config.vocab_size, len(columns or ()))
        case HiddenStates(layers=layers):
            return len(layers) * gpt_only(config, "hidden states").d_model
        case AttentionWeights(layers=layers, heads=heads):
            return len(layers) * len(heads) * len(request.token_ids)
        case Lens(layers=layers, top_k=top_k, named=named):
            # Logits of each layer and of the last one, plus the figures computed from them.
            distributions = {*layers, config.n_layer}
            figures = len(layers) * lens_width(top_k, named)
            return len(distributions) * config.vocab_size + figures
        case Activations() as asked:
            shapes = activation_shapes(asked, config, len(request.token_ids))
            return sum(map(math.prod, shapes))


def activation_shapes(
    asked: Activations, config: ModelConfig, length: int
) -> list[tuple[int, ...]]:
    """Shapes of each stage's values at one position of a prompt of `length` tokens."""
    by_name = {stage.name: stage for stage in stages_of(config)}
    stages = [by_name[name] for name in asked.stages]
    shapes = [stage.shape(config, length) for stage in stages]
    if asked.heads is None:
        return shapes
    return [
        (len(asked.heads), *shape[1:]) if stage.heads_axis else shape
        for stage, shape in zip(stages, shapes, strict=True)
    ]


def split_activations(
    rows: Any, asked: Activations, config: ModelConfig, length: int
) -> dict[str, Any]:
    """Split the rows (P, elements) of a request into views (P, ...) by stage name."""
    values, start = {}, 0
    for name, shape in zip(asked.stages, activation_shapes(asked, config, length), strict=True):
        end = start + math.prod(shape)
        values[name] = rows[:, start:end].reshape(len(rows), *shape)
        start = end
    return values


def output_elements(request: Request, config: ModelConfig) -> int:
    """Elements of memory that a request needs: returned values, logits for scores, tensors kept for
    gradients, and the arrays of its interventions. 0 for plain generation."""
    brought = sum(change.elements for change in request.interventions)
    return brought + _computed_elements(request, config)


def _computed_elements(request: Request, config: ModelConfig) -> int:
    match request:
        case OutputsRequest(positions=positions):
            return len(positions) * position_elements(request, config)
        case GenerationRequest(prompt_logprobs=None):
            return 0
        case AttributionRequest(task=AttributionTask() as task):
            return kept_elements(task, gpt_only(config, "attributions"))
        case AttributionRequest(task=CircuitTask() as circuit):
            return circuit_elements(circuit, gpt_only(config, "circuits"))
        case ScoreRequest(continuations=continuations) if continuations:
            scored = sum(map(len, continuations))
        case _:  # the prompt without its first token
            scored = len(request.token_ids) - 1
    return scored * config.vocab_size
