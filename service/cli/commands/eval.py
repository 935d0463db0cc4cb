"""`logitd eval`: measures the loss of a checkpoint on a text."""

import json
from functools import partial
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.data.errors import DataError
from logitd.model.data.sources.read_options import ReadOptions
from logitd.model.device import DeviceError
from logitd.model.evaluation.text_loss import TextLoss, text_loss
from logitd.model.inference.kernels.select import KernelError
from logitd.model.training.configuration.config import TrainingError
from logitd.service.cli.busy import busy_notice
from logitd.service.cli.terminal import finite, say, tell
from logitd.service.settings.train import EvalSettings

ERRORS = CheckpointError, DeviceError, KernelError, DataError, TrainingError
_log = partial(tell, "eval")


def run(settings: EvalSettings) -> int:
    if notice := busy_notice():
        _log(notice)
    result = text_loss(
        settings.checkpoint,
        settings.data,
        reading=ReadOptions.of(settings),
        stride=settings.stride,
        batch_size=settings.batch_size,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
        run_code=settings.run_code,
        log=_log,
    )
    if settings.as_json:
        print(json.dumps(finite(facts(result)), allow_nan=False))
        return 0
    for name, value in _rows(result):
        say(f"{name:<12}{value}")
    return 0


def facts(result: TextLoss) -> dict[str, Any]:
    """The members printed by --json."""
    checkpoint, loss, options = result.checkpoint, result.evaluation, result.options
    return {
        "checkpoint": str(checkpoint.path),
        "name": checkpoint.name,
        "step": checkpoint.training.step,
        "weights_sha256": checkpoint.weights_sha256,
        "text": result.text,
        "tokens": loss.tokens,
        "bytes": loss.text_bytes,
        "loss": loss.loss,
        "perplexity": loss.perplexity,
        "bits_per_byte": loss.bits_per_byte,
        "window": result.window,
        "stride": result.stride,
        "dtype": result.placement.dtype_name,
        "quantize": options.quantize,
        "kv_cache_dtype": options.kv_cache_dtype,
        "device": str(result.placement.device),
        "threads": result.placement.threads,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
    }


def _rows(result: TextLoss) -> list[tuple[str, str]]:
    loss, checkpoint = result.evaluation, result.checkpoint
    placement, options = result.placement, result.options
    precision = placement.dtype_name
    if options.quantize != "none":
        precision = f"{options.quantize} weights"
    if options.kv_cache_dtype != "auto":
        precision += f", {options.kv_cache_dtype} keys and values"
    bits = f"{loss.bits_per_byte:.4f} bits per byte"
    if not loss.text_bytes:
        bits = "no bits per byte: the counted tokens have no bytes of text"
    return [
        ("checkpoint", f"{checkpoint.name}, step {checkpoint.training.step:,}"),
        ("text", result.text),
        ("counted", f"{loss.tokens:,} tokens, each once, for {loss.text_bytes:,} bytes"),
        ("windows", f"of {result.window} tokens, {result.stride} apart"),
        ("loss", f"{loss.loss:.4f} nats per token"),
        ("perplexity", f"{loss.perplexity:.2f}"),
        ("", bits),
        (
            "speed",
            f"{result.tokens_per_second:,.0f} tokens per second in {result.seconds:.1f} s "
            f"({precision}, {placement.device}, threads: {placement.threads})",
        ),
    ]
