"""Shapes of known architectures: GPT-2's shape, and the overrides that turn it into other shapes.

`model/training/configuration/presets.py` defines sizes and names for them.
"""

from collections.abc import Mapping
from typing import Any

from logitd.model.transformer.config import ConfigError, GPTConfig


def padded(vocab_size: int, multiple: int = 64) -> int:
    """The vocabulary size, rounded up to a multiple of `multiple` to suit the tiles of matrix
    kernels."""
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
"""Overrides that turn `gpt2_shape` into the decoder of "Attention Is All You Need" (Vaswani et al.,
2017), without cross-attention. Many models use the variant with `norm_position="pre"`."""


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
"""Overrides that turn `gpt2_shape` into the shape that learns fastest at small sizes: RMSNorm,
rotary positions, QK-norm, no biases, an untied head, and gated value embeddings in every second
block. The presets have value embeddings in all blocks."""


def _head_dim(d_model: int, n_head: int) -> int:
    if n_head < 1 or d_model % n_head:
        raise ConfigError(
            f"d_model {d_model} is not divisible by n_head {n_head}: change one of them, or set "
            "head_dim"
        )
    return d_model // n_head
