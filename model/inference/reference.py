"""Reference: generates tokens directly from the definitions, as the oracle for the engine's tests.

It computes one sequence at a time without a cache: for every new token, it runs a plain forward
pass over all tokens. It samples on Python lists. It shares only the random numbers with the
engine (`model/inference/sampling/philox.py`).
"""

import math
from collections.abc import Sequence

import torch

from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.philox import uniform
from logitd.model.transformer.gpt import GPT


@torch.inference_mode()
def generate(gpt: GPT, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> list[int]:
    """Token ids of the completion, including a stop token."""
    tokens = list(prompt)
    matcher = params.constraint.matcher() if params.constraint else None
    device = gpt.token_embedding.weight.device
    while len(tokens) - len(prompt) < params.max_tokens:
        logits = gpt(torch.tensor([tokens], device=device)).logits[0, -1]
        allowed = matcher.allowed().tolist() if matcher else None
        if matcher and matcher.complete:
            break
        row = logits.float().tolist()
        token_id = sample_row(row, tokens, len(prompt), params, index, allowed)
        tokens.append(token_id)
        if token_id in params.stop_token_ids:
            break
        if matcher:
            matcher.advance(token_id)
            if matcher.complete:
                break
    return tokens[len(prompt) :]


def sample_row(
    logits: Sequence[float],
    tokens: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
    index: int = 0,
    allowed: Sequence[bool] | None = None,
) -> int:
    """The next token of one sequence. Steps are numbered as in `sampling/sampler.py`."""
    row = processed_row(logits, tokens, prompt_length, params, allowed)
    if params.temperature == 0:
        return max(range(len(row)), key=lambda i: (row[i], -i))
    probs = _softmax(row)
    threshold = uniform(params.seed, len(tokens), index) * sum(probs)
    mass = 0.0
    for token_id, prob in enumerate(probs):
        mass += prob
        if mass > threshold:
            return token_id
    return max(i for i, prob in enumerate(probs) if prob > 0)


def processed_row(
    logits: Sequence[float],
    tokens: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
    allowed: Sequence[bool] | None = None,
) -> list[float]:
    """The logits to sample from: after steps 1 to 10, or after steps 1 to 6 at temperature 0."""
    row = penalized(logits, tokens, prompt_length, params, allowed)
    return filtered(row, params) if params.temperature else row


def penalized(
    logits: Sequence[float],
    tokens: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
    allowed: Sequence[bool] | None = None,
) -> list[float]:
    """The logits after steps 1 to 6. `allowed` is the mask of a constraint."""
    row = list(logits)
    completion = tokens[prompt_length:]
    for token_id, bias in params.logit_bias.items():
        row[token_id] += bias
    if params.allowed_token_ids is not None:
        row = [x if i in params.allowed_token_ids else -math.inf for i, x in enumerate(row)]
    if allowed is not None:
        row = [x if may else -math.inf for x, may in zip(row, allowed, strict=True)]
    if len(completion) < params.min_tokens:
        for token_id in params.stop_token_ids:
            row[token_id] = -math.inf
    for token_id in set(tokens):
        factor = params.repetition_penalty
        row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
    for token_id in set(completion):
        row[token_id] -= (
            params.frequency_penalty * list(completion).count(token_id) + params.presence_penalty
        )
    return row


def filtered(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The logits after steps 7 to 10."""
    row = [x / max(params.temperature, 1e-5) for x in logits]
    if 0 < params.top_k < len(row):
        kth = sorted(row, reverse=True)[params.top_k - 1]
        row = [x if x >= kth else -math.inf for x in row]
    if params.top_p < 1:
        probs = _softmax(row)
        mass = 0.0
        for token_id in sorted(range(len(row)), key=lambda i: (-row[i], i)):
            if mass >= params.top_p:
                row[token_id] = -math.inf
            mass += probs[token_id]
    if params.min_p > 0:
        probs = _softmax(row)
        floor = params.min_p * max(probs)
        row = [x if prob >= floor else -math.inf for x, prob in zip(row, probs, strict=True)]
    return row


def _softmax(row: Sequence[float]) -> list[float]:
    largest = max(row)
    weights = [math.exp(x - largest) for x in row]
    total = sum(weights)
    return [weight / total for weight in weights]
