"""Activation functions of the feed-forward layer.

Each has two implementations: torch's fused function for training, and one for inference, in which
the result for an element does not depend on the element's place in the array.

On CPUs, torch's sigmoid, silu and GELU use different code for the last elements of an array, and
for the last elements of each thread's part of an array. The results of that code differ in the last
bits. So the values of a row would depend on the number of rows. tanh, erf and exp do not have this
problem (measured with 1 to 3 threads for widths from 1 to 3,072;
`tests/model/transformer/test_activation.py` checks it on the machine that runs the tests).
"""

import math

import torch.nn.functional as F
from torch import Tensor

from logitd.model.transformer.config import Activation


def activate(h: Tensor, kind: Activation, *, fused: bool) -> Tensor:
    """The activation function, applied to h (..., d_ff). For swiglu, h is (..., 2 * d_ff), with the
    gate first."""
    match kind:
        case "relu":
            return F.relu(h)
        case "relu2":
            return F.relu(h).square()
        case "gelu_tanh":
            return F.gelu(h, approximate="tanh") if fused else _gelu_tanh(h)
        case "gelu":
            return F.gelu(h) if fused else _gelu(h)
        case "swiglu":
            gate, value = h.chunk(2, dim=-1)  # each (..., d_ff)
            return (F.silu(gate) if fused else _silu(gate)) * value


def _silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


def _gelu(x: Tensor) -> Tensor:
    """x times the cumulative normal distribution (Hendrycks and Gimpel, 2016)."""
    wide = x.float()
    return (wide * math.sqrt(0.5)).erf_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of GELU by 0.5 x (1 + tanh u) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi)
    (x + 0.044715 x^3)."""
    wide, scale = x.float(), -2 * math.sqrt(2 / math.pi)
    minus_2u = wide.square().mul_(0.044715 * scale).add_(scale).mul_(wide)
    return (wide / minus_2u.exp_().add_(1)).to(x.dtype)
