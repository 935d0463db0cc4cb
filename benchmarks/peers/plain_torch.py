"""A decoding loop for GPT-2 in plain torch, as one would write it by hand.

It computes one batch in eager mode, with a cache of exactly the needed size and torch's fused
attention, and applies the head only at the last position. All sequences are equally long, so there
are no masks and no padding.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.peers.contract import Run, Unsupported
from benchmarks.peers.weights import NORM_EPS, load_weights
from benchmarks.shapes import Shape


def load(folder: Path, dtype: str, threads: int) -> "PlainTorch":
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape, tensors = load_weights(folder)
    if shape.family != "gpt2":
        raise Unsupported("the loop in plain torch is written for a GPT-2")
    computed = getattr(torch, dtype)
    weights = {name: torch.from_numpy(value).to(computed) for name, value in tensors.items()}
    return PlainTorch(shape, weights)


class PlainTorch:
    """GPT-2, computed directly from its weights."""

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor]) -> None:
        self._shape = shape
        self._weights = weights

    @property
    def about(self) -> str:
        return f"torch {torch.__version__}, eager, SDPA, static cache"

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        row = torch.tensor([ids])
        cache = self._new_cache(1, len(ids))
        self._forward(row[:, :-1], 0, cache)
        logits = self._forward(row[:, -1:], len(ids) - 1, cache)[0]
        return logits.double().log_softmax(-1).numpy()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], steps: int) -> Run:
        ids = torch.tensor(prompts)
        batch, length = ids.shape
        cache = self._new_cache(batch, length + steps)
        began = time.perf_counter()
        tokens = draw(self._forward(ids, 0, cache))
        prefill_seconds = time.perf_counter() - began
        step_seconds = []
        for position in range(length, length + steps):
            began = time.perf_counter()
            tokens = draw(self._forward(tokens, position, cache))
            step_seconds.append(time.perf_counter() - began)
        return Run(prefill_seconds, step_seconds)

    def _new_cache(self, batch: int, length: int) -> Tensor:
        """Keys and values: (n_layer, 2, B, H, length, D)."""
        shape = self._shape
        width = shape.d_model // shape.n_head
        return torch.zeros(
            (shape.n_layer, 2, batch, shape.n_head, length, width),
            dtype=self._weights["token_embedding.weight"].dtype,
        )

    def _forward(self, ids: Tensor, start: int, cache: Tensor) -> Tensor:
        """Logits (B, V) after the last of `ids` (B, T), whose first position is `start`."""
        end = start + ids.shape[1]
        embedding = self._weights["token_embedding.weight"]
        x = embedding[ids] + self._weights["position_embedding.weight"][start:end]
        for layer in range(self._shape.n_layer):
            name = f"blocks.{layer}"
            h = self._norm(f"{name}.attention_norm", x)
            x = x + self._attention(name, h, cache[layer, :, :, :, :end], start)
            h = self._linear(f"{name}.mlp_up", self._norm(f"{name}.mlp_norm", x))
            x = x + self._linear(f"{name}.mlp_down", F.gelu(h, approximate="tanh"))
        return F.linear(self._norm("final_norm", x[:, -1]), embedding)

    def _attention(self, name: str, h: Tensor, cache: Tensor, start: int) -> Tensor:
        batch, time_, width = h.shape
        heads = self._linear(f"{name}.qkv", h).view(batch, time_, 3, self._shape.n_head, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        cache[0, :, :, start:], cache[1, :, :, start:] = k, v
        out = F.scaled_dot_product_attention(q, cache[0], cache[1], is_causal=time_ > 1)
        return self._linear(
            f"{name}.attention_out", out.transpose(1, 2).reshape(batch, time_, width)
        )

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, NORM_EPS)


def draw(logits: Tensor) -> Tensor:
    """A token (B, 1) for each row (B, V), by inverting the cumulative distribution."""
    cumulated = logits.float().softmax(-1).cumsum(-1)
    uniform = torch.rand(len(logits), 1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, uniform).clamp(max=logits.shape[1] - 1)
