"""Forward: the logits of training, in the numbers and with the attention that are fastest here.

Weights stay float32; in bfloat16 the matrix products run under autocast. On a CPU in bfloat16,
forward and backward of the fused attention kernel take about twice the time of two batched matrix
products with a softmax between them (windows of 128 to 512, heads of 64; in float32 the fused
kernel wins). Their price is memory for the (T, T) weights of every head and layer, so long windows
stay with the fused kernel. Does not know the KV cache.

Shapes: B sequences, H query heads, K key/value heads, G = H / K, T positions, D head width,
V = vocab_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Attend, CausalAttend
from model.device import Placement, choose_placement
from model.gpt import GPT
from model.presets import TrainingDType

LONGEST = 1024
"""Window up to which the attention weights may be held for the backward pass."""


class MatrixAttend:
    """Causal attention by two batched products; keeps the probabilities for the backward pass."""

    def __init__(self, dtype: torch.dtype, dropout: float = 0.0) -> None:
        self.dtype = dtype
        self.dropout = dropout
        self._mask: Tensor | None = None  # (G * T, T): 0 where visible, -inf elsewhere

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, t, d = q.shape
        groups = h // k.shape[1]
        # Queries that share a key head stand below each other, so keys need no copies.
        q = q.to(self.dtype).reshape(-1, groups * t, d)  # (B * K, G * T, D)
        k = k.to(self.dtype).reshape(-1, t, d)  # (B * K, T, D)
        v = v.to(self.dtype).reshape(-1, t, d)
        mask = self._causal(groups, t, q.device).expand(len(q), -1, -1)
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=d**-0.5)  # (B * K, G * T, T)
        probs = scores.softmax(dim=-1).to(self.dtype)
        if self.dropout:
            probs = F.dropout(probs, self.dropout)
        return (probs @ v).view(b, h, t, d)

    def _causal(self, groups: int, t: int, device: torch.device) -> Tensor:
        if self._mask is None or self._mask.shape != (groups * t, t):
            hidden = torch.ones(t, t, dtype=torch.bool, device=device).triu(1)
            mask = torch.zeros(t, t, dtype=self.dtype, device=device)
            self._mask = mask.masked_fill_(hidden, float("-inf")).repeat(groups, 1)
        return self._mask


class Forward:
    """Maps ids (B, T) to logits (B, T, V). `dropout` is that of attention: 0 to evaluate."""

    def __init__(self, gpt: GPT, placement: Placement, *, dropout: float) -> None:
        self._gpt = gpt
        self._placement = placement
        self._attend = _choose_attend(placement, gpt.config.context_length, dropout)

    def __call__(self, token_ids: Tensor) -> Tensor:
        device, dtype = self._placement.device, self._placement.dtype
        positions = torch.arange(token_ids.shape[1], device=device).expand_as(token_ids)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            return self._gpt.logits(self._gpt.transform(token_ids, positions, self._attend))


def training_placement(device: str, dtype: TrainingDType, threads: int) -> Placement:
    """Resolve "auto": bfloat16 where the device multiplies it natively, as it is several times
    faster there, else float32."""
    placement = choose_placement(device, "float32", threads)
    if dtype == "auto":
        dtype = "bfloat16" if _native_bfloat16(placement.device) else "float32"
    return Placement(placement.device, getattr(torch, dtype), placement.threads)


def _native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _choose_attend(placement: Placement, context_length: int, dropout: float) -> Attend:
    in_bfloat16 = placement.device.type == "cpu" and placement.dtype == torch.bfloat16
    if in_bfloat16 and context_length <= LONGEST:
        return MatrixAttend(placement.dtype, dropout)
    return CausalAttend(dropout)
