"""Choose the dtype that a model computes in and the decoder that runs it on this machine.

Both follow from the settings and from the hardware, never from a measurement at start-up: the same
configuration always computes the same bits. Each choice comes with its reason, for people.
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
    """This machine cannot compute as asked; the message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class DTypeChoice:
    """The dtype that a model computes in, and the reason, in words that can follow the name."""

    name: FloatName
    why: str


@dataclass(frozen=True, slots=True)
class DecodePath:
    """How decode steps are computed.

    name   for people: "native (AVX-512 BF16)", "CUDA graphs" or "torch"
    note   why it is torch although that was not asked for, or None
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
    log: Callable[[str], None] = lambda line: None,
) -> DTypeChoice:
    """The dtype that was asked for; for "auto" the fastest one that the hardware multiplies and
    that loses nothing one could notice (`auto_dtype`). `log` gets a line when kernels are built."""
    if asked != "auto":
        return DTypeChoice(asked, "as asked")
    multiplies, obstacle = bfloat16_instructions(processor_features()), None
    if device.type == "cpu" and multiplies is not None:
        try:
            _native(config, device, torch.bfloat16, kernels, log)
        except KernelsUnavailable as error:
            obstacle = str(error)
    return auto_dtype(device.type, multiplies, obstacle)


def auto_dtype(device_type: str, multiplies: str | None, obstacle: str | None) -> DTypeChoice:
    """What "auto" is, by the kind of device, the instructions that multiply bfloat16 there, and the
    reason why the native decoder cannot run the model, if there is one.

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
    log: Callable[[str], None] = lambda line: None,
) -> DecodePath:
    """On a CPU the native decoder where it covers the model and can be built, else torch; on CUDA
    recorded steps, unless `kernels` is torch. `batch_invariant` is for CUDA: what a CPU computes
    is so in any case.

    Raises KernelError where `kernels`, `quantize` or `batch_invariant` rule out what is left.
    """
    if kernels == "torch" and quantize != "none":
        raise KernelError(
            f"quantize is {quantize}, which the native kernels compute; set kernels to auto"
        )
    weight = gpt.token_embedding.weight
    if weight.device.type == "cuda" and kernels != "native" and quantize == "none":
        return cuda_path(kernels, batch_invariant=batch_invariant)
    try:
        library = _native(gpt.config, weight.device, weight.dtype, kernels, log)
    except KernelsUnavailable as error:
        if kernels == "native" or quantize != "none":
            asked = "kernels is native" if kernels == "native" else f"quantize is {quantize}"
            raise KernelError(
                f"{asked}, but there are no native kernels for this: {error}"
            ) from error
        unasked = kernels != "torch" and weight.device.type == "cpu"
        return DecodePath(PlainDecoder, "torch", str(error) if unasked else None)
    return _native_path(library, weight.dtype, quantized=quantize == "int8", threads=threads)


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


def _native_path(
    library: ctypes.CDLL, dtype: torch.dtype, *, quantized: bool, threads: int
) -> DecodePath:
    """Decoding by the native kernels; prompts too, where the processor is fast enough at that."""
    prefills = prefills_natively(dtype, quantized=quantized, features=processor_features())

    def make(gpt: GPT, cache: KVCache) -> Decoder:
        return NativeDecoder(
            library, gpt, cache, threads=threads, quantized=quantized, prefills=prefills
        )

    return DecodePath(make, f"native ({instructions()}{', int8' if quantized else ''})")


def _native(
    config: GPTConfig,
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice,
    log: Callable[[str], None],
) -> ctypes.CDLL:
    """The native kernels for a model of this shape. Raises KernelsUnavailable."""
    if kernels == "torch":
        raise KernelsUnavailable("kernels is torch")
    reason = not_covered(config, device, dtype)
    if reason is not None:
        raise KernelsUnavailable(reason)
    return load_library(log)
