"""Describe: builds the structures that describe a GPT and its KV cache to the native code.

It collects the address of every tensor, quantizes or compresses matrices, and keeps alive all
tensors that the structures point to. The GPT's parameters are moved into an arena, so that a step
reads memory in order.
"""

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from logitd.model.inference.kernels.cpu.compress import (
    compress_matrix,
    decompress_matrix,
    most_bytes,
)
from logitd.model.inference.kernels.cpu.originals import Originals, Restore
from logitd.model.inference.kernels.cpu.quantize import (
    Format,
    round_matrix,
    stored_shape,
)
from logitd.model.inference.kernels.cpu.structures import (
    ACTIVATIONS,
    KINDS,
    Cache,
    Layer,
    Matrix,
    Model,
    Norm,
    dtype_name,
)
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import Quantization, head_quantization
from logitd.model.transformer.arena import Arena, move_to_arena, room_for_bytes
from logitd.model.transformer.gate import VALUE_GATE_WIDTH
from logitd.model.transformer.gpt import GPT, Block, sinusoidal_table
from logitd.model.transformer.rotary import rotary_tables

SAME_IN_CONFIG = "n_layer n_head n_kv_head head_dim d_model d_ff vocab_size qk_norm residual_mix"
"""Fields of `Model` that have the name and the value of a field of `GPTConfig`."""


