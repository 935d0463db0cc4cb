"""PointTap: calls the hook points inside a forward pass of a hooked copy.

`run` is the forward pass. In it, `GPT.transform` calls a `PointTap`, which calls most points, with
the axes in TransformerLens' order; norms and embeddings call their own points (`network.py`).

Shapes: B sequences, T positions, H = n_head, K = n_kv_head, D = head_dim, C = d_model, S keys.
"""

import torch
from torch import Tensor

from logitd.model.hooked.network import Norm, Points, Unembed, blocks
from logitd.model.transformer.attention import attention_scores, mask_causal
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT, Block, softcap
from logitd.model.transformer.stages import HEADS_FIRST


class StopForward(Exception):
    """Raised to end a forward pass before a block. It carries the stream that the block would
    read."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class PointTap:
    """A tap that passes every stage through its hook points, with the axes in TransformerLens'
    order.

    ids   token ids (B, T)
    real  (B, T), False for padding that attention must not see; None: no such padding
    stop  raise StopForward before this block, or after the last block; None: compute everything
    """

    def __init__(
        self, gpt: GPT, points: Points, ids: Tensor, *, real: Tensor | None, stop: int | None
    ) -> None:
        self._config = gpt.config
        self._blocks = blocks(gpt)
        self._points = points
        self._ids = ids
        self._stop = stop
        self._order = channel_order(gpt.config)
        self._hidden: Tensor | None = None  # (B, 1, T, S); padding sees itself, to have some key
        if real is not None:
            itself = torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
            self._hidden = ~(real[:, None, None, :] | itself)
        self._stream = self._attn_in = ids.new_zeros(0)  # inputs of the current block's heads
        self._change: Tensor | None = None  # what hooks of `hook_result` add to attention's output

    def wants(self, layer: int | None, stage: str) -> bool:
        result = self._points[f"blocks.{layer or 0}.attn.hook_result"]
        return stage != "attention.head_out" or result.has_hooks()

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        if layer is None:
            begins = stage == "embedding" and not self._config.residual_mix
            return self._before_block(0, value) if begins else value
        if stage == "input":
            return self._before_block(layer, value)
        if stage == "output":
            value, after = self._call(layer, "hook_resid_post", value), layer + 1
            if after == self._stop == self._config.n_layer:
                raise StopForward(value)
            ends = after == self._config.n_layer or self._config.residual_mix
            return value if ends else self._before_block(after, value)
        if stage == "attention.head_out":
            before = value.transpose(1, 2)  # (B, T, H, C)
            changed = self._call(layer, "attn.hook_result", before.clone())
            self._change = (changed - before).sum(dim=2)
            return value
        if stage == "attention.out" and self._change is not None:
            value, self._change = value + self._change, None
        if stage in _OWN_INPUTS:
            value = self._from_own_inputs(layer, stage, value)
        name = self._name(stage)
        return value if name is None else self._through(layer, name, stage, value)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
    ) -> Tensor:
        """Causal attention (B, H, T, D), with hook points for the scores and the weights."""
        scores = mask_causal(attention_scores(q, k), window)  # (B, H, T, S)
        if self._hidden is not None:
            scores = scores.masked_fill(self._hidden, float("-inf"))
        weights = self._call(layer, "attn.hook_attn_scores", scores).softmax(dim=-1)
        weights = self._call(layer, "attn.hook_pattern", weights)
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def _before_block(self, layer: int, stream: Tensor) -> Tensor:
        if layer == self._stop:
            raise StopForward(stream)
        self._stream = self._call(layer, "hook_resid_pre", stream)
        return self._stream

    def _from_own_inputs(self, layer: int, stage: str, value: Tensor) -> Tensor:
        """Queries, keys or values (B, heads, T, D), computed from the heads' own copies of the
        stream after hooks have changed them. Returns `value` if those copies have no hooks. The
        hook points of the norm are called only when it reads the shared stream."""
        name, part = _OWN_INPUTS[stage]
        own = self._points[f"blocks.{layer}.{name}"]
        shared = self._points[f"blocks.{layer}.hook_attn_in"]
        if not own.has_hooks() and not shared.has_hooks():
            return value
        inputs = self._stream.unsqueeze(2).repeat(1, 1, value.shape[1], 1)  # (B, T, heads, C)
        if own.has_hooks():
            inputs = own(inputs)
        elif part == 0:
            inputs = self._attn_in = shared(inputs)
        else:
            inputs = self._attn_in
        block = self._blocks[layer]
        if isinstance(norm := block.attention_norm, Norm) and self._config.norm_position == "pre":
            inputs = norm.without_points(inputs)
        return self._projected(block, part, inputs)

    def _projected(self, block: Block, part: int, inputs: Tensor) -> Tensor:
        """Project inputs (B, T, heads, C), which differ between heads, to queries, keys or values
        (part 0, 1 or 2)."""
        config, qkv = block.config, block.qkv
        heads = [config.n_head, config.n_kv_head, config.n_kv_head]
        rows = qkv.weight.unflatten(0, (-1, config.head_dim)).split(heads)[part]
        value = torch.einsum("bthc,hdc->bhtd", inputs, rows)
        if qkv.bias is not None:
            value = value + qkv.bias.view(-1, 1, config.head_dim).split(heads)[part]
        if part == 2 and config.has_value_embedding(block.layer):
            of_heads = enumerate(inputs.unbind(2))
            gated = block.gated_value_embedding
            value = value + torch.stack([gated(x, self._ids)[:, h] for h, x in of_heads], dim=1)
        return value

    def _name(self, stage: str) -> str | None:
        """The hook point of a stage that has exactly one; None if the stage has no hook point, or
        if another method calls its points."""
        if stage in ("attention.q", "attention.k") and self._config.positions != "rotary":
            return None
        return _NAMES.get(stage)

    def _through(self, layer: int, name: str, stage: str, value: Tensor) -> Tensor:
        if (point := self._points.get(f"blocks.{layer}.{name}")) is None or not point.has_hooks():
            return value
        value = value.clone()  # autograd lets no hook change a part of a split tensor in place
        if stage not in HEADS_FIRST:
            return point(value)
        reorders = self._order is not None and stage in _ROTATED
        shown = value.transpose(1, 2)  # (B, T, heads, D)
        changed = point(shown[..., inverse_order(self._order)] if reorders else shown)
        return (changed[..., self._order] if reorders else changed).transpose(1, 2)

    def _call(self, layer: int, name: str, value: Tensor) -> Tensor:
        return self._points[f"blocks.{layer}.{name}"](value)


_NAMES = {
    "attention.q_raw": "attn.hook_q",
    "attention.k_raw": "attn.hook_k",
    "attention.q": "attn.hook_rot_q",
    "attention.k": "attn.hook_rot_k",
    "attention.v": "attn.hook_v",
    "attention.heads": "attn.hook_z",
    "attention.out": "hook_attn_out",
    "middle": "hook_resid_mid",
    "mlp.pre": "mlp.hook_pre",
    "mlp.up": "mlp.hook_pre_linear",
    "mlp.hidden": "mlp.hook_post",
    "mlp.out": "hook_mlp_out",
}
_OWN_INPUTS = {
    "attention.q_raw": ("hook_q_input", 0),
    "attention.k_raw": ("hook_k_input", 1),
    "attention.v": ("hook_v_input", 2),
}
"""For each of queries, keys and values: the hook point of the head's separate copy of the stream,
and the index of their part in the fused projection."""
_ROTATED = ("attention.q_raw", "attention.k_raw", "attention.q", "attention.k")


def run(
    gpt: GPT,
    unembed: Unembed,
    ids: Tensor,
    points: Points,
    *,
    real: Tensor | None = None,
    stop: int | None = None,
) -> Tensor:
    """Logits (B, T, V) of ids (B, T), or the stream (B, T, C) before the block `stop`. If `real` is
    given, padding does not count in the positions of tokens."""
    tap = PointTap(gpt, points, ids, real=real, stop=stop)
    if real is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    else:
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)
    try:
        final = gpt.transform(ids, positions, tap.attend, tap=tap)
    except StopForward as stopped:
        return stopped.stream
    logits: Tensor = unembed(final)
    cap = gpt.config.logit_softcap
    return logits if cap is None else softcap(logits, cap)


def channel_order(config: GPTConfig) -> list[int] | None:
    """For each channel of a query or key in this model, its index in TransformerLens; None if the
    orders are the same. If only some channels are rotated, TransformerLens puts them first."""
    if config.positions != "rotary" or config.rotary_dim == config.head_dim:
        return None
    turning, resting = config.rotary_dim // 2, (config.head_dim - config.rotary_dim) // 2
    first = [*range(turning), *range(2 * turning, 2 * turning + resting)]
    return [*first, *(i + (turning if i < turning else resting) for i in first)]


def inverse_order(order: list[int] | None) -> list[int]:
    """For each channel of a query or key in TransformerLens, its index in this model."""
    assert order is not None
    return sorted(range(len(order)), key=order.__getitem__)
