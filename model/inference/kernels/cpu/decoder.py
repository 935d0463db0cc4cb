"""NativeDecoder: computes a step of all sequences through the whole GPT in one native call.

It calls native/decoder.cpp, which runs on a CPU in float32 and bfloat16, optionally with weights in
int8 or int4, and supports every shape of `GPTConfig` whose head_dim is a multiple of 16
(`not_covered`). `PlainDecoder` is its equivalent in plain torch. Because the residual stream is
float32 here, the two decoders agree only within the tolerance of the dtype.

Prompts run through the same code, with the same bits as if they were decoded token by token. If the
kernels lack the instructions that make this fast (`prefills_natively`), torch computes prompts
instead, unless the user chose the kernel target.
"""

import ctypes
from collections.abc import Collection, Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_void_p
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from logitd.model.device import one_thread
from logitd.model.inference.kernels.base import DecodeRows, Prefilled, PrefillInput
from logitd.model.inference.kernels.cpu.describe import Description
from logitd.model.inference.kernels.cpu.structures import (
    Cache,
    Model,
    Record,
    SampleRows,
    dtype_name,
)
from logitd.model.inference.kernels.eager.contention import ContentionMonitor, one_thread_keeps_bits
from logitd.model.inference.kernels.eager.decoder import grouped_logits
from logitd.model.inference.kernels.eager.prefill import TorchPrefill
from logitd.model.inference.kernels.eager.row_groups import RowGroups, decode_row_groups
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import DRAFTED_ROWS, Quantization
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.transformer.config import BLOCK, GPTConfig
from logitd.model.transformer.gpt import GPT

LANES = 16
MAX_HEAD_DIM = 256
PREFILL_ROWS = 256
"""Maximum number of prompt positions computed together. The buffers have this many rows in addition
to those of a decode step. The number does not affect any bits."""
FAST_PRODUCTS = {"float32": "avx512f", "bfloat16": "avx512_bf16", "quantized": "avx512_vnni"}
"""For each dtype, the processor feature that makes native products of many rows at least as fast as
torch's: 32 registers of 16 floats, or dot products of narrow dtypes."""


