"""GPT: one forward pass for training, prefill and decode.

`GPT.transform` takes token ids at explicit positions and returns the final hidden states. Its
argument `attend` computes attention, with keys and values from the call alone
(`model/transformer/attention.py`) or also from the cache (`model/inference/kv_cache.py`).
`GPT.forward` runs `transform` over whole sequences and can return intermediate results.

This one class covers every shape of a `GPTConfig`; no family of models has a subclass.

Shapes: B sequences, T positions, C = d_model, H = n_head, K = n_kv_head, D = head_dim, V =
vocab_size.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitd.model.transformer.activation import activate
from logitd.model.transformer.attention import Attend, CausalAttend, RecordingAttend
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gate import SMEAR_WIDTH, VALUE_GATE_WIDTH, leading_gate, smear
from logitd.model.transformer.rotary import TABLE_ROWS, rotary_tables, rotate
from logitd.model.transformer.tap import UNTAPPED, Tap

HEAD_ROWS = 1024
"""Number of rows of a bfloat16 or float16 head that are converted to float32 at a time. They stay
in the processor's cache."""


@dataclass(frozen=True)
class GPTOutput:
    """The results of a forward pass. Optional results are None unless requested."""

    logits: Tensor  # (B, T, V); row t predicts token t + 1
    hidden_states: Tensor | None = None  # (n_layer + 1, B, T, C): embeddings, then each block
    attentions: Tensor | None = None  # (n_layer, B, H, T, T)


