"""Forward pass of a decode step on a GPU: launches the kernels in order.

Computes `GPT.transform` and `GPT.logits` for one new token per row, from `given` and the cache.
Every shape of a `GPTConfig` is covered. Value embeddings and nanochat's other features, except
windows, are computed by torch operations between the launches. `decoder.py` records the whole
forward pass.

In a step of up to FEW_ROWS rows, each warp holds rows of a matrix and multiplies every row of the
step by them. Larger steps are multiplied in tiles. Without tiles, one kernel computes a product and
the norm before it. With tiles, one kernel computes both only in steps of up to JOINED_ROWS rows and
for matrices with up to JOINED_BYTES bytes in a row. With batch invariance all steps use tiles,
whose sums have the same order for any number of rows.

Shapes: R rows, C = d_model, H = n_head, K = n_kv_head, D = head_dim, V = vocab_size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from logitd.model.inference.kernels.cuda import attention_kernels, kernels, sampling_kernels
from logitd.model.inference.kernels.cuda.sample import NO_TOKEN, filter_rows
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import LARGEST_LOGIT
from logitd.model.transformer.gate import smear
from logitd.model.transformer.gpt import GPT, Block, softcap

LINKED_ROWS = 64
"""Maximum number of rows of a step whose kernels overlap."""
PART_CELLS = 2**13
"""Number of elements of the keys in a part. A program holds them in registers, together with the
same number of elements of the values."""
WRITTEN_ROWS = 32
"""Maximum number of rows of a step in which the attention kernel also writes the keys and
values."""
FEW_ROWS, WIDEST = 2, 4096
"""Maximum number of rows of a step that are multiplied without tiles, and maximum number of columns
of x in such a product."""
WARPS, COLUMNS, HELD, LARGE = 8, 4, 24, 2048
"""For products without tiles: the warps of a program, the maximum number of columns of the product
that a warp computes, and the maximum number of chunks of the matrix that it holds if it computes
more than one column. In products of up to LARGE columns, each warp computes only one. If warps
compute several, fewer warps normalize x, and the next kernels have room to load their weights."""
JOINED_ROWS, JOINED_BYTES = 8, 2048
"""The kernel `product`, which both normalizes x and multiplies it, is used for steps of up to this
many rows and matrices with up to this many bytes in a row. SwiGLU has two matrices, so each may
have half as many bytes in a row. A product in parts may have this many bytes in each part of a
row."""
JOINED_TILES: Sequence[tuple[int, ...]] = ((4, 8, 128), (0, 4, 64))
"""The tiles of `product`. Each entry has the number of rows that a step must exceed, the warps of a
program, each of which normalizes one row, and the number of columns of the tile times the bytes of
a weight."""
TILES: Sequence[tuple[int, ...]] = (
    (32, 64, 64, 256, 3, 4), (16, 32, 16, 512, 3, 2), (0, 16, 16, 512, 4, 1)
)  # fmt: skip
"""The tiles of `matmul`. Each entry has the number of rows that a step must exceed, the tile's rows
and columns, the bytes of a row that are loaded at a time, the loads in flight (two for SwiGLU's two
matrices) and the warps. A tile takes at most 96 KiB of shared memory, which any recent GPU has."""
NARROW, NARROW_COLUMNS = 1024, 32
"""In products of up to NARROW columns, a tile of `matmul` has at most NARROW_COLUMNS columns, so
that there are more programs."""
DEEP, DEEP_PARTS = 2048, 4
"""The minimum number of columns of x at which the product at the end of a block is divided into
parts, and the number of parts. Different programs compute the parts."""
SPAN = 256
"""Parts begin at multiples of this number of columns of x. It is a multiple of the columns that any
tile loads at a time."""
SURVEYED = 4096
"""Number of logits that each program of `survey` reads."""
ACTIVATIONS = {
    "gelu_tanh": kernels.GELU_TANH, "gelu": kernels.GELU, "relu": kernels.RELU,
    "relu2": kernels.RELU2, "swiglu": kernels.SWIGLU,
}  # fmt: skip


def forwards(gpt: GPT, cache: KVCache, *, batch_invariant: bool) -> "Callable[[int], StepForward]":
    """The forward pass for a number of rows. The kernels of a small step overlap if the device
    supports it. The kernels of a large step would only slow each other down."""
    device = gpt.token_embedding.weight.device
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    make = partial(StepForward, gpt, cache, batch_invariant=batch_invariant)
    linked, apart = make(linked=capable), make(linked=False)
    return lambda rows: linked if rows <= LINKED_ROWS else apart


@dataclass(frozen=True, slots=True)
class Sums:
    """A residual stream (R, C) to which a product in parts (S, R, C) and its bias are still to be
    added. The next norm writes the sum into `stream`."""

    residual: Tensor
    parts: Tensor
    bias: Tensor | None
    stream: Tensor


class StepForward:
    """Computes steps of one model on one cache: a `Forward` of `decoder.py`."""

    def __init__(
        self, gpt: GPT, cache: KVCache, *, batch_invariant: bool, linked: bool = False
    ) -> None:
        """`linked`: use programmatic dependent launch, which needs compute capability 9.0."""
        self._gpt, self._cache = gpt, cache
        self._invariant = batch_invariant
        self._linked = linked
        config = gpt.config
        self._norm = kernels.LAYER_NORM if config.norm == "layernorm" else kernels.RMS_NORM
        self._block_d = _power_of_2(config.head_dim)
        weight, bias = gpt.head_parameters()
        self._head = weight[: config.vocab_size], bias
        self._final_norm = gpt.final_norm if config.final_norm else None
        self._part = max(16, PART_CELLS // self._block_d)

    def logits(
        self, given: Tensor, sampled: Tensor, logits: Tensor, *, keys: int, several: bool
    ) -> None:
        x = self._blocks(given, sampled, keys, several)
        weight, bias = self._head
        self._linear(x, weight, bias, norm=self._final_norm, out=logits)
        self._cap(logits)

    def hidden(self, given: Tensor, sampled: Tensor, hidden: Tensor, *, keys: int) -> None:
        x = self._blocks(given, sampled, keys, several=True)
        self._normed(x, self._final_norm, hidden.dtype, out=hidden)

    def head(self, hidden: Tensor) -> Tensor:
        weight, bias = self._head
        logits = torch.empty(len(hidden), len(weight), device=hidden.device)
        self._tiles(hidden.contiguous(), weight, bias, logits)
        self._cap(logits)
        return logits

    def sample(
        self, logits: Tensor, computed: Tensor, packed: Tensor, out: Tensor, *, filtered: bool
    ) -> None:
        if filtered:
            logits = filter_rows(logits, packed)
        (rows, width), device = logits.shape, logits.device
        blocks = -(-width // SURVEYED)
        best = torch.empty(rows, blocks, device=device)
        best_ids = torch.empty(rows, blocks, dtype=torch.int64, device=device)
        sums = torch.empty(rows, blocks, dtype=torch.float64, device=device)
        usable = torch.empty_like(best_ids)
        how = packed, packed.view(torch.float64)
        sizes = {"V": width, "B": blocks, "STRIDE": packed.stride(0), "BLOCK": SURVEYED}
        self._launch(
            sampling_kernels.survey, (rows, blocks), best, best_ids, sums, usable, logits, computed,
            *how, LARGEST_LOGIT, **sizes,
        )  # fmt: skip
        self._launch(
            sampling_kernels.choose, (rows,), out, best, best_ids, sums, usable, logits, *how,
            BLOCKS=_power_of_2(blocks), NO_TOKEN=NO_TOKEN, **sizes,
        )  # fmt: skip

    def _blocks(self, given: Tensor, sampled: Tensor, keys: int, several: bool) -> Tensor | Sums:
        """The residual stream (R, C) after the last block, ready for the final norm."""
        gpt, config = self._gpt, self._gpt.config
        embedding = middle = self._embedded(given, sampled)
        x: Tensor | Sums = embedding
        for layer, block in enumerate(gpt.blocks):
            assert isinstance(block, Block)
            if config.residual_mix:
                mixed = gpt.embedding_scales[layer] * embedding
                x = gpt.residual_scales[layer] * self._added(x) + mixed
            x = self._block(block, x, given, keys, several)
            if layer == config.backout_layer:
                x = middle = self._added(x)
        return self._added(x) - gpt.backout_scale * middle if config.backout else x

    def _block(
        self, block: Block, x: Tensor | Sums, given: Tensor, keys: int, several: bool
    ) -> Tensor | Sums:
        """The residual stream (R, C) after a block."""
        config = self._gpt.config
        pre = config.norm_position == "pre"
        kind = ACTIVATIONS[config.activation]
        out, up, down = block.attention_out, block.mlp_up, block.mlp_down
        qkv = self._linear(
            x, block.qkv.weight, block.qkv.bias, norm=block.attention_norm if pre else None
        )
        if isinstance(x, Sums):
            x = x.stream
        if config.has_value_embedding(block.layer):
            self._add_value_embedding(block, qkv, x, given)
        heads = self._attend(block, qkv, given, keys, several)
        after = self._linear(heads, out.weight, out.bias, residual=x)
        if not pre:
            after = self._normed(after, block.attention_norm, torch.float32)
        hidden = self._linear(
            x if config.residual == "parallel" else after, up.weight, up.bias,
            norm=block.mlp_norm if pre else None, activation=kind,
        )  # fmt: skip
        x = self._down(hidden, down, after)
        return x if pre else self._normed(x, block.mlp_norm, torch.float32)

    def _down(self, hidden: Tensor, down: nn.Linear, residual: Tensor) -> Tensor | Sums:
        """The matrix product at the end of a block. It is divided into parts if `hidden` has at
        least DEEP columns and the step is computed in tiles."""
        (rows, depth), weight = hidden.shape, down.weight
        if depth < DEEP or self._is_small(rows, depth):
            return self._linear(hidden, weight, down.bias, residual=residual)
        parts = torch.empty(DEEP_PARTS, *residual.shape, device=hidden.device)
        width = _parts(parts, depth)[1] * weight.itemsize
        joined = rows <= JOINED_ROWS and width <= JOINED_BYTES
        (self._joined if joined else self._tiles)(hidden, weight, None, parts)
        return Sums(residual, parts, down.bias, torch.empty_like(residual))

    def _embedded(self, given: Tensor, sampled: Tensor) -> Tensor:
        """Embeddings (R, C) in float32."""
        gpt, config = self._gpt, self._gpt.config
        parts = config.embedding_norm or config.smear
        positions = None
        if config.positions == "learned":
            positions = gpt.position_embedding.weight
        elif config.positions == "sinusoidal":
            positions = gpt.sinusoids
        x = torch.empty(len(given), config.d_model, device=given.device)
        self._launch(
            kernels.embed, (len(given),), x, given, sampled, gpt.token_embedding.weight,
            None if parts else positions, WIDTH=config.d_model, BLOCK=_power_of_2(config.d_model),
        )  # fmt: skip
        if parts:
            x = self._normed_embedding(x)
            previous = self._cache.put_token_ids(given[:, 0], given[:, 1], given[:, 2])
            if previous is not None:
                before = self._normed_embedding(gpt.token_embedding.weight[previous].float())
                gate, scale = gpt.smear_gate.weight, gpt.smear_scale
                x = smear(x[:, None], before[:, None], given[:, 2:3], gate, scale)[:, 0]
            if positions is not None:
                x = x + positions[given[:, 2]]
        return x

    def _normed_embedding(self, x: Tensor) -> Tensor:
        """Embeddings (R, C) of tokens in float32, after their norm if the model has one."""
        if not self._gpt.config.embedding_norm:
            return x
        return self._normed(x, self._gpt.embedding_norm, torch.float32)

    def _added(self, x: Tensor | Sums) -> Tensor:
        """The residual stream (R, C), to which a product in parts has been added."""
        return self._normed(x, None, torch.float32) if isinstance(x, Sums) else x

    def _cap(self, logits: Tensor) -> None:
        """Apply the model's logit_softcap to `logits` (R, V)."""
        if (cap := self._gpt.config.logit_softcap) is not None:
            logits.copy_(softcap(logits, cap))

    def _is_small(self, rows: int, width_in: int) -> bool:
        """True if a step is multiplied without tiles."""
        return rows <= FEW_ROWS and width_in <= WIDEST and not self._invariant

    def _linear(
        self,
        x: Tensor | Sums,
        weight: Tensor,
        bias: Tensor | None,
        *,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
        activation: int = kernels.IDENTITY,
        out: Tensor | None = None,
    ) -> Tensor:
        """activation(norm(x) @ weight.T + bias) + residual: (R, N), in float32 with a residual."""
        width_in = weight.shape[1]
        matrices = 2 if activation == kernels.SWIGLU else 1
        width = len(weight) // matrices
        rows = len(x.stream if isinstance(x, Sums) else x)
        if out is None:
            dtype = weight.dtype if residual is None else torch.float32
            out = torch.empty(rows, width, device=weight.device, dtype=dtype)
        if self._is_small(rows, width_in) and isinstance(x, Tensor):
            chunks = -(-width_in // kernels.CHUNK.value) * matrices
            columns = max(1, min(COLUMNS, HELD // chunks)) if width > LARGE else 1
            gain, shift, eps = _parameters(norm)
            self._launch(
                kernels.linear, (-(-width // (WARPS * columns)),), out, x, weight, bias, residual,
                gain, shift, eps, N=width, K=width_in, ROWS=rows, COLUMNS=columns,
                NORM=kernels.NO_NORM if norm is None else self._norm, ACTIVATION=activation,
                BLOCK_N=WARPS, num_warps=WARPS,
            )  # fmt: skip
            return out
        if rows <= JOINED_ROWS and matrices * width_in * weight.itemsize <= JOINED_BYTES:
            self._joined(x, weight, bias, out, norm, residual, activation)
            return out
        if isinstance(x, Sums) or norm is not None or x.dtype != weight.dtype:
            x = self._normed(x, norm, weight.dtype)
        self._tiles(x, weight, bias, out, residual, activation)
        return out

    def _tiles(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        residual: Tensor | None = None,
        activation: int = kernels.IDENTITY,
    ) -> None:
        """Compute `out` (R, N) = activation(x @ weight.T + bias) + residual, or the parts (S, R, N)
        of the product alone. A row's sums are the same whatever tiles are used."""
        rows, width = out.shape[-2:]
        parts, span = _parts(out, x.shape[1])
        block_m, block_n, depth, stages, warps = next(
            tile for least, *tile in TILES if rows > least
        )
        if width <= NARROW:
            block_n = min(block_n, NARROW_COLUMNS)
        self._launch(
            kernels.matmul, (-(-width // block_n), -(-rows // block_m), parts), out, x, weight,
            bias, residual, rows, N=width, K=x.shape[1], SPAN=span, PARTS=parts > 1,
            ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=depth // weight.itemsize // 2, num_warps=warps,
            num_stages=2 if activation == kernels.SWIGLU else stages,
        )  # fmt: skip

    def _joined(
        self,
        x: Tensor | Sums,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
        activation: int = kernels.IDENTITY,
    ) -> None:
        """Compute the same bits as `_normed` and `_tiles` in one launch, for few rows."""
        rows, width = out.shape[-2:]
        parts, span = _parts(out, weight.shape[1])
        warps, columns = next(tile for least, *tile in JOINED_TILES if rows > least)
        columns //= weight.itemsize
        sums, x = (x, x.residual) if isinstance(x, Sums) else (None, x)
        gain, shift, eps = _parameters(norm)
        self._launch(
            kernels.product, (-(-width // columns), 1, parts), out, x, sums and sums.parts,
            sums and sums.bias, sums and sums.stream, weight, bias, residual, gain, shift, eps, 0.0,
            rows, N=width, K=weight.shape[1], SPAN=span, PARTS=parts > 1,
            S=len(sums.parts) if sums else 0,
            NORM=kernels.NO_NORM if norm is None else self._norm, ACTIVATION=activation,
            ROWS=warps, BLOCK_M=16, BLOCK_N=columns, num_warps=warps,
        )  # fmt: skip

    def _normed(
        self,
        x: Tensor | Sums,
        norm: nn.Module | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply a norm to rows (R, C), or only convert them if there is none."""
        gain, shift, eps = _parameters(norm)
        sums, x = (x, x.residual) if isinstance(x, Sums) else (None, x)
        if out is None:
            out = torch.empty(x.shape, device=x.device, dtype=dtype)
        self._launch(
            kernels.norm, (len(x),), out, x, sums and sums.parts, sums and sums.bias,
            sums and sums.stream, gain, shift, eps, len(x), S=len(sums.parts) if sums else 0,
            K=x.shape[1], NORM=kernels.NO_NORM if norm is None else self._norm, num_warps=1,
        )  # fmt: skip
        return out

    def _add_value_embedding(self, block: Block, qkv: Tensor, x: Tensor, given: Tensor) -> None:
        """Add the gated value embeddings to the values in `qkv` (R, ...)."""
        config = self._gpt.config
        norm = block.attention_norm if config.norm_position == "pre" else None
        stream = self._normed(x, norm, qkv.dtype)
        added = block.gated_value_embedding(stream[:, None], given[:, :1])  # (R, K, 1, D)
        values = qkv[:, -config.kv_width :]
        values += added.reshape(values.shape)

    def _attend(self, block: Block, qkv: Tensor, given: Tensor, keys: int, several: bool) -> Tensor:
        """Write the keys and values of a step's rows, and attend to the slot of each row. Returns
        the outputs of the heads (R, H * D)."""
        gpt, config, cache = self._gpt, self._gpt.config, self._cache
        rotary = config.positions == "rotary"
        tables = (gpt.rope_cos, gpt.rope_sin) if rotary else (None, None)
        norms: tuple[Any, Any] = (None, None)
        if config.qk_norm:
            norms = (block.query_norm.weight, block.key_norm.weight)
        cells = cache.keys[block.layer], cache.values[block.layer]
        shape = {
            "H": config.n_head, "HK": config.n_kv_head, "D": config.head_dim,
            "L": cache.slot_length, "NORMED": config.qk_norm, "BLOCK_D": self._block_d,
        }  # fmt: skip
        apart = several or len(qkv) > WRITTEN_ROWS
        if apart:
            self._launch(
                attention_kernels.write, (len(qkv), config.n_kv_head), qkv, given, *cells, norms[1],
                *tables, config.norm_eps, **shape,
            )  # fmt: skip
        window = config.window(block.layer) or cache.slot_length
        out = torch.empty(
            len(qkv), config.n_head * config.head_dim, device=qkv.device, dtype=qkv.dtype
        )
        most = -(-cache.slot_length // self._part)
        size = (len(qkv), config.n_head, most)
        parts = torch.empty(*size, config.head_dim, device=qkv.device)
        scales = torch.empty(*size, 2, device=qkv.device)
        grid = len(qkv), config.n_kv_head, -(-keys // self._part)
        split = {"P": most, "PART": self._part, "WINDOW": window}
        self._launch(
            attention_kernels.attend, grid, parts, scales, qkv, given, *cells, *norms, *tables,
            config.norm_eps, WRITE=not apart, **split, **shape,
        )  # fmt: skip
        self._launch(
            attention_kernels.combine, (len(qkv), config.n_head), out, parts, scales, given,
            H=config.n_head, D=config.head_dim, BLOCK_D=self._block_d, BLOCK_P=_power_of_2(most),
            num_warps=1, **split,
        )  # fmt: skip
        return out

    def _launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **sizes: Any) -> None:
        options = {"launch_pdl": True} if self._linked else {}
        with torch.cuda.device_of(given[0]):  # Triton launches on the current device
            kernel[grid](*given, LINKED=self._linked, **sizes, **options)


def _parameters(norm: nn.Module | None) -> tuple[Any, Any, float]:
    """Weight, bias and epsilon of a norm."""
    if norm is None:
        return None, None, 0.0
    eps: Any = norm.eps
    return norm.weight, getattr(norm, "bias", None), eps


def _parts(out: Tensor, width_in: int) -> tuple[int, int]:
    """The number of parts of a product (R, N) or (S, R, N), and the columns of x in each."""
    parts = len(out) if out.ndim == 3 else 1
    return parts, -(-width_in // (parts * SPAN)) * SPAN


def _power_of_2(least: int) -> int:
    """The smallest power of 2 that is at least `least`."""
    return 1 << (least - 1).bit_length()
