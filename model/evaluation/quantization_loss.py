"""Loss: what rounding costs, in bits per byte of a text.

Computed by the very decoders that serve: every token of every window goes through a decode step,
once exactly and once rounded. So what a step rounds besides the weights is counted too (int8's
activations), which a comparison of weights would not see. The arithmetic is that of
`model/training/step/validate.py`; which text it is, is said in `model/evaluation/held_out.py`.

Shapes: B windows, T positions, V = vocab_size.
"""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from model.device import one_thread
from model.inference.kernels.base import Decoder
from model.inference.kv_cache import KVCache
from model.transformer.gpt import GPT

MakeDecoder = Callable[[GPT, KVCache], Decoder]


@dataclass(frozen=True, slots=True)
class RoundingLoss:
    """Bits per byte over the same `tokens` tokens, exactly and rounded."""

    exact: float
    rounded: float
    tokens: int

    @property
    def relative(self) -> float:
        """What rounding adds, as a share of the exact bits."""
        return self.rounded / self.exact - 1


def rounding_loss(
    gpt: GPT,
    inputs: Tensor,  # (B, T) int64
    targets: Tensor,  # (B, T): the token after each of them
    byte_lengths: npt.NDArray[np.int64],  # (V,): bytes of text of each id
    *,
    exact: MakeDecoder,
    rounded: MakeDecoder,
) -> RoundingLoss:
    """The loss of two decoders of one model on the same windows.

    Takes the memory of a second copy of the model meanwhile: a decoder may round the weights that
    it is given.
    """
    text_bytes = int(byte_lengths[targets.numpy()].sum())
    if text_bytes == 0:
        raise ValueError("the windows stand for no bytes of text")
    own = copy.deepcopy(gpt)
    bits = [
        decoded_nats(own, inputs, targets, make) / math.log(2) / text_bytes
        for make in (exact, rounded)
    ]
    return RoundingLoss(exact=bits[0], rounded=bits[1], tokens=targets.numel())


def decoded_nats(gpt: GPT, inputs: Tensor, targets: Tensor, make_decoder: MakeDecoder) -> float:
    """What the targets cost altogether, every input fed through a decode step."""
    weight = gpt.token_embedding.weight
    rows, length = inputs.shape
    # A cache that is as long as the windows, not as the context: rows of it are side by side.
    shape = replace(gpt.config, context_length=length)
    cache = KVCache(shape, rows, device=weight.device, dtype=weight.dtype)
    decoder = make_decoder(gpt, cache)
    try:
        return step_nats(decoder, inputs, targets)
    finally:
        decoder.close()


def step_nats(decoder: Decoder, inputs: Tensor, targets: Tensor) -> float:
    """`decoded_nats` of a decoder that is there, whatever its cache held before. A target of -100
    costs nothing."""
    rows, length = inputs.shape
    nats = 0.0
    with torch.inference_mode(), one_thread() if decoder.has_threads else nullcontext():
        for position in range(length):
            logits = decoder.decode(inputs[:, position].tolist(), range(rows), [position] * rows)
            following = targets[:, position].to(logits.device)
            nats += float(F.cross_entropy(logits.float(), following, reduction="sum"))
    return nats
