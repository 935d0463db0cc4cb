"""Direct contributions: the amount that each part of a model adds to a logit.

The residual stream is the sum of the embedding and the outputs of each block's attention and MLP.
Only the final norm and the head come between the last stream and the logit. A norm divides by a
scale s that depends on its input. If s is held at its value in this forward pass, the norm is
linear except for its bias b:

    LayerNorm(x) = w * (x - mean(x)) / s + b      RMSNorm(x) = w * x / s

So the logit of token v, with row h_v and bias c_v of the head, is an exact sum:

    logit_v = sum_parts <g, part> + <h_v, b> + c_v,
    g = (u - mean(u)) / s  with LayerNorm, u / s with RMSNorm,  where u = w * h_v

The parts are the embedding and, of each block, the heads (each through its columns of the output
projection), the bias of that projection, and the MLP with its bias. With `norm_position` "post"
each norm applies to the whole sum before it, so g is propagated back through every norm, and the
bias of each norm is a part too. For the difference of two tokens' logits, h_v - h_w and c_v - c_w
replace h_v and c_v.

With `residual_mix` the input of a block is a mixture of the stream and the embedding, so g splits
into two vectors, and the embedding's contribution is a sum over all blocks. With `backout` the last
stream is x_last - k x_middle with a learned factor k, so -k g is added to the g of the middle
block's output. If the model has `logit_softcap`, the parts add up to the logit before the cap.

If a later block reads the output of a head, the effect counts as a contribution of the later block.
The products are computed in float64 from the values of the forward pass, so that the sum loses no
precision.

Shapes: H = n_head, D = head_dim, C = d_model.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from logitd.model.inference.attribution.gradients import backout, mixture
from logitd.model.inference.attribution.kept import KeptStages, freeze_norm
from logitd.model.inference.attribution.task import Part
from logitd.model.transformer.gpt import GPT, Block

RECORDED = ("attention.heads", "attention.out", "middle", "mlp.out")


def kept_row(row: int) -> KeptStages:
    """A tap that keeps RECORDED at one position: the heads (H, D) and the other stages (C,)."""
    return KeptStages(RECORDED, lambda value: value[0, ..., row, :].clone())


def direct_parts(
    gpt: GPT,
    embedding: Tensor,  # (C,), of the position
    rows: Sequence[Mapping[str, Tensor]],  # of each block: "input" (C,) and RECORDED
    last: Tensor,  # (C,), the last stream of the position, after `backout`
    direction: Tensor,  # (C,): h_v, or h_v - h_w
    head_bias: float | None,  # c_v, or c_v - c_w
) -> tuple[Part, ...]:
    """The contribution of each part to the target, in the order of the forward pass. A post-norm
    model normalizes the sums of the residual stream and a sublayer's output."""
    config = gpt.config
    parts: list[Part] = []  # the last first

    def add(stage: str, value: float | None, head: int | None = None) -> None:
        if value is not None:
            parts.append(Part(stage, head, value))

    add("head.bias", head_bias)
    g = direction.double()
    of_embedding = torch.zeros_like(g)
    if config.final_norm:
        g, bias = through_norm(gpt.final_norm, last, g)
        add("final_norm.bias", bias)
    after = g
    for layer in reversed(range(config.n_layer)):
        if layer == config.backout_layer:
            g = g - backout(gpt) * after
        block, row, name = gpt.blocks[layer], rows[layer], f"blocks.{layer}"
        assert isinstance(block, Block)
        if config.norm_position == "post":
            g, bias = through_norm(block.mlp_norm, row["middle"] + row["mlp.out"], g)
            add(f"{name}.mlp.norm.bias", bias)
        add(f"{name}.mlp.out", _product(row["mlp.out"], g))
        if config.norm_position == "post":
            summed = row["input"] + row["attention.out"]
            g, bias = through_norm(block.attention_norm, summed, g)
            add(f"{name}.attention.norm.bias", bias)
        projection = block.attention_out
        if projection.bias is not None:
            add(f"{name}.attention.bias", _product(projection.bias, g))
        heads = row["attention.heads"]
        columns = (g @ projection.weight.double()).view_as(heads)  # (H, D)
        values = (columns * heads.double()).sum(dim=-1).tolist()
        for head in reversed(range(config.n_head)):
            add(f"{name}.attention.heads", values[head], head)
        stream, first = mixture(gpt, layer)
        of_embedding, g = of_embedding + first * g, stream * g
    add("embedding", _product(embedding, of_embedding + g))
    return tuple(reversed(parts))


def through_norm(norm: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, float | None]:
    """Propagate g (C,) back through a norm with the input x (C,), with the norm's scale held fixed.
    The inner product of the returned float64 vector with x equals the inner product of g with the
    norm's output without bias. Also returns the inner product of g with the bias, if there is
    one."""
    bias = getattr(norm, "bias", None)
    return freeze_norm(norm, x.double()).backward(g), None if bias is None else _product(bias, g)


def _product(vector: Tensor, g: Tensor) -> float:
    return (vector.double() @ g).item()
