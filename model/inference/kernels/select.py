"""Choose: which numbers a model computes in and which decoder runs it on this machine, and why.

From what is asked for and what there is, never from a measurement at start-up: the same
configuration always computes the same bits.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from model.device import bfloat16_instructions, processor_features
from model.dtypes import DTypeName, FloatName
from model.inference.kernels.base import Decoder
from model.inference.kernels.cpu.decoder import NativeDecoder, not_covered, prefills_natively
from model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from model.inference.kernels.cuda.decoder import GraphDecoder
from model.inference.kernels.eager.decoder import PlainDecoder
from model.inference.kv_cache import KVCache
from model.inference.options import KernelChoice, Quantization
from model.transformer.config import GPTConfig
from model.transformer.gpt import GPT


class KernelError(ValueError):
    """What was asked for cannot be had on this machine."""


@dataclass(frozen=True, slots=True)
class DTypeChoice:
    """The numbers that a model computes in, and why these, in words that can follow the name."""

    name: FloatName
    why: str


@dataclass(frozen=True, slots=True)
class DecodePath:
    """How decode steps are computed.

    name   for people: "native (AVX-512 BF16)", "CUDA graphs" or "torch"
    note   why it is torch although nobody asked for that, or None
    """

    make_decoder: Callable[[GPT, KVCache], Decoder]
    name: str
    note: str | None = None


def choose_dtype(
    asked: DTypeName,
    config: GPTConfig,
    device: torch.device,
    *,
    kernels: KernelChoice = "auto",
    say: Callable[[str], None] = lambda line: None,
) -> DTypeChoice:
    """What was asked for; for "auto" the fastest numbers that the machine has of its own and that
    lose nothing to see (`auto_dtype`). `say` is told when kernels are being built for that."""
    if asked != "auto":
        return DTypeChoice(asked, "as asked")
    multiplies, obstacle = bfloat16_instructions(processor_features()), None
    if device.type == "cpu" and multiplies is not None:
        found = _native(config, device, torch.bfloat16, kernels, say)
        obstacle = found if isinstance(found, str) else None
    return auto_dtype(device.type, multiplies, obstacle)


def auto_dtype(device_type: str, multiplies: str | None, obstacle: str | None) -> DTypeChoice:
    """What "auto" is, by the kind of device, what its processor multiplies bfloat16 with, and what
    keeps the native decoder from running the model.

    Without native decoding it is float32 on a CPU: there a decode step of plain torch rounds the
    residual stream as well.
    """
    if device_type == "cuda":
        return DTypeChoice("bfloat16", "auto: on CUDA")
    if multiplies is None:
        return DTypeChoice("float32", "auto: this processor has no dot products of bfloat16")
    if obstacle is not None:
        return DTypeChoice("float32", f"auto: no native decoding, {obstacle}")
    return DTypeChoice("bfloat16", f"auto: this processor multiplies it, {multiplies}")


def choose_decode_path(
    gpt: GPT,
    *,
    kernels: KernelChoice = "auto",
    quantize: Quantization = "none",
    threads: int,
    batch_invariant: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> DecodePath:
    """On a CPU the native decoder where it covers the model and can be built, else torch; on CUDA
    recorded steps, unless `kernels` is torch. `batch_invariant` is for CUDA: what a CPU computes
    is so in any case.

    Raises KernelError where `kernels`, `quantize` or `batch_invariant` leave no such way out.
    """
    if kernels == "torch" and quantize != "none":
        raise KernelError(
            f"quantize is {quantize}, which the native kernels compute; set kernels to auto"
        )
    weight = gpt.token_embedding.weight
    if weight.device.type == "cuda" and kernels != "native" and quantize == "none":
        return cuda_path(kernels, batch_invariant=batch_invariant)
    found = _native(gpt.config, weight.device, weight.dtype, kernels, say)
    if not isinstance(found, str):
        library, quantized = found, quantize == "int8"
        prefills = prefills_natively(
            weight.dtype, quantized=quantized, features=processor_features()
        )

        def make(gpt: GPT, cache: KVCache) -> Decoder:
            return NativeDecoder(
                library, gpt, cache, threads=threads, quantized=quantized, prefills=prefills
            )

        return DecodePath(make, f"native ({instructions()}{', int8' if quantized else ''})")
    if kernels == "native" or quantize != "none":
        asked = "kernels is native" if kernels == "native" else f"quantize is {quantize}"
        raise KernelError(f"{asked}, but there are no native kernels for this: {found}")
    unasked = kernels != "torch" and weight.device.type == "cpu"
    return DecodePath(PlainDecoder, "torch", found if unasked else None)


def cuda_path(kernels: KernelChoice, *, batch_invariant: bool) -> DecodePath:
    """How a GPU decodes: recorded steps, or torch where that is asked for."""
    if kernels != "torch":
        name = "CUDA graphs, batch-invariant" if batch_invariant else "CUDA graphs"
        return DecodePath(partial(GraphDecoder, batch_invariant=batch_invariant), name)
    if batch_invariant:
        raise KernelError(
            "kernels is torch, whose bits depend on the batch on CUDA, and batch_invariant is "
            "asked for; set kernels to auto"
        )
    return DecodePath(PlainDecoder, "torch")


def instructions() -> str:
    """The widest instructions that the kernels were built for, for people."""
    features = processor_features()
    names = [
        name
        for feature, name in (
            ("avx512_bf16", "AVX-512 BF16"),
            ("avx512f", "AVX-512"),
            ("avx2", "AVX2"),
        )
        if feature in features
    ]
    return names[0] if names else "portable"


def _native(
    config: GPTConfig,
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice,
    say: Callable[[str], None],
) -> ctypes.CDLL | str:
    """The native kernels for a model of this shape, or why there are none for it."""
    if kernels == "torch":
        return "kernels is torch"
    reason = not_covered(config, device, dtype)
    if reason is not None:
        return reason
    try:
        return load_library(say)
    except KernelsUnavailable as error:
        return str(error)
