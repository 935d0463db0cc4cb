"""Quantization: how much the loss of a model increases because its weights, or its keys and values,
are quantized to int8 or int4.

The serving decoders compute the loss: every token of every window goes through one decode step of
the exact decoder and one decode step of the quantized decoder. So the result includes the rounding
of activations, which a comparison of the weights would miss. The loss, in bits per byte, is defined
as in `model/training/step/validate.py`. `model/evaluation/held_out.py` chooses the text. A server
reports the increase in its banner, in /info and in its log.

Shapes: B windows, T positions, V = vocab_size.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.data.errors import DataError
from logitd.model.device import one_thread
from logitd.model.evaluation.held_out import held_out_windows
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.base import Decoder
from logitd.model.inference.kernels.select import KernelError, choose_decode_path
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.load import LoadedModel
from logitd.model.inference.options import KVCacheDType, Quantization, parse_loss_limit
from logitd.model.transformer.gpt import GPT

WARN_ABOVE = 0.005
"""A warning is shown if quantization increases the loss by more than this fraction."""

GENTLER: Mapping[Quantization, Quantization] = {"int4": "int8", "int8": "none"}
"""For each setting of `quantize`, the setting that is one step less lossy."""


@dataclass(frozen=True, slots=True)
class QuantizationLoss:
    """Bits per byte of the exact and of the quantized decoder on the same `tokens` tokens."""

    exact: float
    quantized: float
    tokens: int

    @property
    def relative(self) -> float:
        """The increase in loss due to quantization, as a fraction of the exact decoder's loss."""
        return self.quantized / self.exact - 1


def quantization_loss(
    gpt: GPT,
    inputs: Tensor,  # (B, T) int64
    targets: Tensor,  # (B, T): the token after each of them
    byte_lengths: npt.NDArray[np.int64],  # (V,): bytes of text of each id
    *,
    exact: DecoderMaker,
    quantized: DecoderMaker,
    kept: KVCacheDType = "auto",
) -> QuantizationLoss:
    """Measure the loss of two decoders of one model on the same windows. `kept` is the dtype of the
    keys and values in the quantized decoder. Copies the model, because a decoder may quantize the
    weights in place.
    """
    text_bytes = int(byte_lengths[targets.numpy()].sum())
    if text_bytes == 0:
        raise ValueError("the windows have no bytes of text")
    own, bits = copy.deepcopy(gpt), math.log(2) * text_bytes
    plain = decode_nats(own, inputs, targets, exact)
    rounded = decode_nats(own, inputs, targets, quantized, kept)
    return QuantizationLoss(plain / bits, rounded / bits, targets.numel())


def decode_nats(
    gpt: GPT,
    inputs: Tensor,
    targets: Tensor,
    make_decoder: DecoderMaker,
    kept: KVCacheDType = "auto",
) -> float:
    """Call `step_nats` with a new decoder."""
    rows, length = inputs.shape
    with new_decoder(gpt, make_decoder, rows, length, kept) as decoder:
        return step_nats(decoder, inputs, targets)


@contextmanager
def new_decoder(
    gpt: GPT, make_decoder: DecoderMaker, rows: int, length: int, kept: KVCacheDType
) -> Iterator[Decoder]:
    """A decoder for `rows` windows of `length` tokens. Its cache is only as long as the windows, so
    that the rows are close to each other in memory."""
    weight = gpt.token_embedding.weight
    shape = replace(gpt.config, context_length=length)
    cache = KVCache(shape, rows, device=weight.device, dtype=weight.dtype, kept=kept)
    decoder = make_decoder(gpt, cache)
    try:
        yield decoder
    finally:
        decoder.close()


def step_nats(decoder: Decoder, inputs: Tensor, targets: Tensor) -> float:
    """The loss in nats, summed over all targets. One decode step computes one position of all
    windows. Targets of -100 are not counted. The decoder's cache may be longer than the windows."""
    rows, length = inputs.shape
    nats = 0.0
    with torch.inference_mode(), one_thread() if decoder.has_threads else nullcontext():
        for position in range(length):
            logits = decoder.decode(inputs[:, position].tolist(), range(rows), [position] * rows)
            following = targets[:, position].to(logits.device)
            nats += float(F.cross_entropy(logits.float(), following, reduction="sum"))
    return nats


