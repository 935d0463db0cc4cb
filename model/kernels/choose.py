"""Choose: which decoder runs a model on this machine, and why not the native one.

From what is asked for and what there is, never from a measurement at start-up: the same
configuration always computes the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.config import KernelChoice, Quantization
from model.gpt import GPT
from model.kernels.decoder import NativeDecoder, unsupported
from model.kernels.library import KernelsUnavailable, load_library
from model.kernels.plain import Decoder, PlainDecoder
from model.kv_cache import KVCache


class KernelError(ValueError):
    """What was asked for cannot be had on this machine."""


@dataclass(frozen=True, slots=True)
class DecodePath:
    """How decode steps are computed.

    name   for people: "native (AVX-512 BF16)" or "torch"
    note   why it is torch although nobody asked for that, or None
    """

    make_decoder: Callable[[GPT, KVCache], Decoder]
    name: str
    note: str | None = None


def choose_decode_path(
    gpt: GPT,
    *,
    kernels: KernelChoice = "auto",
    quantize: Quantization = "none",
    threads: int,
    say: Callable[[str], None] = lambda line: None,
) -> DecodePath:
    """The native decoder where it covers the model and can be built, else torch.

    Raises KernelError where `kernels` or `quantize` leave no such way out.
    """
    if kernels == "torch":
        if quantize != "none":
            raise KernelError(
                f"quantize is {quantize}, which the native kernels compute; set kernels to auto"
            )
        return DecodePath(PlainDecoder, "torch")
    on_cpu = gpt.token_embedding.weight.device.type == "cpu"
    reason = unsupported(gpt)
    if reason is None:
        try:
            library = load_library(say)
        except KernelsUnavailable as error:
            reason = str(error)
        else:
            quantized = quantize == "int8"

            def make(gpt: GPT, cache: KVCache) -> Decoder:
                return NativeDecoder(library, gpt, cache, threads=threads, quantized=quantized)

            return DecodePath(make, f"native ({instructions()}{', int8' if quantized else ''})")
    if kernels == "native" or quantize != "none":
        asked = "kernels is native" if kernels == "native" else f"quantize is {quantize}"
        raise KernelError(f"{asked}, but there are no native kernels for this: {reason}")
    return DecodePath(PlainDecoder, "torch", reason if on_cpu else None)


def instructions() -> str:
    """The widest instructions that the kernels were built for, for people."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "portable"
    features = set(text.partition("flags")[2].partition("\n")[0].split())
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
