"""Price: how many numbers the rows of a request are.

A row is what is computed at one position for somebody to look at: logits of the whole vocabulary,
states of some layers, weights of some heads. The scheduler books rows by this price, step by step,
and whoever queues requests all of a request's at once. Pure functions of a request and the model's
shape. What a prompt costs besides its rows is counted in tokens, what is generated in sequences:
neither is here.
"""

from model.inference.engine.requests import (
    AttentionWeights,
    GenerationRequest,
    HiddenStates,
    Logits,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from model.transformer.config import GPTConfig


def row_width(request: OutputsRequest, config: GPTConfig) -> int:
    """Numbers computed for a request's row at one position; columns chosen of logits are cut out
    of a whole row."""
    match request.output:
        case Logits():
            return config.vocab_size
        case HiddenStates(layers=layers):
            return len(layers) * config.d_model
        case AttentionWeights(layers=layers, heads=heads):
            return len(layers) * len(heads) * len(request.token_ids)


def row_numbers(request: Request, config: GPTConfig) -> int:
    """Numbers of all rows that a request hands out, or scores tokens by; generation as such has
    none."""
    match request:
        case OutputsRequest(positions=positions):
            return len(positions) * row_width(request, config)
        case GenerationRequest(prompt_logprobs=None):
            return 0
        case ScoreRequest(continuations=continuations) if continuations:
            scored = sum(map(len, continuations))
        case _:  # the prompt itself, whose first token nothing predicts
            scored = len(request.token_ids) - 1
    return scored * config.vocab_size
