"""Cost: how many elements the outputs of a request have, and how many tokens its prompts count as.

An output is what a client asks for at one position: logits of the whole vocabulary, hidden states
of some layers, attention weights of some heads, values of named stages; where what is handed out is
a digest of logits, those logits. The scheduler limits the elements of a step, admission those of
all requests. A prompt counts as its tokens, an attribution as its tokens times the passes over
them. Pure functions of a request and the model's shape. Not here: a generation's other cost,
counted in sequences.
"""

import math
from typing import Any

from logitd.model.inference.attribution.task import kept_elements
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
    sequence_lengths,
)
from logitd.model.inference.sampling.lens import lens_width
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import stages_of


def position_elements(request: OutputsRequest, config: GPTConfig) -> int:
    """Elements computed at one position. Chosen columns of logits are cut out of all of them."""
    match request.output:
        case Logits():
            return config.vocab_size
        case HiddenStates(layers=layers):
            return len(layers) * config.d_model
        case AttentionWeights(layers=layers, heads=heads):
            return len(layers) * len(heads) * len(request.token_ids)
        case Lens(layers=layers, top_k=top_k, named=named):
            # Each has logits of its own, and so has the last; what is said of them is added.
            distributions = {*layers, config.n_layer}
            figures = len(layers) * lens_width(top_k, named)
            return len(distributions) * config.vocab_size + figures
        case Activations() as asked:
            shapes = activation_shapes(asked, config, len(request.token_ids))
            return sum(map(math.prod, shapes))


def activation_shapes(asked: Activations, config: GPTConfig, length: int) -> list[tuple[int, ...]]:
    """Of what is handed out of each stage at one position of a prompt of `length` tokens."""
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
    rows: Any, asked: Activations, config: GPTConfig, length: int
) -> dict[str, Any]:
    """The rows (P, elements) of a request as an array (P, ...) of each stage; views of them."""
    values, start = {}, 0
    for name, shape in zip(asked.stages, activation_shapes(asked, config, length), strict=True):
        end = start + math.prod(shape)
        values[name] = rows[:, start:end].reshape(len(rows), *shape)
        start = end
    return values


def sequence_prices(request: Request) -> list[int]:
    """The tokens that each sequence of a request counts as: those of its prompt, or for an
    attribution those of its text as often as they go through the model."""
    match request:
        case AttributionRequest(task=task):
            return [(task.position + 1) * task.passes]
        case _:
            return sequence_lengths(request)


def output_elements(request: Request, config: GPTConfig) -> int:
    """Elements of everything that a request hands out, scores tokens by, keeps for gradients or
    brings along as values of its interventions; 0 for generation as such."""
    brought = [change.values.size for change in request.interventions if change.values is not None]
    return sum(brought) + _computed_elements(request, config)


def _computed_elements(request: Request, config: GPTConfig) -> int:
    match request:
        case OutputsRequest(positions=positions):
            return len(positions) * position_elements(request, config)
        case GenerationRequest(prompt_logprobs=None):
            return 0
        case AttributionRequest(task=task):
            return kept_elements(task, config)
        case ScoreRequest(continuations=continuations) if continuations:
            scored = sum(map(len, continuations))
        case _:  # the prompt itself, whose first token nothing predicts
            scored = len(request.token_ids) - 1
    return scored * config.vocab_size
