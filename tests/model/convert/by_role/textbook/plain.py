"""A GPT computed from tensors with the names and shapes that a scheme describes.

Covers heads with separate or grouped tensors, fused rows in any order, raw parameters with an axis
for the heads, matrices (in, out), norms before or after sublayers, parallel sublayers, norms of
queries and keys, gates, rotary positions, and sublayers without an output matrix. The arithmetic is
in `common.py`.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model.convert.by_role.textbook.common import (
    CONTEXT,
    HEADS,
    VOCAB,
    WIDTH,
    attend,
    merge,
    rms,
    split,
    turned,
)

if TYPE_CHECKING:
    from tests.model.convert.by_role.scheme import Scheme

SEPARATE = ("query", "key", "value")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class Plain(nn.Module):
    def __init__(self, scheme: "Scheme") -> None:
        super().__init__()
        self._scheme, self._how = scheme, scheme.computation
        self._names = scheme.names()
        self.activation = ACTIVATIONS.get(self._how.activation, F.silu)
        for layer in range(scheme.n_layer):
            for (role, part), pattern in self._names.items():
                shape = self._shape(role, part)
                for name in () if pattern == "identity" else self._full_names(pattern, layer):
                    _register(self, name, nn.Parameter(torch.ones(shape)))
        if scheme.tied:
            head: Any = self._tensor("head", "weight", 0)
            _register(self, self._names["token_embedding", "weight"], head)
        for name in scheme.ignored:
            ones = torch.ones(CONTEXT, CONTEXT)
            mask = ones.triu(1) if name.endswith("mask") else ones.tril()
            _register(self, name, torch.tensor(-math.inf) if "IGNORE" in name else mask)

    def _full_names(self, pattern: str, layer: int) -> list[str]:
        name = pattern.replace("{N}", str(layer + self._scheme.first_layer))
        heads = range(self._scheme.heads) if "{M}" in name else range(1)
        return [name.replace("{M}", str(head)) for head in heads]

    def _shape(self, role: str, part: str) -> tuple[int, ...]:
        """The shape that the tensor has in the file."""
        hidden, size = self._scheme.hidden, WIDTH // HEADS
        rows, columns = {
            "token_embedding": (VOCAB, WIDTH),
            "positions": (CONTEXT, WIDTH),
            "head": (VOCAB, WIDTH),
            "qkv": (3 * WIDTH, WIDTH),
            "key": (self._scheme.kv_heads * size, WIDTH),
            "value": (self._scheme.kv_heads * size, WIDTH),
            "query_norm": (size, 0),
            "key_norm": (size, 0),
            "mlp_gate": (hidden, WIDTH),
            "mlp_up": (hidden, WIDTH),
            "mlp_gate_up": (2 * hidden, WIDTH),
            "mlp_down": (WIDTH, hidden),
        }.get(role, (WIDTH, WIDTH))
        if role in SEPARATE and self._scheme.raw:
            return (HEADS, WIDTH, size) if part == "weight" else (HEADS, size)
        if role == "attention_out" and self._scheme.raw and part == "weight":
            return HEADS, size, WIDTH
        if role in SEPARATE and self._scheme.heads:
            rows = size
        if part == "bias" or role.endswith("norm"):
            return (rows,)
        return (columns, rows) if role in self._scheme.transposed else (rows, columns)

    def _tensor(self, role: str, part: str, layer: int) -> Tensor | None:
        """A matrix (out, in) or a vector; None if the model has no such tensor."""
        pattern = self._names.get((role, part), "identity")
        if pattern == "identity":
            return None
        parts = [_find(self, name) for name in self._full_names(pattern, layer)]
        if parts[0] is None:
            return None
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        if part == "bias":
            return tensor.flatten()
        if tensor.dim() == 3:  # (H, C, D) to (H * D, C), or (H, D, C) to (C, H * D)
            return tensor.flatten(0, 1).T if role == "attention_out" else tensor.mT.flatten(0, 1)
        return tensor.T if role in self._scheme.transposed else tensor

    def _linear(self, role: str, layer: int, x: Tensor) -> Tensor:
        weight = self._tensor(role, "weight", layer)
        return x if weight is None else F.linear(x, weight, self._tensor(role, "bias", layer))

    def _norm(self, role: str, layer: int, x: Tensor) -> Tensor:
        weight: Any = self._tensor(role, "weight", layer)
        if self._how.norm == "rmsnorm":
            return rms(x, self._how.norm_eps) * (1 if weight is None else weight)
        return F.layer_norm(x, (WIDTH,), weight, self._tensor(role, "bias", layer))

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        heads, kv_heads = self._how.n_head, self._scheme.kv_heads
        if ("qkv", "weight") not in self._names:
            kv_heads = min(heads, kv_heads)
            shapes = zip(SEPARATE, (heads, kv_heads, kv_heads), strict=True)
            q, k, v = (split(self._linear(role, layer, x), count) for role, count in shapes)
        elif self._how.qkv_layout == "per_head":
            rows = self._linear("qkv", layer, x).unflatten(2, (heads, 3, -1))  # (B, T, H, 3, D)
            q, k, v = (rows[:, :, :, part].transpose(1, 2) for part in range(3))
        else:
            parts = self._linear("qkv", layer, x).chunk(3, dim=2)
            by_letter = dict(zip(self._how.qkv_layout, parts, strict=True))
            q, k, v = (split(by_letter[letter], heads) for letter in "qkv")
        q, k = self._turned("query_norm", layer, q), self._turned("key_norm", layer, k)
        k, v = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (k, v))
        divisor = 1.0 if self._how.score_scale == "none" else math.sqrt(q.shape[-1])
        return self._linear("attention_out", layer, merge(attend(q, k, v, divisor)))

    def _turned(self, norm: str, layer: int, x: Tensor) -> Tensor:
        """Queries or keys (B, H, T, D), normalized and with rotary positions."""
        if self._how.qk_norm_position == "before_rotary":
            x = self._normalized(norm, layer, x)
        if self._how.positions == "rotary":
            neighbors = self._how.rotary_layout == "interleaved"
            backward = self._how.rotary_direction == "backward"
            x = turned(x, neighbors=neighbors, backward=backward, theta=self._how.rope_theta)
        if self._how.qk_norm_position == "after_rotary":
            x = self._normalized(norm, layer, x)
        return x

    def _normalized(self, norm: str, layer: int, x: Tensor) -> Tensor:
        if self._how.qk_norm == "none":
            return x
        weight = self._tensor(norm, "weight", layer)
        return rms(x, self._how.qk_norm_eps) * (1 if weight is None else weight)

    def _feed_forward(self, layer: int, x: Tensor) -> Tensor:
        if ("mlp_gate_up", "weight") in self._names:
            first, second = self._linear("mlp_gate_up", layer, x).chunk(2, dim=-1)
            if self._how.gate_order == "up_first":
                first, second = second, first
            return self._linear("mlp_down", layer, self.activation(first) * second)
        if ("mlp_gate", "weight") in self._names:
            gate = self.activation(self._linear("mlp_gate", layer, x))
            return self._linear("mlp_down", layer, gate * self._linear("mlp_up", layer, x))
        hidden = self.activation(self._linear("mlp_up", layer, x))
        return self._linear("mlp_down", layer, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        embedding: Any = self._tensor("token_embedding", "weight", 0)
        positions = self._tensor("positions", "weight", 0)
        x = embedding[ids] if positions is None else embedding[ids] + positions[: ids.shape[1]]
        for layer in range(self._scheme.n_layer):
            if self._how.norm_position == "post":
                x = self._norm("attention_norm", layer, x + self._attention(layer, x))
                x = self._norm("mlp_norm", layer, x + self._feed_forward(layer, x))
                continue
            attended = x + self._attention(layer, self._norm("attention_norm", layer, x))
            read = x if self._how.residual == "parallel" else attended
            x = attended + self._feed_forward(layer, self._norm("mlp_norm", layer, read))
        if self._how.final_norm:
            x = self._norm("final_norm", 0, x)
        if ("head", "weight") not in self._names:
            return x @ embedding.T
        return self._linear("head", 0, x)


def _register(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or a buffer under a name with dots."""
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


def _find(root: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(root.get_submodule(path), last)