def not_covered(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the native decoder cannot run this model; None if it can."""
    if device.type != "cpu":
        return f"the model is on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the model is in {dtype_name(dtype)}"
    if config.head_dim % LANES or config.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {config.head_dim}, not a multiple of {LANES} up to {MAX_HEAD_DIM}"
    return None


def prefills_natively(
    dtype: torch.dtype, *, quantize: Quantization, features: Collection[str]
) -> bool:
    """True if kernels for these processor features compute prompts as fast as torch.

    bfloat16 and quantized products need only AVX2. Processors with AVX-512 but without its dot
    products are an exception: there int8 uses plain loops, and bfloat16 was never measured.
    """
    narrow = quantize != "none" or dtype == torch.bfloat16
    if narrow and "avx2" in features and "avx512f" not in features:
        return True
    return FAST_PRODUCTS[dtype_name(dtype) if quantize == "none" else "quantized"] in features


class NativeDecoder:
    """Computes a GPT on its KV cache in native code. The GPT's parameters are moved into an arena
    and must not be replaced while the decoder exists."""

    has_threads = True
    launcher = None

    def __init__(
        self,
        library: ctypes.CDLL,
        gpt: GPT,
        cache: KVCache,
        *,
        threads: int,
        quantize: Quantization = "none",
        prefills: bool = True,
        owns_weights: bool = False,
    ) -> None:
        """Raises ValueError if the model is not supported.

        prefills      compute prompts natively instead of with torch
        owns_weights  nothing else computes with the GPT before `restore_weights`, so matrices that
                      the decoder holds in another form are freed"""
        weight = gpt.token_embedding.weight
        reason = not_covered(gpt.config, weight.device, weight.dtype)
        if reason is not None:
            raise ValueError(f"the native decoder does not cover this model: {reason}")
        _declare(library)
        self._library = library
        self._description = Description(
            library, gpt, quantize, owns_weights=owns_weights and prefills
        )
        self.prefill_matches_decode = prefills
        self._torch_prefill = TorchPrefill(gpt, cache)
        # If native products of many rows are slow, so is the native head of a prompt: 8 times as
        # slow as torch in a measurement. Torch's head supports only float32.
        plain = quantize == "none" and weight.dtype is torch.float32
        self.torch_head = TorchHead(gpt) if plain and not prefills else None
        self._config = gpt.config
        described = self._description.cache(cache)
        rows = max(cache.slots, DRAFTED_ROWS)
        self.most_rows = rows + PREFILL_ROWS if prefills else rows
        self._handle = library.logitd_decoder_new(
            byref(self._description.model), byref(described), self.most_rows, threads
        )
        self._where = tuple((c_int32 * rows)() for _ in range(3))
        self._logits = torch.empty(rows, gpt.config.vocab_size)
        self._sample_rows: SampleRows | None = None
        self._stages = tuple(library.logitd_stage_names().decode().split())
        self._nanoseconds = (c_int64 * len(self._stages))()

    @property
    def mixed_pass(self) -> "NativeDecoder | None":
        return self if self.prefill_matches_decode else None

    @property
    def contended(self) -> bool:
        """True while other processes use the cores and the decoder therefore computes on one
        thread."""
        return bool(self._library.logitd_contended(self._handle))

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        """Logits (B, V) in float32 after each token. The next call overwrites the tensor."""
        count = len(token_ids)
        if count > len(self._logits):
            raise ValueError(
                f"the step has {count} tokens, but this decoder has buffers for {len(self._logits)}"
            )
        for argument, values in zip(self._where, (token_ids, slots, positions), strict=True):
            argument[:count] = list(values)
        self._library.logitd_decode(self._handle, *self._where, count, self._logits.data_ptr())
        return self._logits[:count]

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        if not self.prefill_matches_decode:
            return self._torch_prefill(pieces, contended=self.contended)
        if len(pieces) == 1 and not pieces[0].plain:
            return [self._prefill_recorded(pieces[0])]
        assert all(piece.plain for piece in pieces)
        hidden = self._prefill(pieces, Record())  # (N, d_model), all pieces
        parts = hidden.split([len(piece.token_ids) for piece in pieces])
        return [Prefilled(part) for part in parts]  # each (T, d_model)

    def mixed(
        self, pieces: Sequence[PrefillInput], ends: Sequence[int], rows: DecodeRows
    ) -> tuple[list[Tensor], Tensor]:
        assert all(piece.plain for piece in pieces)
        lengths = [len(piece.token_ids) for piece in pieces]
        *firsts, prompts = accumulate(lengths, initial=0)
        where = [array + list(more) for array, more in zip(_rows_of(pieces), rows, strict=True)]
        count = len(where[0])
        assert count <= self.most_rows
        wanted = [firsts[end] + lengths[end] - 1 for end in ends]
        wanted += range(prompts, count)
        hidden = torch.empty(count, self._config.d_model)
        logits = self._logits[: len(wanted)]
        if len(logits) < len(wanted):
            logits = torch.empty(len(wanted), self._logits.shape[1])
        array = c_int32 * count
        self._library.logitd_mixed(
            self._handle, *(array(*numbers) for numbers in where), count,
            (c_int32 * len(wanted))(*wanted), len(wanted), hidden.data_ptr(), logits.data_ptr(),
        )  # fmt: skip
        return list(hidden[:prompts].split(lengths)), logits

    def _prefill_recorded(self, piece: PrefillInput) -> Prefilled:
        config, count, weights = self._config, len(piece.token_ids), piece.weights
        states = torch.empty(config.n_layer + 1, count, config.d_model) if piece.states else None
        attention = None
        record = Record(count=count)
        if states is not None:
            record.states = states.data_ptr()
        if weights is not None:
            shape = count, len(weights.layers), len(weights.heads), weights.length
            attention = torch.zeros(shape)
            layers = _output_indices(weights.layers, config.n_layer)
            heads = _output_indices(weights.heads, config.n_head)
            record.weights = attention.data_ptr()
            record.layer_places, record.head_places = map(ctypes.addressof, (layers, heads))
            _, record.layers, record.heads, record.length = shape
        return Prefilled(self._prefill([piece], record), states, attention)

    def _prefill(self, pieces: Sequence[PrefillInput], record: Record) -> Tensor:
        """Compute pieces. Returns the final hidden states (N, d_model) of all their tokens."""
        where = _rows_of(pieces)
        count = len(where[0])
        hidden = torch.empty(count, self._config.d_model)
        rows = c_int32 * count
        self._library.logitd_prefill(
            self._handle, *(rows(*numbers) for numbers in where), count, byref(record),
            hidden.data_ptr(),
        )  # fmt: skip
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        if self.torch_head is not None:
            return self.torch_head(hidden, contended=self.contended)
        rows = hidden.float().contiguous()
        logits = torch.empty(len(hidden), self._logits.shape[1])
        self._library.logitd_head(self._handle, rows.data_ptr(), len(hidden), logits.data_ptr())
        return logits

    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        """Sample a token from each row of `logits` (R, V), float32, with the same result as
        `sample_tokens` except for the rounding of a sum."""
        count = len(sampling)
        where = (logits.data_ptr(), logits.stride(0), computed.data_ptr(), computed.stride(0))
        rows = self._sample_rows
        if rows is None or rows.where != where or rows.room < count:
            rows = self._sample_rows = SampleRows(max(count, len(self._logits)), *where)
        rows.how[:count] = sampling
        self._library.logitd_sample(self._handle, rows.address, count)
        return [None if token_id < 0 else token_id for token_id in rows.token_ids[:count].tolist()]

    def time_stages(self, enabled: bool) -> None:
        """Start or stop measuring the time of each stage. The results are the same either way."""
        total = self._nanoseconds if enabled else None
        self._library.logitd_time_stages(self._handle, total)

    def take_stage_seconds(self) -> dict[str, float]:
        """Seconds that each stage of native/clocks.h took since the last call, including the wait
        for the stage's slowest thread."""
        taken = {name: 1e-9 * ns for name, ns in zip(self._stages, self._nanoseconds, strict=True)}
        for index in range(len(self._stages)):
            self._nanoseconds[index] = 0
        return taken

    def restore_weights(self) -> None:
        self._description.originals.restore()

    def close(self) -> None:
        """End the threads. The decoder must not be used afterwards."""
        if self._handle is not None:
            self._library.logitd_decoder_delete(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()


class TorchHead:
    """Computes the head for prompts in torch, with the same bits as on one thread.

    A few rows are computed on one thread, because the decoder's own threads are running too. The
    many rows of a prompt use all of torch's threads.
    """

    def __init__(self, gpt: GPT) -> None:
        self._gpt = gpt
        self._contention = ContentionMonitor(gpt, keep_bits=lambda gpt, rows: True)
        self._keeps_bits: dict[int, bool] = {}

    def __call__(self, hidden: Tensor, *, contended: bool) -> Tensor:
        """Logits (R, V) of hidden states (R, d_model)."""
        rows = len(hidden)
        alone = torch.get_num_threads() == 1 or rows < BLOCK or not self.threads_keep_bits(rows)
        with one_thread() if alone else self._contention.watched(rows, contended):
            return grouped_logits(self._gpt, hidden, self._row_groups)

    @cached_property
    def _row_groups(self) -> RowGroups:
        with one_thread():
            return decode_row_groups(self._gpt)

    def threads_keep_bits(self, rows: int) -> bool:
        """True if the head computes this number of rows with the same bits on one thread as on all
        of torch's threads. Tested with random rows, as in `eager/contention.py`."""
        if rows not in self._keeps_bits:
            generator = torch.Generator().manual_seed(0)
            hidden = torch.randn(rows, self._gpt.config.d_model, generator=generator)
            self._keeps_bits[rows] = one_thread_keeps_bits(
                lambda: grouped_logits(self._gpt, hidden, self._row_groups)
            )
        return self._keeps_bits[rows]


def _declare(library: ctypes.CDLL) -> None:
    """Declare the types of the functions of native/decoder.cpp."""
    library.logitd_decoder_new.restype = c_void_p
    library.logitd_decoder_new.argtypes = (POINTER(Model), POINTER(Cache), c_int32, c_int32)
    library.logitd_decoder_delete.argtypes = (c_void_p,)
    library.logitd_head.argtypes = (c_void_p, c_void_p, c_int32, c_void_p)
    rows = (*(POINTER(c_int32),) * 3, c_int32)  # token ids, slots, positions, count
    library.logitd_decode.argtypes = (c_void_p, *rows, c_void_p)
    library.logitd_prefill.argtypes = (c_void_p, *rows, POINTER(Record), c_void_p)
    library.logitd_mixed.argtypes = (
        c_void_p, *rows, POINTER(c_int32), c_int32, c_void_p, c_void_p
    )  # fmt: skip
    library.logitd_sample.argtypes = (c_void_p, c_void_p, c_int32)
    library.logitd_contended.argtypes = (c_void_p,)
    library.logitd_time_stages.argtypes = (c_void_p, c_void_p)
    library.logitd_stage_names.restype = c_char_p


def _rows_of(pieces: Sequence[PrefillInput]) -> tuple[list[int], list[int], list[int]]:
    """Token ids, slots and positions of all tokens of the pieces."""
    token_ids: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    for piece in pieces:
        token_ids += piece.token_ids
        slots += [piece.slot] * len(piece.token_ids)
        positions += range(piece.start, piece.start + len(piece.token_ids))
    return token_ids, slots, positions


def _output_indices(chosen: Sequence[int], count: int) -> ctypes.Array[c_int32]:
    """For each of `count` layers or heads, its index in `chosen`, or -1."""
    indices = (c_int32 * count)(*([-1] * count))
    for position, index in enumerate(chosen):
        indices[index] = position
    return indices
