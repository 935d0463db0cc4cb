"""A GPT with hook points: a copy of a served model's weights, in float32 or wider.

`hooked_copy` replaces the norms and embeddings of a `GPT` by modules with hook points; the weights
of a float32 model are shared. `PointTap` is the tap of `GPT.transform` that calls all other points.
`fold_weights` processes the weights of a copy as TransformerLens does by default.

Shapes: B sequences, T positions, H = n_head, K = n_kv_head, D = head_dim, C = d_model, S keys.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitd.model.hooked.points import HookPoint
from logitd.model.transformer.attention import attention_scores, mask_causal
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT, Block, softcap
from logitd.model.transformer.stages import HEADS_FIRST

Points = Mapping[str, HookPoint]


class Norm(nn.Module):
    """A LayerNorm or RMSNorm with hook points for its scale, its quotient and its output."""

    def __init__(self, norm: nn.Module, name: str, points: Points) -> None:
        super().__init__()
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        self.centered = isinstance(norm, nn.LayerNorm)
        self.eps = norm.eps
        assert norm.weight is not None
        self.w = norm.weight
        self.b = norm.bias if isinstance(norm, nn.LayerNorm) else None
        self.hook_scale = points[f"{name}.hook_scale"]
        self.hook_normalized = points[f"{name}.hook_normalized"]
        self.hook_out = points[f"{name}.hook_out"]

    def forward(self, x: Tensor) -> Tensor:
        if self.centered:
            x = x - x.mean(dim=-1, keepdim=True)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        scale = self.hook_scale((x.square().mean(dim=-1, keepdim=True) + eps).sqrt())
        x = self.hook_normalized(x / scale) * self.w
        return self.hook_out(x if self.b is None else x + self.b)


class Embedding(nn.Module):
    """An embedding whose rows pass through a hook point. If autograd is on, the graph begins here,
    with a copy that hooks may change in place."""

    def __init__(self, weight: Tensor, point: HookPoint) -> None:
        super().__init__()
        self.weight = weight
        self._point = point

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight)
        return self._point(rows.requires_grad_().clone() if torch.is_grad_enabled() else rows)


class Unembed(nn.Module):
    """The head, with hook points for its input and output. `logit_softcap` is applied after it."""

    def __init__(self, w: Tensor, b: Tensor, points: Points) -> None:
        super().__init__()
        self.W_U, self.b_U = w, b  # (C, V), (V,)
        self.hook_in, self.hook_out = points["unembed.hook_in"], points["unembed.hook_out"]

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_out(self.hook_in(x) @ self.W_U + self.b_U)


def hooked_copy(gpt: GPT, points: Points) -> tuple[GPT, Unembed]:
    """A GPT whose norms and embeddings call their hook points, and its head. Parameters need no
    gradients."""
    config, weight = gpt.config, gpt.token_embedding.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    with torch.device("meta"):
        copy = GPT(config)
    state = {name: _plain(value, dtype) for name, value in gpt.state_dict().items()}
    copy.load_state_dict(state, assign=True)
    copy.requires_grad_(False).eval()
    copy.reset_tables()
    head, bias = copy.head_parameters()
    vocab = config.vocab_size
    b = head.new_zeros(vocab) if bias is None else bias[:vocab].detach()
    unembed = Unembed(head[:vocab].detach().T, b, points)
    copy.token_embedding = Embedding(copy.token_embedding.weight, points["hook_embed"])  # type: ignore[assignment]
    if config.positions == "learned":
        rows = copy.position_embedding.weight
        copy.position_embedding = Embedding(rows, points["hook_pos_embed"])  # type: ignore[assignment]
    for layer, block in enumerate(blocks(copy)):
        block.attention_norm = Norm(block.attention_norm, f"blocks.{layer}.ln1", points)
        block.mlp_norm = Norm(block.mlp_norm, f"blocks.{layer}.ln2", points)
    if config.final_norm:
        copy.final_norm = Norm(copy.final_norm, "ln_final", points)
    return copy, unembed


def blocks(gpt: GPT) -> list[Block]:
    found = []
    for block in gpt.blocks:
        assert isinstance(block, Block)
        found.append(block)
    return found


class StopForward(Exception):
    """Raised to end a forward pass before a block; holds the stream that the block would read."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class PointTap:
    """A tap that passes every stage through its hook points, with TransformerLens' order of axes.

    results  also compute `attn.hook_result`, the output of each head
    stop     raise StopForward before this block, or after the last; None: compute everything
    """

    def __init__(
        self, config: GPTConfig, points: Points, *, results: bool, stop: int | None = None
    ) -> None:
        self._config = config
        self._points = points
        self._results = results
        self._stop = stop
        self._order = channel_order(config)
        self._change: Tensor | None = None  # by hooks of `hook_result`

    def wants(self, layer: int | None, stage: str) -> bool:
        return stage != "attention.head_out" or self._results

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
        name = self._name(stage)
        return value if name is None else self._through(layer, name, stage, value)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
    ) -> Tensor:
        """Causal attention (B, H, T, D), with points for scores and weights."""
        scores = mask_causal(attention_scores(q, k), window)  # (B, H, T, S)
        weights = self._call(layer, "attn.hook_attn_scores", scores).softmax(dim=-1)
        weights = self._call(layer, "attn.hook_pattern", weights)
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def _before_block(self, layer: int, stream: Tensor) -> Tensor:
        if layer == self._stop:
            raise StopForward(stream)
        return self._call(layer, "hook_resid_pre", stream)

    def _name(self, stage: str) -> str | None:
        """The only hook point of a stage; None if the stage has no point, or a special rule."""
        if stage in ("attention.q", "attention.k") and self._config.positions != "rotary":
            return None
        return _NAMES.get(stage)

    def _through(self, layer: int, name: str, stage: str, value: Tensor) -> Tensor:
        if (point := self._points.get(f"blocks.{layer}.{name}")) is None or not point.has_hooks():
            return value
        value = value.clone()  # autograd does not let hooks change parts of a split tensor in place
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
_ROTATED = ("attention.q_raw", "attention.k_raw", "attention.q", "attention.k")


