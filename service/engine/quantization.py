"""QuantizationCost: what --quantize and --kv-cache-dtype cost, measured while loading.

The banner, /info and the log give the same figures, in a sentence or as JSON. Not here: what is
measured (`model/evaluation/quantization_loss.py`), and on which text
(`model/evaluation/held_out.py`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitd.model.data.errors import DataError
from logitd.model.evaluation.held_out import held_out_windows
from logitd.model.evaluation.quantization_loss import QuantizationLoss, quantization_loss
from logitd.model.inference.kernels.select import KernelError, choose_decode_path
from logitd.model.inference.load import LoadedModel
from logitd.model.inference.options import (
    KernelTarget,
    KVCacheDType,
    Quantization,
    parse_loss_limit,
)

logger = logging.getLogger("logitd")

WARN_ABOVE = 0.005
"""Share of the bits per byte above which the log warns."""

GENTLER: Mapping[Quantization, Quantization] = {"int4": "int8", "int8": "none"}
"""What costs less."""


@dataclass(frozen=True)
class QuantizationCost:
    """What quantizing weights, or keys and values, costs. `text` is what it was measured on, or,
    without a loss, why not; `measurable` whether a text that is named could be measured on."""

    kind: Quantization
    loss: QuantizationLoss | None
    text: str
    measurable: bool = True
    kv_cache_dtype: KVCacheDType = "auto"

    @property
    def what(self) -> str:
        """What is quantized, for people."""
        if self.kv_cache_dtype == "auto":
            return self.kind
        kept = f"{self.kv_cache_dtype} of keys and values"
        return kept if self.kind == "none" else f"{self.kind} with {kept}"

    def sentence(self) -> str:
        """For the banner and the log."""
        if self.loss is None:
            advice = "; name a text with --validation-text" if self.measurable else ""
            return f"what {self.what} costs was not measured: {self.text}{advice}"
        loss = self.loss
        percent = round(100 * loss.relative, 2) + 0.0  # never -0.00
        return (
            f"{self.what} costs {percent:.2f} % ({loss.quantized:.4f} instead of "
            f"{loss.exact:.4f} bits per byte over {loss.tokens:,} tokens of {self.text})"
        )

    def to_dict(self) -> dict[str, Any]:
        """For /info."""
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
    model: LoadedModel,
    kind: Quantization,
    text: Path | None,
    kernel_target: KernelTarget = "auto",
    *,
    kv_cache_dtype: KVCacheDType = "auto",
    at_most: str = "any",
) -> QuantizationCost | None:
    """What the decoder of a loaded model loses against the same one without quantization; None
    where nothing is quantized. The model is left as it was.

    Raises KernelError for a text without quantizing and for a loss above `at_most`
    (`parse_loss_limit`), DataError for a named text that cannot be measured on. Where none is named
    and none is found, nothing is measured, so nothing is refused, and that is logged.
    """
    if kind == "none" and kv_cache_dtype == "auto":
        if text is not None:
            raise KernelError(
                "validation_text is there to measure what quantizing costs, and quantize is none: "
                "set quantize to int8 or int4, or kv_cache_dtype to int8, or leave the text out"
            )
        return None
    try:
        text_windows = held_out_windows(model.checkpoint, text)
    except DataError as error:
        if text is not None:
            raise
        measurable = model.checkpoint.tokenizer.has_text
        cost = QuantizationCost(kind, None, str(error), measurable, kv_cache_dtype)
        logger.warning("%s", cost.sentence())
        return cost
    exact = model.decode_path
    if kind != "none":
        exact = choose_decode_path(
            model.gpt,
            kernels="native",
            kernel_target=kernel_target,
            threads=model.placement.threads,
        )
    (batch,) = text_windows.windows
    loss = quantization_loss(
        model.gpt,
        *batch,
        text_windows.windows.byte_lengths,
        exact=exact.make_decoder,
        quantized=model.decode_path.make_decoder,
        kept=kv_cache_dtype,
    )
    cost = QuantizationCost(kind, loss, text_windows.name, kv_cache_dtype=kv_cache_dtype)
    if not loss.relative <= parse_loss_limit(at_most):  # what is not a number is refused too
        raise KernelError(
            f"{cost.sentence()}, and max_quantization_loss is {at_most}: set {_gentler(cost)}, or "
            "max_quantization_loss to what you accept (any accepts everything)"
        )
    logger.log(
        logging.WARNING if loss.relative > WARN_ABOVE else logging.INFO, "%s", cost.sentence()
    )
    return cost


def _gentler(cost: QuantizationCost) -> str:
    """The setting that costs less."""
    if cost.kv_cache_dtype != "auto":
        return "kv_cache_dtype to auto"
    return f"quantize to {GENTLER[cost.kind]}"
