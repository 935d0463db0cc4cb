"""Quantization loss: the cost, in bits per byte, of int8 or int4 weights, or of int8 keys and
values.

The serving decoders compute the loss: every token of every window goes through one decode step of
the exact decoder and one decode step of the quantized decoder. So the result includes the rounding
of activations, which a comparison of the weights would miss. The loss is defined as in
`model/training/step/validate.py`. `model/evaluation/held_out.py` chooses the text.

Shapes: B windows, T positions, V = vocab_size.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.device import one_thread
from logitd.model.inference.kernels.base import Decoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import KVCacheDType
from logitd.model.transformer.gpt import GPT

MakeDecoder = Callable[[GPT, KVCache], Decoder]


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
    exact: MakeDecoder,
    quantized: MakeDecoder,
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
    make_decoder: MakeDecoder,
    kept: KVCacheDType = "auto",
) -> float:
    """Call `step_nats` with a new decoder."""
    rows, length = inputs.shape
    with new_decoder(gpt, make_decoder, rows, length, kept) as decoder:
        return step_nats(decoder, inputs, targets)


@contextmanager
def new_decoder(
    gpt: GPT, make_decoder: MakeDecoder, rows: int, length: int, kept: KVCacheDType
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
