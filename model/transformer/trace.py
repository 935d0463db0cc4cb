"""Trace: the shape and size of everything a forward pass computes, in the order it is computed.

For people who want to see what happens between a text and its logits. Keeps figures about the
tensors, not the tensors; for those, use `GPT.forward` or the HTTP endpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.transformer.attention import RecordingAttend
from model.transformer.gpt import GPT


@dataclass(frozen=True, slots=True)
class Stage:
    """One tensor of the forward pass. Axes: B sequences, T positions, V = vocab_size."""

    name: str
    shape: tuple[int, ...]
    axes: str
    mean: float
    std: float


@torch.inference_mode()
def trace(gpt: GPT, token_ids: Sequence[int]) -> list[Stage]:
    """Every stage of a forward over one text."""
    ids = torch.tensor([token_ids], device=gpt.token_embedding.weight.device)  # (1, T)
    positions = torch.arange(len(token_ids), device=ids.device)[None]
    attend, states = RecordingAttend(), list[Tensor]()
    final = gpt.transform(ids, positions, attend, states)
    stages = [_stage("embedding", states[0], "B, T, d_model")]
    for layer in range(gpt.config.n_layer):
        stages += [
            _stage(f"block {layer}: Q", attend.q[layer], "B, n_head, T, head_dim"),
            _stage(f"block {layer}: K", attend.k[layer], "B, n_kv_head, T, head_dim"),
            _stage(f"block {layer}: V", attend.v[layer], "B, n_kv_head, T, head_dim"),
            _stage(f"block {layer}: scores", attend.scores[layer], "B, n_head, T, T"),
            _stage(f"block {layer}: probs", attend.probs[layer], "B, n_head, T, T"),
            _stage(f"block {layer}: hidden state", states[layer + 1], "B, T, d_model"),
        ]
    if gpt.config.final_norm:
        stages.append(_stage("final norm", final, "B, T, d_model"))
    stages.append(_stage("lm_head: logits", gpt.logits(final), "B, T, V"))
    return stages


def _stage(name: str, tensor: Tensor, axes: str) -> Stage:
    values = tensor.float()
    return Stage(
        name, tuple(tensor.shape), axes, values.mean().item(), values.std(correction=0).item()
    )
