"""Folding: process the weights of a hooked copy as TransformerLens does when it loads a model.

Probabilities stay the same, up to rounding. The weights that are shared with the served model do
not change: each processed weight is a new parameter.

Shapes: H = n_head, D = head_dim, C = d_model.
"""

import torch
from torch import Tensor, nn

from logitd.model.hooked.factored import FactoredMatrix
from logitd.model.hooked.network import Norm, Unembed, blocks
from logitd.model.transformer.gpt import GPT, Block


@torch.no_grad()
def fold_weights(
    gpt: GPT,
    unembed: Unembed,
    *,
    fold_ln: bool,
    center_writing_weights: bool,
    center_unembed: bool,
    fold_value_biases: bool,
    refactor: bool,
) -> None:
    """Move the factors and biases of pre-norms into the matrices that read the norms' outputs.
    Center the head and, if every reader of the stream is a LayerNorm, the matrices that write to
    the stream, so that their outputs have mean 0. Move the biases of values into the bias of
    attention. With `refactor`, also replace the factors of each QK and OV circuit by the factors of
    its singular value decomposition."""
    config = gpt.config
    before = config.norm_position == "pre"
    if fold_ln and before:
        for block in blocks(gpt):
            if config.has_value_embedding(block.layer):
                gate, norm = block.value_gate, block.attention_norm
                assert isinstance(norm, Norm)
                gate.weight = _parameter(gate.weight * norm.w[: gate.in_features])
            _fold(block.attention_norm, block.qkv)
            _fold(block.mlp_norm, block.mlp_up)
        if isinstance(norm := gpt.final_norm, Norm):
            if norm.b is not None:
                unembed.b_U = unembed.b_U + norm.b @ unembed.W_U
            unembed.W_U = norm.w[:, None] * unembed.W_U
            _reset(norm)
            if norm.centered:
                unembed.W_U = unembed.W_U - unembed.W_U.mean(dim=0, keepdim=True)
    centers = before and config.norm == "layernorm" and config.final_norm
    if center_writing_weights and centers:
        tables = [gpt.token_embedding]
        tables += [gpt.position_embedding] if config.positions == "learned" else []
        for table in tables:
            table.weight = _parameter(table.weight - table.weight.mean(dim=-1, keepdim=True))
        for block in blocks(gpt):
            for layer in (block.attention_out, block.mlp_down):
                layer.weight = _parameter(layer.weight - layer.weight.mean(dim=0, keepdim=True))
                if layer.bias is not None:
                    layer.bias = _parameter(layer.bias - layer.bias.mean())
    if center_unembed and config.logit_softcap is None:
        unembed.W_U = unembed.W_U - unembed.W_U.mean(dim=-1, keepdim=True)
        unembed.b_U = unembed.b_U - unembed.b_U.mean()
    for block in blocks(gpt):
        if fold_value_biases or refactor:
            _fold_value_bias(block)
        if refactor:
            _refactor(block)


def _fold(norm: nn.Module, layer: nn.Linear) -> None:
    assert isinstance(norm, Norm)
    if norm.b is not None:
        added = layer.weight @ norm.b
        layer.bias = _parameter(added if layer.bias is None else layer.bias + added)
    weight = layer.weight * norm.w
    layer.weight = _parameter(
        weight - weight.mean(dim=-1, keepdim=True) if norm.centered else weight
    )
    _reset(norm)


def _reset(norm: Norm) -> None:
    norm.w = _parameter(torch.ones_like(norm.w))
    norm.b = None


def _fold_value_bias(block: Block) -> None:
    config, bias = block.config, _bias(block.qkv)
    if bias is None:
        return
    queries_and_keys = (config.n_head + config.n_kv_head) * config.head_dim
    kept, values = bias.tensor_split([queries_and_keys])
    of_heads = values.view(-1, config.head_dim).repeat_interleave(
        config.n_head // config.n_kv_head, dim=0
    )
    added = block.attention_out.weight @ of_heads.flatten()
    out = block.attention_out
    out.bias = _parameter(added if out.bias is None else out.bias + added)
    block.qkv.bias = _parameter(torch.cat((kept, torch.zeros_like(values))))


def _refactor(block: Block) -> None:
    """Give each head factors with orthogonal columns. The two factors of QK, biases included, have
    the same singular values; the rows of W_O have length 1."""
    heads, width, qkv = block.config.n_head, block.config.head_dim, block.qkv
    bias = _bias(qkv)
    rows = qkv.weight if bias is None else torch.cat((qkv.weight, bias[:, None]), dim=1)
    q, k, v = rows.unflatten(0, (3, heads, width))  # (H, D, C), or with a bias (H, D, C + 1)
    channels = qkv.in_features
    even = FactoredMatrix(q.mT, k).make_even()
    out = block.attention_out.weight.T.unflatten(0, (heads, width))  # (H, D, C)
    ov = FactoredMatrix(v[..., :channels].mT, out)
    values = torch.zeros_like(v)
    values[..., :channels] = ov.collapse_r().mT
    rows = torch.cat([each.flatten(0, 1) for each in (even.A.mT, even.B, values)])
    qkv.weight = _parameter(rows[:, :channels].contiguous())
    if bias is not None:
        qkv.bias = _parameter(rows[:, channels].contiguous())
    block.attention_out.weight = _parameter(ov.V.mT.flatten(0, 1).T.contiguous())


def _bias(layer: nn.Linear) -> Tensor | None:
    return layer.bias


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