class GPT(nn.Module):
    """A decoder-only Transformer of the shape `config`, with GPT-2's initial weights."""

    sinusoids: Tensor  # (context_length, C)
    rope_cos: Tensor  # (context_length, D / 2)
    rope_sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.padded_vocab_size, config.d_model)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        if config.embedding_norm:
            self.embedding_norm = _norm(config)
        if config.smear:
            self.smear_gate = nn.Linear(min(SMEAR_WIDTH, config.d_model), 1, bias=False)
            self.smear_scale = nn.Parameter(torch.empty(1))
        if config.residual_mix:
            self.residual_scales = nn.Parameter(torch.empty(config.n_layer))
            self.embedding_scales = nn.Parameter(torch.empty(config.n_layer))
        if config.backout:
            self.backout_scale = nn.Parameter(torch.empty(1))
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.final_norm = _norm(config) if config.final_norm else nn.Identity()
        if not config.tied_head:
            self.head = nn.Linear(config.d_model, config.padded_vocab_size, bias=config.head_bias)
        elif config.head_bias:
            self.add_module("head", HeadBias(config.padded_vocab_size))
        self.reset_tables()
        self.reset_parameters()

    def forward(
        self,
        token_ids: Tensor,  # (B, T)
        *,
        hidden_states: bool = False,
        attentions: bool = False,
    ) -> GPTOutput:
        """Run whole sequences from position 0."""
        recording = RecordingAttend() if attentions else None
        attend = recording or CausalAttend(self.config.dropout if self.training else 0.0)
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        states: list[Tensor] | None = [] if hidden_states else None
        x = self.transform(token_ids, positions.expand_as(token_ids), attend, states)
        return GPTOutput(
            logits=self.logits(x),
            hidden_states=torch.stack(states) if states is not None else None,
            attentions=torch.stack(recording.probs) if recording else None,
        )

    def transform(
        self,
        token_ids: Tensor,  # (B, T)
        positions: Tensor,  # (B, T)
        attend: Attend,
        states: list[Tensor] | None = None,
        tap: Tap = UNTAPPED,
        previous_ids: Tensor | None = None,  # (B, T)
    ) -> Tensor:
        """The final hidden states (B, T, C) of tokens at their positions, ready for `logits`.

        If `states` is given, the residual stream after the embeddings and after each block is
        appended to it, before the final norm. `tap` is called with every stage and may change it,
        except scores and attention weights, which `attend` computes. `previous_ids` has the token
        before each of `token_ids`, for `smear`; None means that the call has whole sequences from
        position 0.
        """
        config = self.config
        x = self.embed(token_ids, positions, previous_ids)
        rotation = None
        if config.positions == "rotary":
            rotation = (
                self.rope_cos[positions].unsqueeze(1),  # (B, 1, T, D / 2)
                self.rope_sin[positions].unsqueeze(1),
            )
        x = tap(None, "embedding", self.embedding_dropout(x))
        if states is not None:
            states.append(x)
        embedding = middle = x
        for layer, block in enumerate(self.blocks):
            if config.residual_mix:
                x = self.residual_scales[layer] * x + self.embedding_scales[layer] * embedding
                x = tap(layer, "input", x)
            x = block(x, token_ids, rotation, attend, tap)
            if states is not None:
                states.append(x)
            if layer == config.backout_layer:
                middle = x
        if config.backout:
            x = tap(None, "backout", x - self.backout_scale * middle)
        return tap(None, "final_norm", self.final_norm(x))

    def embed(
        self, token_ids: Tensor, positions: Tensor, previous_ids: Tensor | None = None
    ) -> Tensor:
        """The residual stream (B, T, C) that enters the blocks, without dropout. The arguments are
        the same as for `transform`."""
        x = self._token_vectors(token_ids)
        if self.config.smear:
            if previous_ids is None:
                before = F.pad(x[:, :-1], (0, 0, 1, 0))
            else:
                before = self._token_vectors(previous_ids)
            x = smear(x, before, positions, self.smear_gate.weight, self.smear_scale)
        if self.config.positions == "learned":
            x = x + self.position_embedding(positions)
        elif self.config.positions == "sinusoidal":
            x = x + self.sinusoids[positions]
        return x

    def _token_vectors(self, token_ids: Tensor) -> Tensor:
        x: Tensor = self.token_embedding(token_ids)
        return self.embedding_norm(x) if self.config.embedding_norm else x

    def logits(self, x: Tensor) -> Tensor:
        """The logits (..., V) of final hidden states (..., C), excluding padded ids."""
        weight, bias = self.head_parameters()
        vocab_size = self.config.vocab_size
        narrow = weight.dtype in (torch.bfloat16, torch.float16)
        if narrow and not self.training:
            logits = _full_precision(x, weight[:vocab_size])
            if bias is not None:
                logits.add_(bias[:vocab_size])
        else:
            logits = F.linear(x, weight, bias)[..., :vocab_size]
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)

    def head_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The head's matrix (padded_vocab_size, C), which may be the embedding, and its bias
        (padded_vocab_size) or None."""
        weight = self.token_embedding.weight if self.config.tied_head else self.head.weight
        return weight, self.head.bias if self.config.head_bias else None

    def reset_tables(self) -> None:
        """Compute the constant position tables again. They are not part of a checkpoint."""
        config, device = self.config, self.token_embedding.weight.device
        if device.type == "meta":  # tables are computed once the model is on a real device
            return
        if config.positions == "sinusoidal":
            table = sinusoidal_table(config.context_length, config.d_model, device)
            self.register_buffer("sinusoids", table, persistent=False)
        elif config.positions == "rotary":
            cos, sin = rotary_tables(config, device)
            self.register_buffer("rope_cos", cos, persistent=False)
            self.register_buffer("rope_sin", sin, persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw GPT-2's initial weights from N(0, 0.02). Projections into the residual stream are
        divided by sqrt(2 * n_layer), and biases are 0. The trainer draws different weights
        (`model/training/optim/optimizers.py`). Learned scales begin at nanochat's values."""
        if self.config.smear:
            self.smear_scale.zero_()
        if self.config.residual_mix:
            depth = torch.linspace(0, 1, self.config.n_layer, device=self.residual_scales.device)
            self.residual_scales.copy_(1.15 - 0.10 * depth)
            self.embedding_scales.copy_(0.20 - 0.15 * depth)
        if self.config.backout:
            self.backout_scale.fill_(0.2)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=0.02)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            for projection in (block.attention_out, block.mlp_down):
                projection.weight.div_(math.sqrt(2 * self.config.n_layer))

    def parameter_count(self) -> int:
        """Number of parameters, including padded rows. A tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


class HeadBias(nn.Module):
    """The bias of a head that shares the embedding's matrix. It is a module so that its parameter
    has the usual name `head.bias`."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(rows))


