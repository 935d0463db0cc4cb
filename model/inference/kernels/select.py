"""Choose the dtype that a model computes in and the decoder that runs it on this machine.

Both follow from the settings and from the hardware, never from a measurement at start-up: the same
configuration always computes the same bits. Each choice comes with its reason, for people.
"""

from collections.abc import Callable
from ctypes import c_char_p
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
from logitd.model.inference.options import (
    DEFAULTS,
    ComputeOptions,
    KernelChoice,
    KernelTarget,
    KVCacheDType,
    Quantization,
)
from logitd.model.processor import bfloat16_instructions, processor_features
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT


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

    make_decoder  a decoder that leaves a GPT's weights where they are
    make_owner    one that need not, since nobody else computes with the GPT: what it does not read
                  leaves memory until `restore_weights`
    name          for people: "native (AVX-512 BF16)", "CUDA graphs" or "torch"
    note          why it is torch although that was not asked for, or None
    kernels       for people, the native kernels that were loaded: "x86-64-v3, prebuilt"; or None
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
        """One whose decoders read all of a GPT's weights as they are."""
        return cls(make, make, name, note)


def choose_dtype(
    config: GPTConfig,
    device: torch.device,
    options: ComputeOptions = DEFAULTS,
    *,
    log: Callable[[str], None] = lambda line: None,
) -> DTypeChoice:
    """The dtype of the options; for "auto" the fastest one that the hardware, or the named target,
    multiplies without a noticeable loss (`auto_dtype`). `log` gets a line when kernels are
    built."""
    if options.dtype != "auto":
        return DTypeChoice(options.dtype, "as asked")
    kernels, kernel_target = options.kernels, options.kernel_target
    if kernel_target == "auto":
        features, whose = processor_features(), "this processor"
    else:
        features, whose = target_named(kernel_target).features, kernel_target
    multiplies, obstacle = bfloat16_instructions(features), None
    if device.type == "cpu" and multiplies is not None:
        try:
            _native(config, device, torch.bfloat16, kernels, kernel_target, log)
        except KernelsUnavailable as error:
            obstacle = str(error)
    return auto_dtype(device.type, multiplies, obstacle, whose)


def auto_dtype(
    device_type: str, multiplies: str | None, obstacle: str | None, whose: str = "this processor"
) -> DTypeChoice:
    """What "auto" is, by the kind of device, the instructions that multiply bfloat16 there, and the
    reason why the native decoder cannot run the model, if there is one. `whose` instructions they
    are: this processor's, or a target's.

    Without native decoding it is float32 on a CPU: there a decode step of plain torch rounds the
    residual stream as well.
    """
    if device_type == "cuda":
        return DTypeChoice("bfloat16", "auto: on CUDA")
    if multiplies is None:
        return DTypeChoice("float32", f"auto: {whose} has no dot products of bfloat16")
    if obstacle is not None:
        return DTypeChoice("float32", f"auto: no native decoding, {obstacle}")
    return DTypeChoice("bfloat16", f"auto: {whose} multiplies it, {multiplies}")


