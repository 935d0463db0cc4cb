"""Choose the dtype that a model computes in and the decoder that runs it on this machine.

Both follow from the settings and the hardware, never from a measurement at start-up: the same
configuration always computes the same bits. Each choice comes with a reason to show to people.
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
    """This machine cannot compute with these settings; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class DTypeChoice:
    """The dtype that a model computes in, and a reason that can follow its name in a sentence."""

    name: FloatName
    why: str


@dataclass(frozen=True, slots=True)
class DecodePath:
    """The kind of decoder that computes prompts and decode steps.

    make_decoder  make a decoder that leaves the GPT's weights in memory
    make_owner    make a decoder for a GPT that nothing else computes with: weights that the decoder
                  does not read leave memory until `restore_weights`
    name          "native (AVX-512 BF16)", "CUDA graphs" or "torch"
    note          the reason for torch if torch was not requested, else None
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
        """A path whose decoders read all of a GPT's weights as they are."""
        return cls(make, make, name, note)


def choose_dtype(
    config: GPTConfig,
    device: torch.device,
    options: ComputeOptions = DEFAULTS,
    *,
    log: Callable[[str], None] = lambda line: None,
) -> DTypeChoice:
    """Return the dtype of the options. "auto" is the fastest one that the processor, or the kernel
    target, multiplies without a noticeable loss: bfloat16 on CUDA and in the native decoder, else
    float32, because a decode step of plain torch rounds the residual stream as well. `log`
    receives a line if kernels are built."""
    if options.dtype != "auto":
        return DTypeChoice(options.dtype, "as asked")
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
    """Raise KernelError if the device cannot keep keys and values in this dtype."""
    if asked != "auto" and device.type != "cpu":
        raise KernelError(
            f"kv_cache_dtype is {asked}, which needs a CPU, and the device is {device}: "
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
    """Choose the decoder of a GPT: CUDA graphs on a GPU, native kernels on a CPU, else plain torch.

    `threads` is the number of native threads. `batch_invariant` concerns CUDA; on a CPU every
    decoder is invariant. With a `kernel_target` torch is no substitute, since its bits depend on
    the processor. Raises KernelError if the options rule out every decoder.
    """
    weight, native_only = gpt.token_embedding.weight, _native_only_setting(options)
    if options.kernels == "torch" and native_only is not None:
        raise KernelError(
            f"{native_only}, which needs the native kernels, and kernels is torch: set kernels to "
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
                f"{native_only}, but there are no native kernels for this: {error}"
            ) from error
        requested = options.kernels == "torch"
        return DecodePath.plain(PlainDecoder, "torch", None if requested else str(error))
    return _native_path(library, weight.dtype, options, threads)


def _native_only_setting(options: ComputeOptions) -> str | None:
    """The setting, with its value, that only the native kernels can satisfy."""
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
    """Choose the decoder on a GPU: `make` if its decoders pass the self-check, else plain torch
    with the fault as the note. Raises KernelError if plain torch cannot be `batch_invariant`."""
    if kernels == "torch":
        if batch_invariant:
            raise KernelError(
                "kernels is torch, whose bits depend on the batch on CUDA, and batch_invariant is "
                "set: set kernels to auto"
            )
        return DecodePath.plain(PlainDecoder, "torch")
    make = partial(make, batch_invariant=batch_invariant)
    fault = find_fault(gpt, make, batch_invariant=batch_invariant)
    try:
        torch.cuda.empty_cache()  # frees what the check used; fails if the check broke the device
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
            f"CUDA graphs failed their self-check ({fault}), and in plain torch bits depend on the "
            "batch on CUDA; unset batch_invariant, or set device to cpu"
        )
    return DecodePath.plain(PlainDecoder, "torch", f"CUDA graphs failed their self-check: {fault}")


def _native_path(
    library: NativeLibrary, dtype: torch.dtype, options: ComputeOptions, threads: int
) -> DecodePath:
    """The path of these kernels. They compute prompts too if they are fast at that, or if their
    target was requested."""
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
    """Load the native kernels for a model of this shape. Raises KernelsUnavailable."""
    if options.kernels == "torch":
        raise KernelsUnavailable("kernels is torch")
    reason = not_covered(config, device, dtype)
    if reason is not None:
        raise KernelsUnavailable(reason)
    target = options.kernel_target
    library = load_library(log, target=target)
    if target != "auto" and "amx_tile" in library.features and not library.has_tiles:
        raise TargetRefused(
            f"kernel_target is {target}, and this system does not let a process use AMX, though "
            "the processor has it: set kernel_target to x86-64-v4-bf16 or auto"
        )
    return library