class Block(nn.Module):
    """One Transformer block: attention and feed-forward, added to the residual stream one after the
    other or in parallel."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.attention_norm = _norm(config)
        # One matrix for all three: rows of the queries, then of the keys, then of the values.
        self.qkv = nn.Linear(config.d_model, config.qkv_width, bias=config.qkv_bias)
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.key_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        if config.has_value_embedding(layer):
            self.value_embedding = nn.Embedding(config.padded_vocab_size, config.kv_width)
            self.value_gate = nn.Linear(
                min(VALUE_GATE_WIDTH, config.d_model), config.n_kv_head, bias=False
            )
        self.attention_out = nn.Linear(
            config.n_head * config.head_dim, config.d_model, bias=config.bias
        )
        self.mlp_norm = _norm(config)
        # With swiglu: first the rows of the gate, then the rows that the gate multiplies.
        up_rows = config.d_ff * (2 if config.activation == "swiglu" else 1)
        self.mlp_up = nn.Linear(config.d_model, up_rows, bias=config.bias)
        self.mlp_down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        token_ids: Tensor,  # (B, T)
        rotation: tuple[Tensor, Tensor] | None,
        attend: Attend,
        tap: Tap = UNTAPPED,
    ) -> Tensor:
        layer = self.layer
        if self.config.norm_position == "pre":
            h = tap(layer, "attention.norm", self.attention_norm(x))
            h = self.residual_dropout(self.attention(h, token_ids, rotation, attend, tap))
            after = tap(layer, "middle", x + h)
            before_mlp = x if self.config.residual == "parallel" else after
            h = tap(layer, "mlp.norm", self.mlp_norm(before_mlp))
            return tap(layer, "output", after + self.residual_dropout(self.mlp(h, tap)))
        h = self.residual_dropout(self.attention(x, token_ids, rotation, attend, tap))
        x = tap(layer, "middle", self.attention_norm(x + h))
        return tap(layer, "output", self.mlp_norm(x + self.residual_dropout(self.mlp(x, tap))))

    def attention(
        self,
        x: Tensor,
        token_ids: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        attend: Attend,
        tap: Tap = UNTAPPED,
    ) -> Tensor:
        config, layer = self.config, self.layer
        batch, time, _ = x.shape
        heads = self.qkv(x).view(batch, time, -1, config.head_dim)  # (B, T, H + 2K, D)
        q, k, v = heads.transpose(1, 2).split(  # (B, H, T, D), (B, K, T, D), (B, K, T, D)
            [config.n_head, config.n_kv_head, config.n_kv_head], dim=1
        )
        if config.has_value_embedding(layer):
            v = v + self.gated_value_embedding(x, token_ids)
        q, k = tap(layer, "attention.q_raw", q), tap(layer, "attention.k_raw", k)
        if config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        q, k = tap(layer, "attention.q", q), tap(layer, "attention.k", k)
        v = tap(layer, "attention.v", v)
        out = attend(layer, q, k, v, config.window(layer))  # (B, H, T, D)
        out = tap(layer, "attention.heads", out)
        if tap.wants(layer, "attention.head_out"):
            tap(layer, "attention.head_out", self.head_parts(out))
        out = self.attention_out(out.transpose(1, 2).reshape(batch, time, -1))  # (B, T, C)
        return tap(layer, "attention.out", out)

    def head_parts(self, heads: Tensor) -> Tensor:
        """The part (B, H, T, C) that each head adds to the output of attention, computed from the
        heads' outputs (B, H, T, D). These parts and the projection's bias add up to the output."""
        weight = self.attention_out.weight  # (C, H * D)
        per_head = weight.view(len(weight), -1, self.config.head_dim)  # (C, H, D)
        return torch.einsum("bhtd,chd->bhtc", heads, per_head)

    def gated_value_embedding(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """The value embedding of each token (B, K, T, D), multiplied by a gate that depends on the
        residual stream. It is added to the values.

        The gate is 2 * sigmoid(.), so an untrained gate leaves the embedding unchanged. Source:
        value embeddings of modded-nanogpt, gated as in nanochat.
        """
        batch, time = token_ids.shape
        values = self.value_embedding(token_ids)  # (B, T, K * D)
        values = values.view(batch, time, self.config.n_kv_head, self.config.head_dim)
        gate = (2 * leading_gate(x, self.value_gate.weight)).to(values.dtype)  # (B, T, K)
        return (gate.unsqueeze(-1) * values).transpose(1, 2)  # (B, K, T, D)

    def mlp(self, x: Tensor, tap: Tap = UNTAPPED) -> Tensor:
        layer = self.layer
        h = self.mlp_up(x)  # (B, T, d_ff), or twice that for swiglu
        if tap.wants(layer, "mlp.pre") or tap.wants(layer, "mlp.up"):
            h = self._tap_units(h, tap)
        # Training and GPUs use torch's fused kernels, because their results need not be exactly
        # reproducible.
        h = activate(h, self.config.activation, fused=h.requires_grad or not h.is_cpu)
        return tap(layer, "mlp.out", self.mlp_down(tap(layer, "mlp.hidden", h)))

    def _tap_units(self, h: Tensor, tap: Tap) -> Tensor:
        """Pass the units (B, T, d_ff) to a tap. With swiglu, `h` is twice as wide, and its two
        halves are passed separately."""
        if self.config.activation != "swiglu":
            return tap(self.layer, "mlp.pre", h)
        gate, up = h.split(self.config.d_ff, dim=-1)
        shown = tap(self.layer, "mlp.pre", gate), tap(self.layer, "mlp.up", up)
        return h if shown[0] is gate and shown[1] is up else torch.cat(shown, dim=-1)


def sinusoidal_table(length: int, d_model: int, device: torch.device) -> Tensor:
    """The fixed position vectors (length, d_model) of Vaswani et al. (2017): sines in the even
    channels, cosines in the odd ones."""
    channels = torch.arange(0, d_model, 2, device=device, dtype=torch.float64) / d_model
    table = torch.empty(length, d_model, device=device)
    for start in range(0, length, TABLE_ROWS):
        rows = slice(start, min(start + TABLE_ROWS, length))
        positions = torch.arange(rows.start, rows.stop, device=device)
        angles = positions[:, None] * 10_000.0**-channels
        pairs = torch.stack((angles.sin(), angles.cos()), dim=-1)  # (rows, ceil(C / 2), 2)
        table[rows] = pairs.flatten(1)[:, :d_model].float()
    return table


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in float32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cap * torch.tanh(wide / cap)


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


def _full_precision(x: Tensor, weight: Tensor) -> Tensor:
    """Float32 logits (..., V), computed from x (..., C) and a weight (V, C) in bfloat16 or float16.

    If logits were rounded to bfloat16, the two likeliest tokens would have equal logits at about
    one position in a hundred. On a GPU, torch can multiply such dtypes and return float32; on a CPU
    it cannot, so the weight is converted.
    """
    if x.is_cuda:
        product = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32)
        return product.view(*x.shape[:-1], len(weight))
    wide = x.float()
    logits = wide.new_empty((*x.shape[:-1], len(weight)))
    for start in range(0, len(weight), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        logits[..., rows] = F.linear(wide, weight[rows].float())
    return logits