def run(
    gpt: GPT, unembed: Unembed, ids: Tensor, points: Points, *, results: bool, stop: int | None
) -> Tensor:
    """Logits (B, T, V) of ids (B, T), or the stream (B, T, C) before the block `stop`."""
    tap = PointTap(gpt.config, points, results=results, stop=stop)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    try:
        final = gpt.transform(ids, positions, tap.attend, tap=tap)
    except StopForward as stopped:
        return stopped.stream
    logits: Tensor = unembed(final)
    cap = gpt.config.logit_softcap
    return logits if cap is None else softcap(logits, cap)


def channel_order(config: GPTConfig) -> list[int] | None:
    """For each of our channels of a query or key, its index in TransformerLens; None if the orders
    are the same. If only some channels are rotated, TransformerLens has those first."""
    if config.positions != "rotary" or config.rotary_dim == config.head_dim:
        return None
    turning, resting = config.rotary_dim // 2, (config.head_dim - config.rotary_dim) // 2
    first = [*range(turning), *range(2 * turning, 2 * turning + resting)]
    return [*first, *(i + (turning if i < turning else resting) for i in first)]


def inverse_order(order: list[int] | None) -> list[int]:
    """For each channel of TransformerLens, the index of ours."""
    assert order is not None
    return sorted(range(len(order)), key=order.__getitem__)


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor converted to a dtype. Tensors of inference mode are copied, because autograd rejects
    them."""
    wide = tensor.detach().to(dtype)
    return wide.clone() if wide.is_inference() else wide


@torch.no_grad()
def fold_weights(
    gpt: GPT,
    unembed: Unembed,
    *,
    fold_ln: bool,
    center_writing_weights: bool,
    center_unembed: bool,
    fold_value_biases: bool,
) -> None:
    """Process the weights of a copy without changing its probabilities: move the factors and biases
    of pre-norms into the matrices that read them, subtract the means of the matrices that write to
    the stream (with LayerNorm) and of the head's logits, and move the biases of values into that of
    attention. The weights that are shared with the served model do not change."""
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
    if center_writing_weights and before and config.norm == "layernorm":
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
    if fold_value_biases:
        for block in blocks(gpt):
            _fold_value_bias(block)


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


def _bias(layer: nn.Linear) -> Tensor | None:
    return layer.bias


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