class Description:
    """The structures of one native decoder and the memory they point to.

    model      structure of the GPT, whose parameters must not be replaced while this object exists
    originals  the GPT's own matrices that the decoder holds in another form
    """

    def __init__(
        self, library: ctypes.CDLL, gpt: GPT, quantize: Quantization, *, owns_weights: bool = False
    ) -> None:
        """`owns_weights`: free the GPT's matrices that the decoder holds in another form."""
        self._alive: list[Tensor | Arena] = [move_to_arena(gpt)]
        self._library = library
        self._quantize = quantize
        self.originals = Originals(library, release=owns_weights)
        self._tiles = bool(library.logitd_has_tiles())
        self._strips = bool(library.logitd_has_strips())
        self._quantized = None
        if quantize != "none":
            # Contiguous, so that a step reads memory in order.
            sizes = quantized_bytes(gpt, quantize, strips=self._strips)
            self._quantized = Arena(sum(map(room_for_bytes, sizes)))
        self._cells = KINDS[dtype_name(gpt.token_embedding.weight.dtype)]
        self._compressed = None
        if quantize == "none" and self._cells == KINDS["bfloat16"] and self._tiles:
            most = [most_bytes(*matrix.shape) for matrix in matrices(gpt)]
            self._compressed = Arena(sum(map(room_for_bytes, most)))
        self.model, self._layers = self._describe(gpt)

    def cache(self, cache: KVCache) -> Cache:
        described = Cache(
            keys=self._keep(cache.keys),
            values=self._keep(cache.values),
            slots=cache.slots,
            slot_length=cache.slot_length,
            kind=KINDS[dtype_name(cache.keys.dtype)],
        )
        if cache.key_scales is not None and cache.value_scales is not None:
            described.key_scales = self._keep(cache.key_scales)
            described.value_scales = self._keep(cache.value_scales)
        if cache.token_ids is not None:
            described.token_ids = self._keep(cache.token_ids)
        return described

    def _describe(self, gpt: GPT) -> tuple[Model, ctypes.Array[Layer]]:
        config, cpu = gpt.config, torch.device("cpu")
        layers = (Layer * config.n_layer)(*(self._layer(gpt, block) for block in gpt.blocks))
        rope: list[int | None] = [None, None]
        if config.positions == "rotary":
            rope = [self._keep(table) for table in rotary_tables(config, cpu)]
        sinusoids = None
        if config.positions == "sinusoidal":
            sinusoids = sinusoidal_table(config.context_length, config.d_model, cpu)
        model = Model(
            **{name: getattr(config, name) for name in SAME_IN_CONFIG.split()},
            kind=self._kind,
            cells=self._cells,
            post_norm=config.norm_position == "post",
            parallel=config.residual == "parallel",
            rotary=config.positions == "rotary",
            final_norm_on=config.final_norm,
            value_gate_width=min(VALUE_GATE_WIDTH, config.d_model),
            activation=ACTIVATIONS[config.activation],
            smear_width=gpt.smear_gate.in_features if config.smear else 0,
            backout_layer=-1 if config.backout_layer is None else config.backout_layer,
            smear_scale=gpt.smear_scale.item() if config.smear else 0.0,
            backout_scale=gpt.backout_scale.item() if config.backout else 0.0,
            logit_softcap=config.logit_softcap or 0.0,
            token_embedding=self._keep(gpt.token_embedding.weight),
            position_embedding=(
                self._keep(gpt.position_embedding.weight) if config.positions == "learned" else None
            ),
            sinusoids=None if sinusoids is None else self._keep(sinusoids),
            rope_cos=rope[0],
            rope_sin=rope[1],
            smear_gate=self._floats(gpt.smear_gate.weight) if config.smear else None,
            layers=layers,
            embedding_norm=self._norm(gpt.embedding_norm) if config.embedding_norm else Norm(),
            final_norm=self._norm(gpt.final_norm),
            head=self._head(gpt),
        )
        return model, layers

    def _layer(self, gpt: GPT, block: nn.Module) -> Layer:
        assert isinstance(block, Block)
        layer, mixed = block.layer, gpt.config.residual_mix
        valued = block.config.has_value_embedding(layer)
        return Layer(
            attention_norm=self._norm(block.attention_norm),
            query_norm=self._norm(block.query_norm) if block.config.qk_norm else Norm(),
            key_norm=self._norm(block.key_norm) if block.config.qk_norm else Norm(),
            mlp_norm=self._norm(block.mlp_norm),
            qkv=self._linear(block.qkv),
            attention_out=self._linear(block.attention_out),
            mlp_up=self._linear(block.mlp_up),
            mlp_down=self._linear(block.mlp_down),
            value_embedding=self._keep(block.value_embedding.weight) if valued else None,
            value_gate=self._floats(block.value_gate.weight) if valued else None,
            window=gpt.config.window(layer) or 0,
            stream_scale=gpt.residual_scales[layer].item() if mixed else 1.0,
            embedding_scale=gpt.embedding_scales[layer].item() if mixed else 0.0,
        )

    def _norm(self, norm: nn.Module) -> Norm:
        if isinstance(norm, nn.Identity):
            return Norm()
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        centered = isinstance(norm, nn.LayerNorm)
        bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        return Norm(
            weight=self._floats(norm.weight),
            bias=None if bias is None else self._floats(bias),
            eps=norm.eps,
            centered=centered,
        )

    def _linear(self, linear: nn.Linear) -> Matrix:
        matrix, restore = self._matrix(linear.weight, linear.bias, self._quantize)
        if restore is not None:
            self.originals.add(linear, restore)
        return matrix

    def _head(self, gpt: GPT) -> Matrix:
        weight, (_, bias) = head_matrix(gpt), gpt.head_parameters()
        bias = None if bias is None else bias[: len(weight)]  # without padding, like the weight
        matrix, restore = self._matrix(weight, bias, head_quantization(self._quantize))
        # Keep the original if the embedding uses it, or if it has padding rows, which `restore`
        # lacks.
        stays = gpt.config.tied_head or len(weight) < len(gpt.head.weight)
        if restore is not None and not stays:
            self.originals.add(gpt.head, restore)
        return matrix

    def _matrix(
        self, weight: Tensor, bias: Tensor | None, quantize: Quantization
    ) -> tuple[Matrix, Restore | None]:
        """Convert a matrix to the form that the native code computes with. Returns the description
        of the matrix, and a function that restores the original; None instead of the function if
        the matrix is not converted."""
        rows, width = weight.shape
        described = Matrix(
            bias=None if bias is None else self._floats(bias), rows=rows, width=width
        )
        if quantize == "none":
            described.kind = self._cells
            described.weights = self._keep(weight)
            return described, self._compress(weight, described)
        assert self._quantized is not None
        form = quantized_form(quantize, strips=self._strips)
        described.kind = KINDS[form]
        # Rounds `weight` in place too, so that torch computes with the same weights.
        stored = self._quantized.make_room(stored_shape(weight, form))
        quantized = round_matrix(self._library, weight, form, stored)
        described.weights = self._keep(stored)
        described.scale = self._keep(quantized.scale)
        described.row_sum = self._keep(quantized.row_sum)
        return described, lambda original: original.copy_(quantized.dequantized())

    def _compress(self, weight: Tensor, described: Matrix) -> Restore | None:
        """Compress a matrix if worthwhile, and change its description. Returns the function that
        restores it; None if it is unchanged."""
        if self._compressed is None:
            return None
        compressed = compress_matrix(self._library, weight, self._compressed.rest())
        if compressed is None:
            return None
        self._compressed.make_room(compressed.stored.to("meta"))
        described.kind = KINDS["compressed"]
        described.weights = self._keep(compressed.stored)
        described.strips = self._keep(compressed.strips)
        return partial(decompress_matrix, self._library, compressed)

    @property
    def _kind(self) -> int:
        """The format of activations in matrix products."""
        if self._compressed is not None:
            return KINDS["compressed"]
        if self._quantize == "none":
            return self._cells
        return KINDS[quantized_form(self._quantize, strips=self._strips)]

    def _floats(self, tensor: Tensor) -> int:
        return self._keep(tensor.detach().float().clone())

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor alive and return its address."""
        assert tensor.is_contiguous()
        self._alive.append(tensor)
        return tensor.data_ptr()


def matrices(gpt: GPT) -> Iterator[Tensor]:
    """The weights of all matrix products, in the order of the forward pass."""
    for block in gpt.blocks:
        assert isinstance(block, Block)
        for linear in (block.qkv, block.attention_out, block.mlp_up, block.mlp_down):
            yield linear.weight
    yield head_matrix(gpt)


def quantized_form(quantize: Literal["int8", "int4"], *, strips: bool) -> Format:
    """The format of quantized matrices. `strips`: whether the kernels can multiply strips."""
    return "int8_strips" if quantize == "int8" and strips else quantize


def quantized_bytes(gpt: GPT, quantize: Literal["int8", "int4"], *, strips: bool) -> Iterator[int]:
    """Bytes of each matrix of `matrices(gpt)` after quantization."""
    *blocks, head = matrices(gpt)
    form = quantized_form(quantize, strips=strips)
    for matrix in blocks:
        yield stored_shape(matrix, form).nbytes
    yield stored_shape(head, quantized_form("int8", strips=strips)).nbytes


def head_matrix(gpt: GPT) -> Tensor:
    """The head's weights without padding rows: (vocab_size, d_model)."""
    weight, _ = gpt.head_parameters()
    return weight[: gpt.config.vocab_size]
