"""Weights of a hooked GPT with TransformerLens' names, shapes and orientation.

Matrices multiply from the right: `x @ W_in`. Key and value heads shared by several query heads are
repeated, so every head has its own. Blocks are nested as in TransformerLens:
`model.blocks[0].attn.W_Q`, `model.blocks[0].attn.hook_z`.

Shapes: H = n_head, K = n_kv_head, D = head_dim, C = d_model, M = d_ff.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from logitd.model.hooked.network import Norm, Points, blocks, channel_order, inverse_order
from logitd.model.transformer.gpt import GPT, Block

OF_ATTENTION = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
OF_MLP = ("W_in", "W_gate", "W_out", "b_in", "b_out")


def nested_blocks(gpt: GPT, points: Points) -> list[SimpleNamespace]:
    """The blocks, with their weights and hook points as attributes."""
    return [_nested(block, points) for block in blocks(gpt)]


def _nested(block: Block, points: Points) -> SimpleNamespace:
    start = f"blocks.{block.layer}."
    parts: dict[str, dict[str, object]] = {
        "": {},
        "attn": dict(_attention(block)),
        "mlp": dict(_mlp(block)),
    }
    for name, point in points.items():
        part, _, last = name.removeprefix(start).rpartition(".")
        if name.startswith(start) and part in parts:
            parts[part][last] = point
    return SimpleNamespace(
        **parts[""],
        attn=SimpleNamespace(**parts["attn"]),
        mlp=SimpleNamespace(**parts["mlp"]),
        ln1=_norm(block.attention_norm),
        ln2=_norm(block.mlp_norm),
    )


def _norm(norm: torch.nn.Module) -> Norm:
    assert isinstance(norm, Norm)
    return norm


def _attention(block: Block) -> dict[str, Tensor]:
    config, weight = block.config, block.qkv.weight  # ((H + 2K) * D, C)
    bias = weight.new_zeros(len(weight)) if block.qkv.bias is None else block.qkv.bias
    heads = [config.n_head, config.n_kv_head, config.n_kv_head]
    group = config.n_head // config.n_kv_head
    order = channel_order(config)
    found: dict[str, Tensor] = {}
    for name, rows, of_rows in zip(
        "QKV",
        weight.unflatten(0, (-1, config.head_dim)).split(heads),
        bias.unflatten(0, (-1, config.head_dim)).split(heads),
        strict=True,
    ):
        if name != "Q":
            rows, of_rows = (each.repeat_interleave(group, dim=0) for each in (rows, of_rows))
        if name != "V" and order is not None:
            rows, of_rows = (each[:, inverse_order(order)] for each in (rows, of_rows))
        found |= {f"W_{name}": rows.transpose(1, 2), f"b_{name}": of_rows}  # (H, C, D), (H, D)
    out = block.attention_out
    found["W_O"] = out.weight.T.unflatten(0, (config.n_head, config.head_dim))  # (H, D, C)
    found["b_O"] = _bias(out)
    return found


def _mlp(block: Block) -> dict[str, Tensor]:
    up, down = block.mlp_up, block.mlp_down
    found = {"W_out": down.weight.T, "b_out": _bias(down)}  # (M, C), (C,)
    if block.config.activation != "swiglu":
        return found | {"W_in": up.weight.T, "b_in": _bias(up)}  # (C, M), (M,)
    gate, linear = up.weight.chunk(2)
    _, bias = _bias(up).chunk(2)
    return found | {"W_gate": gate.T, "W_in": linear.T, "b_in": bias}


def _bias(layer: torch.nn.Linear) -> Tensor:
    return layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
