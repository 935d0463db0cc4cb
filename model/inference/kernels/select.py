"""Select: chooses the dtype and the decoder of a model on this machine.

Both depend on the settings and the hardware, never on a measurement at start-up, so the same
configuration always computes the same bits. Each choice comes with a reason to show to the user.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from logitd.model.dtypes import FloatName
from logitd.model.inference.kernels.base import Decoder
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder, not_covered, prefills_natively
from logitd.model.inference.kernels.cpu.library import (
    KernelsUnavailable,
    NativeLibrary,
    TargetRefused,
    load_library,
)
from logitd.model.inference.kernels.cpu.targets import target_named
from logitd.model.inference.kernels.cuda.check import find_fault
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import DEFAULTS, ComputeOptions, KernelChoice, KVCacheDType
from logitd.model.processor import bfloat16_instructions, processor_features
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT


class KernelError(ValueError):
    """Raised if this machine cannot compute with these settings; the message gives the reason and
    the fix."""


@dataclass(frozen=True, slots=True)
class DTypeChoice:
    """The dtype that a model computes in, and the reason, worded to follow the dtype's name."""

    name: FloatName
    why: str


@dataclass(frozen=True, slots=True)
class DecodePath:
    """The chosen type of decoder.

    make_decoder  creates a decoder that leaves the GPT's weights in memory
    make_owner    creates a decoder for a GPT that nothing else computes with: weights that the
                  decoder does not read are freed until `restore_weights`
    name          "native (AVX-512 BF16)", "CUDA graphs" or "torch"
    note          the reason for torch if it was not requested, else None
    kernels       the loaded native kernels, such as "x86-64-v3, prebuilt", or None
    """

    make_decoder: Callable[[GPT, KVCache], Decoder]
    make_owner: Callable[[GPT, KVCache], Decoder]
    name: str
    note: str | None = None
    kernels: str | None = None

    @classmethod
    def plain(
        cls, make: Callable[[GPT, KVCache], Decoder], name: str, note: str | None = None
    ) -> "DecodePath":
        """The DecodePath of a decoder that never frees weights."""
        return cls(make, make, name, note)


def choose_dtype(
    config: GPTConfig,
    device: torch.device,
    options: ComputeOptions = DEFAULTS,
    *,
    log: Callable[[str], None] = lambda line: None,
) -> DTypeChoice:
    """Choose the dtype. "auto" means bfloat16 on CUDA. Elsewhere it means bfloat16 if the native
    decoder can run and the processor or the kernel target has dot products of bfloat16; otherwise
    float32, because plain torch would round the residual stream to bfloat16 too. Calls `log` with a
    line of text if kernels are built."""
    if options.dtype != "auto":
        return DTypeChoice(options.dtype, "as requested")
    if device.type == "cuda":
        return DTypeChoice("bfloat16", "auto: on CUDA")
    if options.kernel_target == "auto":
        features, whose = processor_features(), "this processor"
    else:
        features, whose = target_named(options.kernel_target).features, options.kernel_target
    instructions = bfloat16_instructions(features)
    if instructions is None:
        return DTypeChoice("float32", f"auto: {whose} has no dot products of bfloat16")
    try:
        _load_native(config, device, torch.bfloat16, options, log)
    except KernelsUnavailable as error:
        return DTypeChoice("float32", f"auto: no native decoding, {error}")
    return DTypeChoice("bfloat16", f"auto: {whose} multiplies it, {instructions}")


def check_kv_cache_dtype(asked: KVCacheDType, device: torch.device) -> None:
    """Raise KernelError if the device cannot store keys and values in this dtype."""
    if asked != "auto" and device.type != "cpu":
        raise KernelError(
            f"kv_cache_dtype is {asked}, which needs a CPU, but the device is {device}: "
            "set kv_cache_dtype to auto"
        )