@dataclass(frozen=True)
class QuantizationCost:
    """The measured loss and the name of the text on which it was measured. If no loss was measured,
    `text` states the reason, and `measurable` is False if naming another text would not help."""

    kind: Quantization
    loss: QuantizationLoss | None
    text: str
    measurable: bool = True
    kv_cache_dtype: KVCacheDType = "auto"

    @property
    def what(self) -> str:
        if self.kv_cache_dtype == "auto":
            return self.kind
        kept = f"{self.kv_cache_dtype} of keys and values"
        return kept if self.kind == "none" else f"{self.kind} with {kept}"

    @property
    def deserves_warning(self) -> bool:
        """True if the increase in loss is large or unknown."""
        return self.loss is None or self.loss.relative > WARN_ABOVE

    def sentence(self) -> str:
        """The cost in a sentence, for the banner and the log."""
        if self.loss is None:
            advice = "; name a text with --validation-text" if self.measurable else ""
            return f"the cost of {self.what} was not measured: {self.text}{advice}"
        loss = self.loss
        percent = round(100 * loss.relative, 2) + 0.0  # never -0.00
        return (
            f"{self.what} costs {percent:.2f} % ({loss.quantized:.4f} instead of "
            f"{loss.exact:.4f} bits per byte over {loss.tokens:,} tokens of {self.text})"
        )

    def to_dict(self) -> dict[str, Any]:
        loss = self.loss
        return {
            "kind": self.kind,
            "kv_cache_dtype": self.kv_cache_dtype,
            "relative_loss": None if loss is None else loss.relative,
            "bits_per_byte": None if loss is None else loss.quantized,
            "exact_bits_per_byte": None if loss is None else loss.exact,
            "tokens": None if loss is None else loss.tokens,
            "text": self.text,
        }


def measure_quantization(
    model: LoadedModel, text: Path | None, *, at_most: str = "any"
) -> QuantizationCost | None:
    """Compare the loss of a loaded model's decoder with and without quantization. Returns None if
    nothing is quantized. Leaves the model unchanged.

    Raises KernelError if a text is named but nothing is quantized, or if the relative increase in
    loss exceeds `at_most` (`parse_loss_limit`). Raises DataError if the named text is unusable.
    If no text is named and none is found, nothing is measured, and the limit has no effect.
    """
    kind, kv_cache_dtype = model.options.quantize, model.options.kv_cache_dtype
    if kind == "none" and kv_cache_dtype == "auto":
        if text is not None:
            raise KernelError(
                "validation_text measures the cost of quantization, but quantize is none: set "
                "quantize to int8 or int4, or kv_cache_dtype to int8, or remove validation_text"
            )
        return None
    try:
        name, windows = held_out_windows(model.checkpoint, text)
    except DataError as error:
        if text is not None:
            raise
        measurable = model.checkpoint.tokenizer.has_text
        return QuantizationCost(kind, None, str(error), measurable, kv_cache_dtype)
    exact = model.decode_path
    if kind != "none":
        threads = model.placement.threads
        options = replace(model.options, kernels="native", quantize="none")
        exact = choose_decode_path(model.gpt, options, threads=threads)
    (batch,) = windows
    loss = quantization_loss(
        model.gpt,
        *batch,
        windows.byte_lengths,
        exact=exact.make_decoder,
        quantized=model.decode_path.make_decoder,
        kept=kv_cache_dtype,
    )
    cost = QuantizationCost(kind, loss, name, kv_cache_dtype=kv_cache_dtype)
    if not loss.relative <= parse_loss_limit(at_most):  # also refuses NaN
        kept = kv_cache_dtype != "auto"
        gentler = "kv_cache_dtype to auto" if kept else f"quantize to {GENTLER[kind]}"
        raise KernelError(
            f"{cost.sentence()}, but max_quantization_loss is {at_most}: set {gentler}, or "
            "raise max_quantization_loss ('any' means no limit)"
        )
    return cost
