"""Direct contributions: what each part of a model adds to a logit by itself.

The residual stream is a sum: of the embedding, and of what the attention and the MLP of each block
add to it. Between the last stream and the logit are only the final norm and the head. A norm
divides by a scale that it takes from its input. With that scale s frozen at what it is in this
forward it is a linear map and a bias:

    LayerNorm(x) = w * (x - mean(x)) / s + b      RMSNorm(x) = w * x / s      (w: where it has one)

so the logit of token v, whose row of the head is h_v and whose bias there c_v, is a sum without a
rest:

    logit_v = sum_parts <g, part> + <h_v, b> + c_v,
    g = (u - mean(u)) / s  with LayerNorm, u / s with RMSNorm,  where u = w * h_v

The parts are the embedding; of each block the heads (each through its columns of the output
projection), the bias of that projection, and the MLP with its bias. Where the norms stand behind
the sums (`norm_position` "post"), each norm is applied to all that was summed up to it, in the same
way: so g is taken through them from the last to the first, and the bias of each is a part as well.
The target of two tokens is the same with h_v - h_w and c_v - c_w.

Direct alone: what a head adds to what later blocks read is theirs here. Computed in float64 from
the values of the forward, so that adding up costs nothing.

Shapes: H = n_head, D = head_dim, C = d_model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logitd.model.inference.attribution.task import Part
from logitd.model.transformer.gpt import GPT, Block

RECORDED = ("attention.heads", "attention.out", "mlp.out")


@dataclass(slots=True)
class BlockRow:
    """One position of a block's forward. The sums are what norms behind them read."""

    heads: Tensor  # (H, D)
    mlp: Tensor  # (C,): what it adds
    attention_sum: Tensor  # (C,)
    mlp_sum: Tensor  # (C,)


class OneRow:
    """A tap that keeps of one block's forward over a text what one of its positions adds."""

    def __init__(self, row: int) -> None:
        self._row = row
        self._kept: dict[str, Tensor] = {}

    def wants(self, layer: int | None, stage: str) -> bool:
        return stage in (*RECORDED, "middle")

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        if self.wants(layer, stage):
            self._kept[stage] = value[0, ..., self._row, :].detach().clone()
        return value

    def row(self, before: Tensor) -> BlockRow:
        """Of the block that read the stream `before` (1, T, C)."""
        heads, attention, mlp, middle = (self._kept[name] for name in (*RECORDED, "middle"))
        return BlockRow(heads, mlp, before[0, self._row] + attention, middle + mlp)


def direct_parts(
    gpt: GPT,
    embedding: Tensor,  # (C,), of the position
    rows: list[BlockRow],
    last: Tensor,  # (C,), the last stream of the position
    direction: Tensor,  # (C,): h_v, or h_v - h_w
    head_bias: float | None,  # c_v, or c_v - c_w
) -> tuple[Part, ...]:
    """The parts of the target, in the order of the forward."""
    config = gpt.config
    parts: list[Part] = []  # the last first

    def add(stage: str, value: float | None, head: int | None = None) -> None:
        if value is not None:
            parts.append(Part(stage, head, value))

    add("head.bias", head_bias)
    g = direction.double()
    if config.final_norm:
        g, bias = through_norm(gpt.final_norm, last, g)
        add("final_norm.bias", bias)
    for layer in reversed(range(config.n_layer)):
        block, row, name = gpt.blocks[layer], rows[layer], f"blocks.{layer}"
        assert isinstance(block, Block)
        if config.norm_position == "post":
            g, bias = through_norm(block.mlp_norm, row.mlp_sum, g)
            add(f"{name}.mlp.norm.bias", bias)
        add(f"{name}.mlp.out", _product(row.mlp, g))
        if config.norm_position == "post":
            g, bias = through_norm(block.attention_norm, row.attention_sum, g)
            add(f"{name}.attention.norm.bias", bias)
        projection = block.attention_out
        if projection.bias is not None:
            add(f"{name}.attention.bias", _product(projection.bias, g))
        columns = (g @ projection.weight.double()).view_as(row.heads)  # (H, D)
        values = (columns * row.heads.double()).sum(dim=-1).tolist()
        for head in reversed(range(config.n_head)):
            add(f"{name}.attention.heads", values[head], head)
    add("embedding", _product(embedding, g))
    return tuple(reversed(parts))


def through_norm(norm: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, float | None]:
    """What a product with g (C,) behind a norm is before it, with the scale that the norm has for x
    (C,), in float64; and the product of g with the norm's bias, if it has one."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    centred = isinstance(norm, nn.LayerNorm)
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    weight, eps = norm.weight, norm.eps
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    x = x.double()
    spread = x - x.mean() if centred else x
    u = g if weight is None else g * weight.double()
    u = u - u.mean() if centred else u
    scale = (spread.square().mean() + eps).sqrt()
    return u / scale, None if bias is None else _product(bias, g)


def _product(vector: Tensor, g: Tensor) -> float:
    return (vector.double() @ g).item()
