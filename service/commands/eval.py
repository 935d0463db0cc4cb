"""`logitd eval`: the loss of a checkpoint on a text."""

import json
import sys
from typing import Any

from model.checkpoint.checkpoint import CheckpointError
from model.data.errors import DataError
from model.device import DeviceError
from model.evaluation.text_loss import Measurement, measure
from model.inference.kernels.select import KernelError
from model.training.config import TrainingError
from service.settings.train import EvalSettings


def run(settings: EvalSettings) -> int:
    try:
        measured = measure(
            settings.checkpoint,
            settings.data,
            stride=settings.stride,
            batch_size=settings.batch_size,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            quantize=settings.quantize,
            say=lambda line: print(f"logitd eval: {line}", file=sys.stderr),
        )
    except (CheckpointError, DeviceError, KernelError, DataError, TrainingError) as error:
        print(f"logitd eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("logitd eval: stopped", file=sys.stderr)
        return 130
    if settings.as_json:
        print(json.dumps(facts(measured), allow_nan=False))
        return 0
    for name, value in _rows(measured):
        print(f"{name:<12}{value}")
    return 0


def facts(measured: Measurement) -> dict[str, Any]:
    """What --json prints."""
    checkpoint, found = measured.checkpoint, measured.evaluation
    return {
        "checkpoint": str(checkpoint.path),
        "name": checkpoint.name,
        "step": checkpoint.training.step,
        "weights_sha256": checkpoint.weights_sha256,
        "text": measured.text,
        "tokens": found.tokens,
        "bytes": found.text_bytes,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "window": measured.window,
        "stride": measured.stride,
        "dtype": measured.dtype,
        "quantize": measured.quantize,
        "device": measured.device,
        "threads": measured.threads,
        "seconds": measured.seconds,
        "tokens_per_second": measured.tokens_per_second,
    }


def _rows(measured: Measurement) -> list[tuple[str, str]]:
    found, checkpoint = measured.evaluation, measured.checkpoint
    numbers = measured.dtype if measured.quantize == "none" else f"{measured.quantize} weights"
    return [
        ("checkpoint", f"{checkpoint.name}, step {checkpoint.training.step:,}"),
        ("text", measured.text),
        ("counted", f"{found.tokens:,} tokens, each once, for {found.text_bytes:,} bytes"),
        ("windows", f"of {measured.window} tokens, {measured.stride} apart"),
        ("loss", f"{found.loss:.4f} nats per token"),
        ("perplexity", f"{found.perplexity:.2f}"),
        ("", f"{found.bits_per_byte:.4f} bits per byte"),
        (
            "speed",
            f"{measured.tokens_per_second:,.0f} tokens per second in {measured.seconds:.1f} s "
            f"({numbers}, {measured.device}, threads: {measured.threads})",
        ),
    ]
