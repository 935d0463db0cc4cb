"""The Triton kernels, compiled for GPUs on a machine without one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from logitd.model.inference.kernels.cuda import forward  # noqa: E402
from logitd.model.inference.kernels.cuda.sample import FIELDS  # noqa: E402
from logitd.model.inference.kv_cache import KVCache  # noqa: E402
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt  # noqa: E402

SHARED = 96 * 1024
"""Bytes of shared memory that any recent GPU has for a program."""
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.float64: "fp64",
}  # fmt: skip
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "capability"),
    [("gpt2", torch.float32, 80), ("llama", torch.bfloat16, 90)],
    ids=["float32", "bfloat16"],
)
def test_kernels_fit_into_shared_memory(
    family: str, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel once needed 264 KiB of shared memory for a float32 matrix with 1,024 columns."""
    compiled = set[str]()
    for kernel, given, sizes in launches(family, dtype, monkeypatch, linked=capability >= 90):
        source, options = source_of(kernel, given, sizes)
        if (key := f"{source.hash()} {options}") not in compiled:
            compiled.add(key)
            target = GPUTarget("cuda", capability, 32)
            shared = triton.compile(source, target=target, options=options).metadata.shared
            assert shared <= SHARED, (kernel.__name__, sizes)
    assert compiled


def launches(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, linked: bool
) -> Iterator[Launch]:
    """The kernel launches of forward steps of several sizes. They are recorded but not run."""
    found = list[Launch]()
    monkeypatch.setattr(
        forward.StepForward, "_launch",
        lambda _, kernel, grid, *given, **sizes: found.append((kernel, given, sizes)),
    )  # fmt: skip
    config = tiny_config(**{**FAMILIES[family], "n_layer": 1, "d_model": 1024, "n_head": 4})
    gpt = tiny_gpt(config).to(dtype)
    for rows, invariant in ((1, False), (1, True), (8, True), (32, False), (40, False)):
        cache = KVCache(config, rows, device=torch.device("cpu"), dtype=dtype)
        step = forward.StepForward(gpt, cache, batch_invariant=invariant)
        given = torch.zeros(rows, 4 + FIELDS, dtype=torch.int64)
        logits = torch.zeros(rows, config.vocab_size)
        step.logits(given, given[:, 0], logits, keys=32, several=rows == 40)
    for kernel, args, sizes in found:
        yield kernel, args, {**sizes, "LINKED": linked}


def source_of(
    kernel: Any, given: tuple[Any, ...], sizes: dict[str, Any]
) -> tuple[ASTSource, dict[str, Any]]:
    """A launch as input to Triton's compiler, as if all tensors were aligned."""
    options: dict[str, Any] = {
        name: sizes.pop(name) for name in ("num_warps", "num_stages") if name in sizes
    }
    values = dict(zip(kernel.arg_names, given, strict=False))
    constants = {**sizes, **{name: None for name, value in values.items() if value is None}}
    signature = {name: "constexpr" if name in constants else type_of(values[name])
                 for name in kernel.arg_names}  # fmt: skip
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    aligned = {places[name]: [["tt.divisibility", 16]]
               for name, kind in signature.items() if kind.startswith("*")}  # fmt: skip
    fixed = {places[name]: value for name, value in constants.items()}
    return ASTSource(kernel, signature, fixed, aligned), options


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"
