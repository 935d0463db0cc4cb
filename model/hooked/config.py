"""HookedConfig: the shape of a model, under TransformerLens' names."""

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from logitd.model.transformer.config import GPTConfig

PaddingSide = Literal["left", "right"]
ACTIVATIONS = {"gelu_tanh": "gelu_new", "swiglu": "silu"}
"""TransformerLens' names for the activation functions that `GPTConfig` names differently."""


@dataclass(slots=True)
class HookedConfig:
    """The model's shape, under TransformerLens' names. The caller may set `default_prepend_bos`,
    `default_padding_side` and the fields `use_...`, which turn on hook points that are off by
    default (`names.SETTINGS`)."""

    model_name: str
    n_layers: int
    d_model: int
    n_ctx: int
    n_heads: int
    n_key_value_heads: int | None
    d_head: int
    d_mlp: int
    d_vocab: int
    act_fn: str
    gated_mlp: bool
    eps: float
    normalization_type: str
    positional_embedding_type: str
    parallel_attn_mlp: bool
    device: torch.device
    dtype: torch.dtype
    default_prepend_bos: bool
    default_padding_side: PaddingSide = "right"
    attn_only: bool = False
    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    use_attn_in: bool = False
    use_hook_mlp_in: bool = False

    @property
    def d_vocab_out(self) -> int:
        return self.d_vocab

    @classmethod
    def of(cls, config: GPTConfig, like: Tensor, name: str, *, bos: bool) -> Self:
        shared = config.n_kv_head != config.n_head
        return cls(
            model_name=name,
            n_layers=config.n_layer,
            d_model=config.d_model,
            n_ctx=config.context_length,
            n_heads=config.n_head,
            n_key_value_heads=config.n_kv_head if shared else None,
            d_head=config.head_dim,
            d_mlp=config.d_ff,
            d_vocab=config.vocab_size,
            act_fn=ACTIVATIONS.get(config.activation, config.activation),
            gated_mlp=config.activation == "swiglu",
            eps=config.norm_eps,
            normalization_type="LN" if config.norm == "layernorm" else "RMS",
            positional_embedding_type={"learned": "standard"}.get(
                config.positions, config.positions
            ),
            parallel_attn_mlp=config.residual == "parallel",
            device=like.device,
            dtype=torch.promote_types(like.dtype, torch.float32),
            default_prepend_bos=bos,
        )
