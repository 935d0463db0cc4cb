"""GPTConfig: the shape of a model, as it stands in a checkpoint's `config.json`.

Covers the three families that one forward computes (see `model/transformer/gpt.py`): GPT-2, the
original Transformer decoder, and the modern shape. Says what is impossible and why. Does not
hold weights or import torch, and knows nothing of training or of names such as "gpt2-124m"
(`model/training/presets.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

Norm = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["pre", "post"]
Positions = Literal["learned", "sinusoidal", "rotary"]
Activation = Literal["gelu_tanh", "gelu", "relu", "relu2", "swiglu"]
Target = Literal["qkv", "attention_out", "mlp_up", "mlp_down"]

TARGETS: tuple[Target, ...] = get_args(Target)
"""The matrices of a block, by the names of their modules."""
BLOCK = 32
"""Positions in a cache block: prefill computes, and prefix reuse copies, whole blocks."""


_SIZES = (
    "vocab_size",
    "context_length",
    "n_layer",
    "n_head",
    "n_kv_head",
    "head_dim",
    "d_model",
    "d_ff",
)


class ConfigError(ValueError):
    """A configuration that no model can have; the message names the numbers and the rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of a GPT. Every field is explicit, so that a checkpoint describes itself.

    vocab_size           token ids run from 0 to vocab_size - 1
    padded_vocab_size    rows of the embedding and head matrices; the rest are never shown
    context_length       positions, prompt and completion together
    n_layer, d_model     blocks, and the width of the residual stream
    n_head, n_kv_head    query heads, and the key/value heads they share (equal: multi-head,
                         1: multi-query)
    head_dim             width of one head; n_head * head_dim need not be d_model
    d_ff                 hidden width of the feed-forward (of each half, with swiglu)
    norm, norm_position  layernorm or rmsnorm; before each sublayer ("pre", with a final norm) or
                         after the residual sum ("post", without)
    positions            learned or sinusoidal vectors added to the embeddings, or rotary
    bias, qkv_bias       biases in norms, projections and feed-forward; in query, key and value
    qk_norm              RMS-normalise queries and keys per head before rotation
    tied_head            the head is the embedding matrix
    value_embeddings     every second block adds a gated per-token embedding to its values
    dropout              in training: on embeddings, attention weights and residual branches
    """

    vocab_size: int
    padded_vocab_size: int
    context_length: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    d_model: int
    d_ff: int
    norm: Norm
    norm_position: NormPosition
    norm_eps: float
    positions: Positions
    rope_theta: float
    activation: Activation
    bias: bool
    qkv_bias: bool
    qk_norm: bool
    tied_head: bool
    value_embeddings: bool
    dropout: float

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.padded_vocab_size < self.vocab_size:
            raise ConfigError(
                f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}"
            )
        if self.n_head % self.n_kv_head:
            raise ConfigError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}: "
                "each key/value head serves the same number of query heads"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ConfigError(
                f"head_dim {self.head_dim} is odd; rotary positions turn pairs, so it must be even"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        if not 0 < self.norm_eps < 1:
            raise ConfigError(f"norm_eps is {self.norm_eps}; it must be above 0 and below 1")
        if self.positions == "rotary" and not 1 < self.rope_theta < math.inf:
            raise ConfigError(f"rope_theta is {self.rope_theta}; it must be finite and above 1")

    @property
    def qkv_width(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.n_head + 2 * self.n_kv_head) * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of one position's keys of one layer (its values have as many)."""
        return self.n_kv_head * self.head_dim

    def maps(self) -> dict[Target, tuple[int, ...]]:
        """The rows of each matrix of a block, map by map: some are several maps side by side."""
        query = self.n_head * self.head_dim
        up = (self.d_ff,) * (2 if self.activation == "swiglu" else 1)
        return {
            "qkv": (query, self.kv_width, self.kv_width),
            "attention_out": (self.d_model,),
            "mlp_up": up,
            "mlp_down": (self.d_model,),
        }

    def has_value_embedding(self, layer: int) -> bool:
        """Value embeddings sit in every second block, counted from the last."""
        return self.value_embeddings and (self.n_layer - 1 - layer) % 2 == 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GPTConfig":
        """Read what `to_dict` wrote. ConfigError names a key that is missing, unknown or wrong."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ConfigError(f"unknown model keys {unknown}; this version knows {sorted(names)}")
        if missing := sorted(names - set(values)):
            raise ConfigError(f"the model configuration lacks {missing}")
        for name, kind in get_type_hints(cls).items():
            _check_kind(name, values[name], kind)
        return cls(**values)


def _check_kind(name: str, value: Any, kind: Any) -> None:
    """Raise ConfigError unless a JSON value is of a field's kind (a bool is not a number)."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{name} is {value!r}; it must be one of {list(get_args(kind))}")
    elif kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be true or false")
    elif isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise ConfigError(
            f"{name} is {value!r}; it must be {'an integer' if kind is int else 'a number'}"
        )


def padded(vocab_size: int, multiple: int = 64) -> int:
    """The vocabulary rounded up, so that matrix kernels meet whole tiles."""
    return -(-vocab_size // multiple) * multiple


def gpt2_shape(
    *,
    vocab_size: int,
    context_length: int,
    n_layer: int,
    n_head: int,
    d_model: int,
    **overrides: Any,
) -> GPTConfig:
    """GPT-2 (Radford et al., 2019): pre-LN, learned positions, GELU-tanh, biases, tied head."""
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "padded_vocab_size": padded(vocab_size),
        "context_length": context_length,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": n_head,
        "head_dim": overrides.get("head_dim") or _head_dim(d_model, n_head),
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "norm": "layernorm",
        "norm_position": "pre",
        "norm_eps": 1e-5,
        "positions": "learned",
        "rope_theta": 10_000.0,
        "activation": "gelu_tanh",
        "bias": True,
        "qkv_bias": True,
        "qk_norm": False,
        "tied_head": True,
        "value_embeddings": False,
        "dropout": 0.0,
    }
    return GPTConfig.from_dict(values | overrides)


ORIGINAL: Mapping[str, Any] = {
    "norm_position": "post",
    "positions": "sinusoidal",
    "activation": "relu",
    "tied_head": False,
}
"""Overrides that make `gpt2_shape` the decoder of "Attention Is All You Need" (Vaswani et al.,
2017), without its cross-attention. `norm_position="pre"` is its common variant."""

MODERN: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "positions": "rotary",
    "bias": False,
    "qkv_bias": False,
    "qk_norm": True,
    "tied_head": False,
    "value_embeddings": True,
}
"""Overrides that make `gpt2_shape` the shape that learns fastest at small sizes: RMSNorm, rotary
positions, QK-norm, no biases, a head of its own, gated value embeddings."""


def _head_dim(d_model: int, n_head: int) -> int:
    if n_head < 1 or d_model % n_head:
        raise ConfigError(
            f"d_model {d_model} is not divisible by n_head {n_head}: "
            "the heads share the width equally unless head_dim is given"
        )
    return d_model // n_head
