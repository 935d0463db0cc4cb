"""QuantizationCost: how much the loss of a model increases because its weights, or its keys and
values, are quantized.

A server reports the increase in its banner, in /info and in its log. `quantization_loss.py`
measures the loss, and `held_out.py` chooses the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from logitd.model.data.errors import DataError
from logitd.model.evaluation.held_out import held_out_windows
from logitd.model.evaluation.quantization_loss import QuantizationLoss, quantization_loss
from logitd.model.inference.kernels.select import KernelError, choose_decode_path
from logitd.model.inference.load import LoadedModel
from logitd.model.inference.options import KVCacheDType, Quantization, parse_loss_limit

WARN_ABOVE = 0.005
"""A warning is shown if quantization increases the loss by more than this fraction."""

GENTLER: Mapping[Quantization, Quantization] = {"int4": "int8", "int8": "none"}
"""For each setting of `quantize`, the setting that is one step less lossy."""


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