def choose_decode_path(
    gpt: GPT,
    options: ComputeOptions = DEFAULTS,
    *,
    threads: int,
    batch_invariant: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> DecodePath:
    """Choose the decoder of a GPT: CUDA graphs on a GPU, native kernels on a CPU, otherwise plain
    torch.

    `threads` is the number of native threads. `batch_invariant` matters only on CUDA; on a CPU
    every decoder is batch-invariant. If a `kernel_target` is set, torch is no substitute for the
    kernels, because the bits of torch depend on the processor. Raises KernelError if no decoder
    satisfies the options.
    """
    weight, native_only = gpt.token_embedding.weight, _native_only_setting(options)
    if options.kernels == "torch" and native_only is not None:
        raise KernelError(
            f"{native_only}, which needs the native kernels, but kernels is torch: set kernels to "
            "auto"
        )
    if weight.is_cuda and native_only is None:
        return cuda_path(gpt, options.kernels, batch_invariant=batch_invariant)
    try:
        library = _load_native(gpt.config, weight.device, weight.dtype, options, log)
    except TargetRefused as error:
        raise KernelError(str(error)) from error
    except KernelsUnavailable as error:
        if native_only is not None:
            raise KernelError(
                f"{native_only}, but the native kernels cannot be used: {error}"
            ) from error
        requested = options.kernels == "torch"
        return DecodePath.plain(PlainDecoder, "torch", None if requested else str(error))
    return _native_path(library, weight.dtype, options, threads)


def code_path(name: str) -> DecodePath:
    """The DecodePath of a model that its owner's code computes. Its functions are never called,
    because `model/inference/engine/runner.py` creates the decoder of such a model."""
    return DecodePath.plain(PlainDecoder, name)


def _native_only_setting(options: ComputeOptions) -> str | None:
    """The first setting that only the native kernels support, with its value; None if there is
    none."""
    if options.kernels == "native":
        return "kernels is native"
    if options.kernel_target != "auto":
        return f"kernel_target is {options.kernel_target}"
    return None if options.quantize == "none" else f"quantize is {options.quantize}"


def cuda_path(
    gpt: GPT,
    kernels: KernelChoice,
    *,
    batch_invariant: bool,
    make: Callable[..., Decoder] = GraphDecoder,
) -> DecodePath:
    """Choose the decoder on a GPU: the one that `make` creates if it passes the self-check,
    otherwise plain torch with the fault as a note. Raises KernelError if `batch_invariant` is set
    but only plain torch could be chosen, or if the self-check broke the device."""
    if kernels == "torch":
        if batch_invariant:
            raise KernelError(
                "batch_invariant is set, but kernels is torch, which is not batch-invariant on "
                "CUDA: set kernels to auto"
            )
        return DecodePath.plain(PlainDecoder, "torch")
    make = partial(make, batch_invariant=batch_invariant)
    fault = find_fault(gpt, make, batch_invariant=batch_invariant)
    try:
        torch.cuda.empty_cache()  # fails if the check broke the device
    except RuntimeError as error:
        raise KernelError(
            f"the self-check of CUDA graphs left the device unusable for this process ({fault}); "
            "set kernels to torch"
        ) from error
    if fault is None:
        name = "CUDA graphs, batch-invariant" if batch_invariant else "CUDA graphs"
        return DecodePath.plain(make, name)
    if batch_invariant:
        raise KernelError(
            f"CUDA graphs failed their self-check ({fault}), and plain torch is not "
            "batch-invariant on CUDA: unset batch_invariant, or set device to cpu"
        )
    return DecodePath.plain(PlainDecoder, "torch", f"CUDA graphs failed their self-check: {fault}")


def _native_path(
    library: NativeLibrary, dtype: torch.dtype, options: ComputeOptions, threads: int
) -> DecodePath:
    """The DecodePath with these native kernels. They also compute prompts if they are fast at it or
    if the user chose their target."""
    quantize, named = options.quantize, options.kernel_target != "auto"
    prefills = named or prefills_natively(dtype, quantize=quantize, features=library.features)

    def make(gpt: GPT, cache: KVCache, *, owns_weights: bool = False) -> Decoder:
        return NativeDecoder(
            library.functions,
            gpt,
            cache,
            threads=threads,
            quantize=quantize,
            prefills=prefills,
            owns_weights=owns_weights,
        )

    details = [library.instructions]
    if quantize != "none":
        details.append(quantize)
    if named:
        details.append(f"target {options.kernel_target}")
    return DecodePath(
        make,
        partial(make, owns_weights=True),
        f"native ({', '.join(details)})",
        kernels=library.description,
    )


def _load_native(
    config: GPTConfig,
    device: torch.device,
    dtype: torch.dtype,
    options: ComputeOptions,
    log: Callable[[str], None],
) -> NativeLibrary:
    """Load the native kernels for a model. Raises KernelsUnavailable if they do not support it."""
    if options.kernels == "torch":
        raise KernelsUnavailable("kernels is torch")
    reason = not_covered(config, device, dtype)
    if reason is not None:
        raise KernelsUnavailable(reason)
    target = options.kernel_target
    library = load_library(log, target=target)
    if target != "auto" and "amx_tile" in library.features and not library.has_tiles:
        raise TargetRefused(
            f"kernel_target is {target}, but this system does not allow a process to use the "
            "processor's AMX: set kernel_target to x86-64-v4-bf16 or auto"
        )
    return library
