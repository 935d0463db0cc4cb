"""Frozen blocks: blocks whose attention weights, norm scales and gates are held at their values.

With these values held, a block is a linear map of its input, up to constants (biases, value
embeddings):

    norm         x -> w (x - mean(x)) / s + b with the s of this forward pass (RMSNorm: no mean)
    attention    z_t = sum_s p_ts v_s with the weights p of this forward pass
    activation   act(u) = (act(u) / u) u with the ratio of this forward pass; in SwiGLU, half
                 of the product silu(gate) up counts for the gate and half for up

These are the rules of RelP (Jafari et al., 2025), with which Arora et al. (2026, arXiv 2601.22594)
trace single neurons. Unlike the slope act'(u), the ratio act(u) / u leaves no remainder.

A part is a token's vector, a head or a neuron at one position. It carries the amount <g, o - m> of
the target, where g is the gradient of the target with respect to the part's output o, and m is the
mean of o over the positions. There are two gradients. `VALUES` follows the values only. `ATTENTION`
follows every path that changes at least one attention weight, because the weights p affect the
target too. Their effect is measured against the weights p' of a text whose inputs are all means.
With a_s = <g, v_s> it is exactly

    sum_s (p_s - p'_s) a_s = sum_s w_s (score_s - score'_s),   w_s = l_s (a_s - sum l a / sum l)

where l_s = (p_s - p'_s) / (log p_s - log p'_s) is the logarithmic mean. A difference of scores
divides evenly between query and key: q k - q' k' = (q + q')(k - k')/2 + (q - q')(k + k')/2. For
small changes w is the gradient of the softmax. But unlike that gradient, w does not vanish if a
head attends to a single position.

Shapes: T positions, n of them active, G = 2 gradients, C = d_model, H = n_head, K = n_kv_head, D =
head_dim, F = d_ff.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logitd.model.inference.attribution.kept import freeze_norm, root_mean_square
from logitd.model.transformer.attention import attention_scores, visible_keys
from logitd.model.transformer.config import Activation
from logitd.model.transformer.gpt import GPT, Block
from logitd.model.transformer.rotary import rotate

VALUES, ATTENTION = 0, 1
GRADIENTS = 2

STAGES = frozenset(
    (
        *(f"attention.{name}" for name in ("q_raw", "k_raw", "q", "k", "v", "heads", "out")),
        *("middle", "mlp.pre", "mlp.up", "mlp.hidden", "mlp.out"),
    )
)


@dataclass(slots=True)
class Chosen:
    """The P parts of a sublayer that belong to a circuit, in order of position.

    positions  their positions (P)
    indices    their heads or neurons (P)
    carried    the amount that each part carries (G, P)
    gradients  sum of both gradients with respect to the output of a head (P, D) or neuron (P)
    """

    positions: Tensor
    indices: Tensor
    carried: Tensor
    gradients: Tensor


class Choice:
    """Chooses the parts that carry more than `threshold` according to either gradient.

    count     number of chosen parts
    largest   the largest amount that a part carries, if the threshold is infinite
    left_out  sums (G) of the amounts that all other parts carry
    chosen    the heads ("heads") and neurons ("mlp") of each layer
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.count = 0
        self.largest = 0.0
        self.left_out = torch.zeros(GRADIENTS, dtype=torch.float64)
        self.chosen: dict[tuple[int, str], Chosen] = {}

    def keep(self, carried: Tensor) -> Tensor:
        """Choose parts by the amounts `carried` (G, ...) that they carry. Returns the mask (...) of
        the chosen parts."""
        kept = (carried.abs() > self.threshold).any(0)
        self.count += int(kept.sum())
        if carried.numel():
            self.largest = max(self.largest, carried.abs().max().item())
        self.leave_out(carried * ~kept)
        return kept

    def leave_out(self, carried: Tensor) -> None:
        """Add `carried` (G, ...), the amounts that unchosen parts carry, to `left_out`."""
        self.left_out += carried.flatten(1).sum(1, dtype=torch.float64).cpu()

    def keep_sublayer(
        self, key: tuple[int, str], rows: Tensor, carried: Tensor, gradients: Tensor
    ) -> Tensor:
        """Choose parts of a sublayer at the positions `rows`, by the amounts `carried` (G, n,
        parts) that they carry. Stores the chosen parts with their `gradients` (G, n, parts, ...),
        and returns the mask (n, parts) of the chosen parts."""
        kept = self.keep(carried)
        at, indices = kept.nonzero(as_tuple=True)
        self.chosen[key] = Chosen(
            rows[at], indices, carried[:, at, indices], gradients[:, at, indices].sum(0)
        )
        return kept