def check_kv_cache_dtype(asked: KVCacheDType, device: torch.device) -> None:
    """Raise KernelError where keys and values cannot be kept as asked."""
    if asked != "auto" and device.type != "cpu":
        raise KernelError(
            f"kv_cache_dtype is {asked}, which is computed on a CPU, and the device is {device}: "
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
    """Choose the native decoder on a CPU if it covers the model and can be built, else torch; on
    CUDA recorded steps, unless `kernels` is torch. `threads` is their number here.
    `batch_invariant` is for CUDA: on a CPU every decoder is. A `kernel_target` admits only the
    native decoder of that target: torch's bits depend on the processor.

    Raises KernelError if `kernels`, `kernel_target`, `quantize` or `batch_invariant` rule out every
    decoder.
    """
    kernels, kernel_target = options.kernels, options.kernel_target
    quantize = options.quantize
    named = kernel_target != "auto"
    if kernels == "torch" and named:
        raise KernelError(
            f"kernel_target is {kernel_target}, which is for the native kernels, and kernels is "
            "torch; set one of them to auto"
        )
    if kernels == "torch" and quantize != "none":
        raise KernelError(
            f"quantize is {quantize}, which the native kernels compute; set kernels to auto"
        )
    weight = gpt.token_embedding.weight
    if weight.device.type == "cuda" and kernels != "native" and not named and quantize == "none":
        return cuda_path(gpt, kernels, batch_invariant=batch_invariant)
    try:
        library = _native(gpt.config, weight.device, weight.dtype, kernels, kernel_target, log)
    except KernelsUnavailable as error:
        if isinstance(error, TargetRefused):
            raise KernelError(str(error)) from error
        if kernels == "native" or named or quantize != "none":
            asked = f"kernel_target is {kernel_target}" if named else f"quantize is {quantize}"
            asked = "kernels is native" if kernels == "native" else asked
            raise KernelError(
                f"{asked}, but there are no native kernels for this: {error}"
            ) from error
        unasked = kernels != "torch" and weight.device.type == "cpu"
        return DecodePath.plain(PlainDecoder, "torch", str(error) if unasked else None)
    return _native_path(library, weight.dtype, quantize=quantize, threads=threads, named=named)


def cuda_path(
    gpt: GPT,
    kernels: KernelChoice,
    *,
    batch_invariant: bool,
    make: Callable[..., Decoder] = GraphDecoder,
) -> DecodePath:
    """Decoding on a GPU: by `make` if its decoders pass the self-check, else in plain torch, with
    the fault as the note. Raises KernelError if that rules out `batch_invariant`."""
    if kernels == "torch":
        if batch_invariant:
            raise KernelError(
                "kernels is torch, whose bits depend on the batch on CUDA, and batch_invariant is "
                "asked for; set kernels to auto"
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


def instructions(library: NativeLibrary) -> str:
    """The widest instructions that the kernels were built for, as they say themselves."""
    function = library.functions.logitd_instructions
    function.restype = c_char_p
    name: bytes = function()
    return name.decode()


def has_tiles(library: NativeLibrary) -> bool:
    """Whether the kernels compute products by AMX."""
    return bool(library.functions.logitd_has_tiles())


def _native_path(
    library: NativeLibrary,
    dtype: torch.dtype,
    *,
    quantize: Quantization,
    threads: int,
    named: bool,
) -> DecodePath:
    """Decoding by the native kernels; prompts too, where the processor is fast enough at that, or
    where their target was `named`."""
    fast = prefills_natively(dtype, quantize=quantize, features=library.features)

    def make(gpt: GPT, cache: KVCache, *, owns_weights: bool = False) -> Decoder:
        return NativeDecoder(
            library.functions,
            gpt,
            cache,
            threads=threads,
            quantize=quantize,
            prefills=fast or named,
            owns_weights=owns_weights,
        )

    what = [instructions(library), *([] if quantize == "none" else [quantize])]
    if named and library.target is not None:
        what.append(f"target {library.target.name}")
    return DecodePath(
        make,
        partial(make, owns_weights=True),
        f"native ({', '.join(what)})",
        kernels=library.description,
    )


def _native(
    config: GPTConfig,
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice,
    kernel_target: KernelTarget,
    log: Callable[[str], None],
) -> NativeLibrary:
    """The native kernels for a model of this shape. Raises KernelsUnavailable."""
    if kernels == "torch":
        raise KernelsUnavailable("kernels is torch")
    reason = not_covered(config, device, dtype)
    if reason is not None:
        raise KernelsUnavailable(reason)
    library = load_library(log, target=kernel_target)
    if kernel_target != "auto" and "amx_tile" in library.features and not has_tiles(library):
        raise TargetRefused(
            f"kernel_target is {kernel_target}, and this system does not let a process use AMX, "
            "though the processor has it; take x86-64-v4-bf16, or leave it at auto"
        )
    return library
