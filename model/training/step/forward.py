"""Forward: the logits and the loss in training, with the fastest attention for the device.

Weights are always float32; bfloat16 products use autocast. Where it is faster than torch's fused
kernel, `model/training/step/matrix_attention.py` computes attention. It keeps the attention weights
of every head and layer in memory, so long contexts use the fused kernel.
`model/training/step/compile.py` compiles the loss.

Shapes: B sequences, T positions, V = vocab_size.
"""

import torch
from torch import Tensor

from logitd.model.device import Placement, choose_placement
from logitd.model.training.configuration.presets import TrainingDType
from logitd.model.training.step.loss import cross_entropy
from logitd.model.training.step.matrix_attention import MatrixAttend
from logitd.model.transformer.attention import Attend, CausalAttend
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT

LONGEST = 1024
"""Longest context for which attention weights are kept for the backward pass."""


class Forward:
    """Maps ids (B, T) to logits (B, T, V). `dropout` is the dropout of attention, 0 for
    evaluation."""

    def __init__(self, gpt: GPT, placement: Placement, *, dropout: float) -> None:
        self._gpt = gpt
        self._placement = placement
        self._attend = _choose_attend(placement, gpt.config, dropout)

    def __call__(self, token_ids: Tensor) -> Tensor:
        with self._autocast():
            return self._gpt.logits(self._hidden(token_ids))

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss (nats per token) of targets (B, T), with gradients. Only a chunk of the
        logits is in memory at a time."""
        gpt = self._gpt
        with self._autocast():
            hidden = self._hidden(token_ids)  # (B, T, C)
        head, bias = gpt.head_parameters()
        return cross_entropy(
            hidden,
            head,
            targets,
            bias=bias,
            vocab_size=gpt.config.vocab_size,
            softcap=gpt.config.logit_softcap,
            dtype=self._placement.dtype,
        )

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self._gpt.parameters() if parameter.requires_grad]

    def _hidden(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        return self._gpt.transform(token_ids, positions.expand_as(token_ids), self._attend)

    def _autocast(self) -> torch.autocast:
        in_bfloat16 = self._placement.dtype == torch.bfloat16
        return torch.autocast(
            self._placement.device.type, dtype=torch.bfloat16, enabled=in_bfloat16
        )


def training_placement(device: str, dtype: TrainingDType, threads: int) -> Placement:
    """The device, dtype and threads of training. The dtype "auto" means bfloat16 if the device has
    instructions that multiply it, which makes training several times faster; otherwise it means
    float32."""
    placement = choose_placement(device, "float32", threads)
    if dtype == "auto":
        dtype = "bfloat16" if native_bfloat16(placement.device) else "float32"
    return Placement(placement.device, getattr(torch, dtype), placement.threads)


def native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _choose_attend(placement: Placement, config: GPTConfig, dropout: float) -> Attend:
    """The faster attention. On a CPU, torch's fused kernel is slow in bfloat16, does not support
    dropout, and computes the keys outside a sliding window too."""
    windowed = any(config.window(layer) is not None for layer in range(config.n_layer))
    slow = placement.dtype == torch.bfloat16 or dropout > 0 or windowed
    if placement.device.type == "cpu" and slow and config.context_length <= LONGEST:
        return MatrixAttend(placement.dtype, dropout)
    return CausalAttend(dropout)
