"""Oracle for the intermediate values of a forward pass: every stage of one text, by its definition.

It takes the model's weights, rotary tables and configuration, but none of its code. `change` is
called with the name and the value of each stage, whose first dimension is the positions. The rest
of the pass uses what `change` returns.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT, Block, sinusoidal_table
from logitd.model.transformer.rotary import rotary_tables

Change = Callable[[str, Tensor], Tensor]


def plain_stages(
    gpt: GPT, token_ids: list[int], change: Change = lambda name, value: value
) -> dict[str, Tensor]:
    """Every stage (P, ...) of a text, by name, without those that the model does not have."""
    config = gpt.config
    stages: dict[str, Tensor] = {}

    def stage(name: str, value: Tensor) -> Tensor:
        stages[name] = change(name, value)
        return stages[name]

    ids = torch.tensor(token_ids)
    x = gpt.token_embedding.weight[ids]
    if config.embedding_norm:
        x = _norm(config, gpt.embedding_norm, x)
    if config.smear:
        gate = torch.sigmoid(x[1:, : gpt.smear_gate.in_features] @ gpt.smear_gate.weight[0])
        x = torch.cat([x[:1], x[1:] + gpt.smear_scale * gate[:, None] * x[:-1]])
    if config.positions == "learned":
        positions = gpt.position_embedding.weight
        assert isinstance(positions, Tensor)
        x = x + positions[: len(ids)]
    elif config.positions == "sinusoidal":
        x = x + sinusoidal_table(config.context_length, config.d_model, x.device)[: len(ids)]
    first = x = stage("embedding", x)
    outputs = []
    for index, block in enumerate(gpt.blocks):
        assert isinstance(block, Block)
        within = _within(stage, f"blocks.{index}.")
        if config.residual_mix:
            of_both = gpt.residual_scales[index], gpt.embedding_scales[index]
            x = within("input", of_both[0] * x + of_both[1] * first)
        x = _block(config, block, x, ids, within)
        outputs.append(x)
    if config.backout:
        x = stage("backout", x - gpt.backout_scale * outputs[config.n_layer // 2])
    if config.final_norm:
        x = stage("final_norm", _norm(config, gpt.final_norm, x))
    weight, bias = gpt.head_parameters()
    logits = x @ weight.T[:, : config.vocab_size]
    logits = logits if bias is None else logits + bias[: config.vocab_size]
    if (cap := config.logit_softcap) is not None:
        logits = cap * torch.tanh(logits / cap)
    stage("logits", logits)
    return stages


def without_softcap(gpt: GPT) -> GPT:
    """The same model without a limit on its logits."""
    plain = copy.copy(gpt)
    plain.config = replace(gpt.config, logit_softcap=None)
    return plain


def _within(stage: Change, prefix: str) -> Change:
    return lambda name, value: stage(prefix + name, value)


def _block(config: GPTConfig, block: Block, x: Tensor, ids: Tensor, stage: Change) -> Tensor:
    pre = config.norm_position == "pre"
    read = stage("attention.norm", _norm(config, block.attention_norm, x)) if pre else x
    out = _attention(config, block, read, ids, stage)
    if pre:
        middle = stage("middle", x + out)
        before = x if config.residual == "parallel" else middle
        hidden = _mlp(
            config, block, stage("mlp.norm", _norm(config, block.mlp_norm, before)), stage
        )
        return stage("output", middle + hidden)
    middle = stage("middle", _norm(config, block.attention_norm, x + out))
    return stage(
        "output", _norm(config, block.mlp_norm, middle + _mlp(config, block, middle, stage))
    )


def _attention(config: GPTConfig, block: Block, x: Tensor, ids: Tensor, stage: Change) -> Tensor:
    length, width = len(x), config.head_dim
    rows = block.qkv.weight.split([config.n_head * width, config.kv_width, config.kv_width])
    biases = (
        block.qkv.bias.split([len(part) for part in rows])
        if config.qkv_bias
        else [torch.zeros(len(part)) for part in rows]
    )
    q, k, v = (
        (x @ weight.T + bias).view(length, -1, width)
        for weight, bias in zip(rows, biases, strict=True)
    )
    if config.has_value_embedding(block.layer):
        gate = 2 * torch.sigmoid(x[:, : block.value_gate.in_features] @ block.value_gate.weight.T)
        v = v + gate[..., None] * block.value_embedding.weight[ids].view(v.shape)
    if config.qk_norm or config.positions == "rotary":
        q, k = stage("attention.q_raw", q), stage("attention.k_raw", k)
    if config.qk_norm:
        q = _rms(q, block.query_norm.weight, config.norm_eps)
        k = _rms(k, block.key_norm.weight, config.norm_eps)
    if config.positions == "rotary":
        cos, sin = (table[:length, None] for table in rotary_tables(config, x.device))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    q, k, v = stage("attention.q", q), stage("attention.k", k), stage("attention.v", v)
    group = config.n_head // config.n_kv_head
    scores = torch.einsum("phd,thd->pht", q, k.repeat_interleave(group, dim=1)) / math.sqrt(width)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    if config.windows is not None and (window := config.windows[block.layer]) is not None:
        hidden |= torch.ones(length, length, dtype=torch.bool).tril(-window)
    hidden = hidden[:, None]
    scores = stage("attention.scores", scores.masked_fill(hidden, -math.inf))
    probs = stage("attention.probs", scores.masked_fill(hidden, -math.inf).softmax(dim=-1))
    probs = probs.masked_fill(hidden, 0)
    heads = torch.einsum("pht,thd->phd", probs, v.repeat_interleave(group, dim=1))
    heads = stage("attention.heads", heads)
    parts = [
        heads[:, head] @ block.attention_out.weight[:, head * width : (head + 1) * width].T
        for head in range(config.n_head)
    ]
    stage("attention.head_out", torch.stack(parts, dim=1))
    out = torch.stack(parts).sum(dim=0)
    return stage("attention.out", out + block.attention_out.bias if config.bias else out)


def _mlp(config: GPTConfig, block: Block, x: Tensor, stage: Change) -> Tensor:
    units = x @ block.mlp_up.weight.T
    if config.bias:
        units = units + block.mlp_up.bias
    pre = stage("mlp.pre", units[:, : config.d_ff])
    match config.activation:
        case "swiglu":
            hidden = pre * torch.sigmoid(pre) * stage("mlp.up", units[:, config.d_ff :])
        case "gelu":
            hidden = pre * (1 + torch.erf(pre / math.sqrt(2))) / 2
        case "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (pre + 0.044715 * pre**3)
            hidden = pre * (1 + torch.tanh(inner)) / 2
        case "relu":
            hidden = pre.clamp(min=0)
        case "relu2":
            hidden = pre.clamp(min=0) ** 2
    out = stage("mlp.hidden", hidden) @ block.mlp_down.weight.T
    return stage("mlp.out", out + block.mlp_down.bias if config.bias else out)


def _norm(config: GPTConfig, norm: torch.nn.Module, x: Tensor) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if config.norm == "rmsnorm":
        return _rms(x, weight, config.norm_eps)
    centered = x - x.mean(dim=-1, keepdim=True)
    scaled = centered / (centered.square().mean(dim=-1, keepdim=True) + config.norm_eps).sqrt()
    bias = norm.bias if config.bias else 0
    assert isinstance(bias, (Tensor, int))
    return scaled * weight + bias


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of channels i and i + half; channels without a table entry do not change."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat(
        (first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1
    )