class FrozenBlock:
    """One block, held at the values of one text's forward pass.

    x     the block's input (T, C)
    kept  values of the text at STAGES
    """

    def __init__(
        self,
        gpt: GPT,
        layer: int,
        x: Tensor,
        kept: Mapping[str, Tensor],
        rotation: tuple[Tensor, Tensor] | None,
    ) -> None:
        block, config = gpt.blocks[layer], gpt.config
        assert isinstance(block, Block)
        self.config, self.layer = config, layer
        self.group = config.n_head // config.n_kv_head
        self.block, self._dtype = block, x.dtype
        self._rotation = None if rotation is None else (rotation[0][0, 0], rotation[1][0, 0])
        self.is_post = config.norm_position == "post"
        self.is_parallel = config.residual == "parallel"
        middle = kept["middle"]
        normed = x, x if self.is_parallel else middle
        if self.is_post:
            normed = x + kept["attention.out"], middle + kept["mlp.out"]
        self.attention_norm = freeze_norm(block.attention_norm, normed[0])
        self.mlp_norm = freeze_norm(block.mlp_norm, normed[1])
        self.q, self.k, self.v = (kept[f"attention.{name}"] for name in "qkv")  # (H or K, T, D)
        self.heads = kept["attention.heads"].transpose(0, 1)  # (T, H, D)
        self.mean_heads = self.heads.mean(0)
        self.hidden = kept["mlp.hidden"]  # (T, F)
        self.mean_hidden = self.hidden.mean(0)
        # Differences of heads and neurons from their means, and an upper bound (T) of the amount
        # that one of them can carry with a gradient of length 1, by the Cauchy-Schwarz inequality.
        self._written = [out - out.mean(0) for out in (kept["attention.out"], kept["mlp.out"])]
        lengths = (self.heads - self.mean_heads).norm(dim=-1)
        columns = self.weight(block.attention_out).unflatten(1, (config.n_head, -1))
        most_of_heads = (lengths * columns.norm(dim=(0, 2))).amax(-1)
        columns = self.weight(block.mlp_down).norm(dim=0)
        most_of_neurons = ((self.hidden - self.mean_hidden).abs() * columns).amax(-1)
        self.bounds = most_of_heads, most_of_neurons
        self.ratios = frozen_ratios(config.activation, kept["mlp.pre"], kept.get("mlp.up"))
        self._qk_scales: tuple[Tensor, Tensor] | None = None
        if config.qk_norm:
            raw = kept["attention.q_raw"], kept["attention.k_raw"]
            scale_q, scale_k = (root_mean_square(each, config.norm_eps) for each in raw)
            self._qk_scales = scale_q, scale_k
        self.mean_q, self.mean_k = self._of_means(x)

    def weight(self, layer: nn.Linear, rows: Tensor | slice = slice(None)) -> Tensor:
        """Rows of a layer's matrix, in float32 or wider."""
        return layer.weight.detach()[rows].to(self._dtype)

    def backward(self, g: Tensor, choice: Choice) -> Generator[None, None, Tensor]:
        """The gradients (G, T, C) with respect to the block's input, through the parts that
        `choice` keeps. `g` is the gradient with respect to the block's output. Each piece is one
        group of heads."""
        before_attention, before_mlp = self.attention_norm.backward, self.mlp_norm.backward
        if self.is_post:
            g = before_mlp(g)
            g = before_attention(g + self._through_mlp(g, choice))
            return g + (yield from self._through_attention(g, choice))
        after = g + before_mlp(self._through_mlp(g, choice))
        read = g if self.is_parallel else after
        return after + before_attention((yield from self._through_attention(read, choice)))

    def project(
        self, q: Tensor, k: Tensor, positions: Tensor | slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Apply the norm, with its frozen scale, and the rotation to queries (H, n, D) and keys (K,
        n, D) at the given positions."""
        if self._qk_scales is not None:
            q = q * self.block.query_norm.weight / self._qk_scales[0][:, positions]
            k = k * self.block.key_norm.weight / self._qk_scales[1][:, positions]
        if self._rotation is not None:
            cos, sin = self._rotation[0][positions], self._rotation[1][positions]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k

    def heads_of(self, shared: int) -> slice:
        """The group of heads that share the keys and values of index `shared`."""
        return slice(shared * self.group, (shared + 1) * self.group)

    def log_probs(self, q: Tensor, k: Tensor, shared: int, rows: Tensor) -> Tensor:
        """Logarithms (heads, n, T) of the attention weights of a group of heads at the positions
        `rows`, given the queries (H, T, D) and keys (K, T, D) of all heads."""
        length = self.q.shape[1]
        visible = visible_keys(length, length, q.device, self.config.window(self.layer))[rows]
        scores = attention_scores(q[None, self.heads_of(shared), rows], k[None, [shared]])[0]
        return scores.masked_fill(~visible, -math.inf).log_softmax(-1)

    def score_weights(self, shared: int, of_heads: Tensor, logs: Tensor, rows: Tensor) -> Tensor:
        """The weights w (heads, n, T) of a group of heads: the effects of attention scores on the
        target. They are computed from the gradient `of_heads` (n, heads, D) and the result `logs`
        of `log_probs`."""
        aligned = torch.einsum("nhd,sd->hns", of_heads, self.v[shared])
        means = self.log_probs(self.mean_q, self.mean_k, shared, rows)
        apart = (logs - means).masked_fill(logs.isneginf(), 0.0).abs().clamp(min=1e-6)
        mean = torch.maximum(logs, means).exp() * (-torch.expm1(-apart) / apart)
        center = (mean * aligned).sum(-1, keepdim=True) / mean.sum(-1, keepdim=True)
        return mean * (aligned - center)

    def _of_means(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The queries (H, T, D) and keys (K, T, D) that the block would compute if every row of its
        input (T, C) were the mean row."""
        config, block = self.config, self.block
        mean = x.mean(0).expand_as(x)
        if not self.is_post:
            mean = self.attention_norm.forward(mean)
            if (bias := getattr(block.attention_norm, "bias", None)) is not None:
                mean = mean + bias
        rows = slice((config.n_head + config.n_kv_head) * config.head_dim)
        qk = mean @ self.weight(block.qkv, rows).T
        if block.qkv.bias is not None:
            qk = qk + block.qkv.bias[rows]
        heads = qk.unflatten(-1, (-1, config.head_dim)).transpose(0, 1)  # (H + K, T, D)
        q, k = heads.split([config.n_head, config.n_kv_head])
        return self.project(q, k)

    def _strong(self, g: Tensor, choice: Choice, sublayer: int) -> Tensor:
        """The positions at which a part of attention (`sublayer` 0) or of the MLP (1) may carry
        more than the threshold; if it is infinite, the positions at which a part may carry
        anything. Counts the parts at all other positions as left out."""
        threshold = choice.threshold if math.isfinite(choice.threshold) else 0.0
        strong = g.norm(dim=-1).amax(0) * self.bounds[sublayer] > threshold
        choice.leave_out(g[:, ~strong] * self._written[sublayer][~strong])
        return strong.nonzero()[:, 0]

    def _through_mlp(self, g: Tensor, choice: Choice) -> Tensor:
        """The gradients (G, T, C) with respect to the (normed) input of the MLP."""
        rows, result = self._strong(g, choice, 1), torch.zeros_like(g)
        of_hidden = g[:, rows] @ self.weight(self.block.mlp_down)
        carried = of_hidden * (self.hidden[rows] - self.mean_hidden)
        kept = choice.keep_sublayer((self.layer, "mlp"), rows, carried, of_hidden)
        if kept.any():
            columns = kept.any(0).nonzero()[:, 0]
            of_hidden = (of_hidden * kept)[..., columns]
            result[:, rows] = self.through_units(of_hidden, rows, columns)
        return result

    def through_units(self, of_hidden: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The gradients (..., n, C) with respect to the MLP's input, computed from the gradients
        `of_hidden` (..., n, columns) with respect to some of the neurons."""
        parts = [
            (of_hidden * ratio[rows][:, columns])
            @ self.weight(self.block.mlp_up, columns + index * self.config.d_ff)
            for index, ratio in enumerate(self.ratios)
        ]
        return torch.stack(parts).sum(0)

    def _through_attention(self, g: Tensor, choice: Choice) -> Generator[None, None, Tensor]:
        """The gradients (G, T, C) with respect to the (normed) input of attention."""
        config, rows = self.config, self._strong(g, choice, 0)
        of_heads = g[:, rows] @ self.weight(self.block.attention_out)
        of_heads = of_heads.unflatten(-1, (config.n_head, config.head_dim))
        carried = (of_heads * (self.heads[rows] - self.mean_heads)).sum(-1)
        kept = choice.keep_sublayer((self.layer, "heads"), rows, carried, of_heads)
        if not kept.any():
            return torch.zeros_like(g)
        at = kept.any(1)
        rows, of_heads = rows[at], (of_heads * kept[..., None])[:, at]
        of_q, of_k = torch.zeros_like(self.q), torch.zeros_like(self.k)
        of_v = self.v.new_zeros(GRADIENTS, *self.v.shape)
        for shared in range(config.n_kv_head):
            heads = self.heads_of(shared)
            logs = self.log_probs(self.q, self.k, shared, rows)
            of_v[:, shared] = torch.einsum("hns,gnhd->gsd", logs.exp(), of_heads[:, :, heads])
            effects = self.score_weights(shared, of_heads[:, :, heads].sum(0), logs, rows)
            effects /= 2 * math.sqrt(config.head_dim)
            of_q[heads, rows] = effects @ (self.k + self.mean_k)[shared]
            queries = (self.q + self.mean_q)[heads, rows]
            of_k[shared] = (effects.transpose(1, 2) @ queries).sum(0)
            yield
        of_qk = self._before_norm(of_q, of_k)
        start = len(of_qk) * config.head_dim
        qkv = self.weight(self.block.qkv)
        result = of_v.transpose(1, 2).flatten(2) @ qkv[start:]
        result[ATTENTION] += of_qk.transpose(0, 1).flatten(1) @ qkv[:start]
        return result

    def _before_norm(self, of_q: Tensor, of_k: Tensor) -> Tensor:
        """The gradient (H + K, T, D) with respect to queries and keys before norm and rotation,
        from the gradients after both."""
        if self._rotation is not None:
            cos, sin = self._rotation
            of_q, of_k = rotate(of_q, cos, -sin), rotate(of_k, cos, -sin)
        if self._qk_scales is not None:
            of_q = of_q * self.block.query_norm.weight / self._qk_scales[0]
            of_k = of_k * self.block.key_norm.weight / self._qk_scales[1]
        return torch.cat((of_q, of_k))


def frozen_ratios(kind: Activation, pre: Tensor, up: Tensor | None) -> tuple[Tensor, ...]:
    """The ratio (T, F) of each neuron's value to its input. SwiGLU has two ratios, because half of
    the value counts for the gate and half for the unit that the gate multiplies."""
    match kind:
        case "relu":
            return ((pre > 0).to(pre.dtype),)
        case "relu2":
            return (pre.relu(),)
        case "gelu":
            return ((1 + torch.erf(pre * math.sqrt(0.5))) / 2,)
        case "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (pre + 0.044715 * pre**3)
            return ((1 + torch.tanh(inner)) / 2,)
        case "swiglu":
            assert up is not None
            gate = torch.sigmoid(pre)
            return gate * up / 2, gate * pre / 2
