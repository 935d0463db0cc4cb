"""Dtype and decoder are chosen for the machine, with a stated reason and without a loss in
quality."""

import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.data.errors import DataError
from logitd.model.evaluation.held_out import held_out_windows
from logitd.model.evaluation.quantization import decode_nats
from logitd.model.inference.kernels import select
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder, prefills_natively
from logitd.model.inference.kernels.cpu.library import NativeLibrary
from logitd.model.inference.kernels.cpu.targets import runnable, target_named
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kernels.select import (
    DTypeChoice,
    KernelError,
    check_kv_cache_dtype,
    choose_decode_path,
    choose_dtype,
    cuda_path,
)
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import ComputeOptions, KVCacheDType, Quantization
from logitd.model.processor import bfloat16_instructions, processor_features
from logitd.model.transformer.gpt import GPT
from tests.model.factories import tiny_config, tiny_gpt

CPU = torch.device("cpu")
BUNDLED = Path(__file__).parents[4] / "checkpoints" / "python-small"
COVERED = tiny_config(head_dim=16)


@pytest.fixture
def multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the processor has bfloat16 dot products."""
    monkeypatch.setattr(select, "processor_features", lambda: frozenset({"avx512_bf16"}))


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("fpu avx2 avx512f avx512_bf16", "AVX-512 BF16"),
        ("avx512_bf16 amx_bf16 amx_tile", "AMX-BF16"),
        ("fp asimd i8mm bf16", "Arm BF16"),
        ("fpu avx2 avx512f avx512_vnni", None),
        ("", None),
    ],
)
def test_bfloat16_instructions_of_a_processor(features: str, expected: str | None) -> None:
    assert bfloat16_instructions(frozenset(features.split())) == expected


def test_auto_dtype_on_cuda_is_bfloat16() -> None:
    assert choose_dtype(COVERED, torch.device("cuda")) == DTypeChoice("bfloat16", "auto: on CUDA")


@pytest.mark.usefixtures("multiplies_bfloat16")
@pytest.mark.parametrize(
    ("head_dim", "kernels", "compiler", "why"),
    [
        (16, "torch", "c++", "kernels is torch"),
        (8, "auto", "c++", "head_dim is 8"),
        (16, "auto", "no-such-compiler", "compiler"),
    ],
)
def test_auto_dtype_without_native_decoding_is_float32(
    head_dim: int, kernels: Any, compiler: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    choice = choose_dtype(tiny_config(head_dim=head_dim), CPU, ComputeOptions(kernels=kernels))
    assert choice.name == "float32"
    assert why in choice.why


@pytest.mark.usefixtures("library", "multiplies_bfloat16")
def test_auto_dtype_is_a_native_one_of_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_dtype(COVERED, CPU).name == "bfloat16"
    assert "AVX-512 BF16" in choose_dtype(COVERED, CPU).why
    monkeypatch.setattr(select, "processor_features", frozenset)
    assert choose_dtype(COVERED, CPU).name == "float32"
    assert "dot products" in choose_dtype(COVERED, CPU).why


@pytest.mark.parametrize(
    ("gpt", "note"),
    [(tiny_gpt(tiny_config(head_dim=16)).half(), "float16"), (tiny_gpt(), "head_dim.*8.*16.*256")],
)
def test_uncovered_model_is_decoded_by_torch_with_a_note(gpt: GPT, note: str) -> None:
    path = choose_decode_path(gpt, threads=1)
    assert path.name == "torch"
    assert re.search(note, path.note or "")
    assert choose_decode_path(gpt, ComputeOptions(kernels="torch"), threads=1).note is None
    with pytest.raises(KernelError, match=f"kernels.*native.*{note}"):
        choose_decode_path(gpt, ComputeOptions(kernels="native"), threads=1)
    with pytest.raises(KernelError, match=f"quantize.*int8.*{note}"):
        choose_decode_path(gpt, ComputeOptions(quantize="int8"), threads=1)
    with pytest.raises(KernelError, match=r"quantize.*int8.*kernels.*auto"):
        choose_decode_path(gpt, ComputeOptions(kernels="torch", quantize="int8"), threads=1)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_native_path_names_its_instructions_and_format(quantize: Quantization) -> None:
    path = choose_decode_path(tiny_gpt(COVERED), ComputeOptions(quantize=quantize), threads=1)
    assert path.name.startswith("native (")
    assert path.name.endswith(f", {quantize})") == (quantize != "none")
    assert path.note is None


HERE = runnable(platform.machine(), processor_features())


def test_target_is_refused_if_the_system_withholds_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the target were accepted, this machine would compute without AMX and produce different
    bits than the rest of a fleet."""

    class Withheld:
        def logitd_has_tiles(self) -> int:
            return 0

    target = target_named("x86-64-v4-amx")
    loaded = NativeLibrary(cast(ctypes.CDLL, Withheld()), target, "prebuilt")
    monkeypatch.setattr(select, "load_library", lambda log, target: loaded)
    with pytest.raises(KernelError, match=r"kernel_target.*AMX"):
        choose_decode_path(
            tiny_gpt(COVERED), ComputeOptions(kernel_target="x86-64-v4-amx"), threads=1
        )


def test_target_with_torch_is_refused() -> None:
    with pytest.raises(KernelError, match=r"kernel_target.*x86-64-v3.*kernels.*torch"):
        choose_decode_path(
            tiny_gpt(COVERED), ComputeOptions(kernels="torch", kernel_target="x86-64-v3"), threads=1
        )
    name = HERE[-1].name if HERE else "armv8-a"
    with pytest.raises(KernelError, match=f"kernel_target.*{name}.*head_dim.*8"):
        choose_decode_path(tiny_gpt(), ComputeOptions(kernel_target=name), threads=1)


@pytest.mark.usefixtures("multiplies_bfloat16")
@pytest.mark.skipif(not HERE, reason="this processor runs no target")
def test_target_decides_native_prompts_and_dtype(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = NativeLibrary(library, HERE[0], "prebuilt")
    monkeypatch.setattr(select, "load_library", lambda log, target: loaded)
    gpt, name = tiny_gpt(COVERED), HERE[0].name
    path = choose_decode_path(gpt, ComputeOptions(kernel_target=name), threads=1)
    decoder = path.make_decoder(gpt, KVCache(gpt.config, 1, device=CPU, dtype=torch.float32))
    assert decoder.prefill_matches_decode
    decoder.close()
    assert path.kernels == f"{name}, prebuilt"
    assert path.name.endswith(f", target {name})")
    choice = choose_dtype(COVERED, CPU, ComputeOptions(kernel_target=name))
    assert choice == DTypeChoice("float32", f"auto: {name} has no dot products of bfloat16")


ELSEWHERE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
}
"""Environment variables that restrict torch to the instructions of a less capable processor."""
SHOW = """
import sys
from logitd.model.llm import LLM, SamplingParams
how = {"kernels": "torch"} if sys.argv[2] == "torch" else {"kernel_target": sys.argv[2]}
with LLM(sys.argv[1], dtype="bfloat16", threads=1, **how) as llm:
    params = SamplingParams(max_tokens=24, seed=3, temperature=0.9)
    print(llm.logits("def read(self, size=-1):").tobytes().hex())
    print(llm.hidden_states("for line in file:").tobytes().hex())
    print(llm.generate("import os", params)[0].token_ids)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_target_has_the_same_bits_on_processors_where_torch_differs() -> None:
    """The variables in ELSEWHERE restrict torch's instructions, which changes torch's bits."""
    if "x86-64-v3" not in [target.name for target in HERE]:
        pytest.skip("this processor does not run x86-64-v3")

    def shown(target: str, **environment: str) -> str:
        """The numbers that a new process computes with a kernel target or with torch."""
        return subprocess.run(
            [sys.executable, "-c", SHOW, str(BUNDLED), target],
            check=True, capture_output=True, text=True, env={**os.environ, **environment},
        ).stdout  # fmt: skip

    assert shown("x86-64-v3") == shown("x86-64-v3", **ELSEWHERE)
    assert shown("torch") != shown("torch", **ELSEWHERE), "torch has the same bits too"


def test_gpu_path_with_kernels_torch_is_plain_torch() -> None:
    path = cuda_path(tiny_gpt(), "torch", batch_invariant=False)
    assert (path.make_decoder, path.name, path.note) == (PlainDecoder, "torch", None)
    with pytest.raises(KernelError, match=r"kernels.*torch.*batch"):
        cuda_path(tiny_gpt(), "torch", batch_invariant=True)


def test_kv_cache_in_int8_is_refused_off_the_cpu() -> None:
    for kept in get_args(KVCacheDType):
        check_kv_cache_dtype(kept, CPU)
    check_kv_cache_dtype("auto", torch.device("cuda:1"))
    with pytest.raises(KernelError, match=r"int8.*CPU.*cuda:1"):
        check_kv_cache_dtype("int8", torch.device("cuda:1"))


def nats(logits: Tensor, targets: Tensor) -> float:
    """The summed loss of logits (B, T, V) for targets (B, T)."""
    return float(cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum"))


def test_bfloat16_loses_less_than_two_permille(library: ctypes.CDLL) -> None:
    """This is why "auto" may choose bfloat16. On a few windows of its held-out text, the bundled
    checkpoint has a loss within 0.2 % of its loss in float32, both when torch prefills and when the
    kernels decode."""
    try:
        _, windows = held_out_windows(read_checkpoint(BUNDLED))
    except DataError as reason:
        pytest.skip(str(reason))
    ((inputs, targets),) = windows
    inputs, targets = inputs[:4], targets[:4]
    prefilled, decoded = [], []
    for dtype in (torch.float32, torch.bfloat16):
        gpt = load_checkpoint(BUNDLED, device=CPU, dtype=dtype)[1]
        with torch.inference_mode():
            prefilled.append(nats(gpt(inputs).logits, targets))
        decoder = choose_decode_path(gpt, ComputeOptions(kernels="native"), threads=1).make_decoder
        decoded.append(decode_nats(gpt, inputs, targets, decoder))
    for exact, rounded in (prefilled, decoded):
        assert rounded != exact
        assert rounded == pytest.approx(exact, rel=0.002)
    assert decoded[0] == pytest.approx(prefilled[0], rel=1e-4)


@pytest.mark.parametrize(
    ("features", "dtype", "quantize", "expected"),
    [
        ({"avx2", "fma"}, torch.float32, "none", False),
        ({"avx2", "fma"}, torch.bfloat16, "none", True),
        ({"avx512f"}, torch.float32, "none", True),
        ({"avx512f"}, torch.bfloat16, "none", False),
        ({"avx512f", "avx512_bf16"}, torch.bfloat16, "none", True),
        ({"avx512f", "avx512_bf16"}, torch.bfloat16, "int8", False),
        ({"avx512f", "avx512_vnni"}, torch.bfloat16, "int8", True),
        ({"sse4_1", "ssse3"}, torch.float32, "int8", False),
        ({"avx2", "fma"}, torch.float32, "int8", True),
        ({"avx2", "fma"}, torch.bfloat16, "int4", True),
        ({"avx2", "fma", "avx512f"}, torch.bfloat16, "int4", False),
        ({"avx512f", "avx512_vnni"}, torch.bfloat16, "int4", True),
        ({"asimd", "bf16"}, torch.bfloat16, "none", False),
    ],
)
def test_prompts_are_native_if_many_rows_are_fast(
    features: set[str], dtype: torch.dtype, quantize: Quantization, expected: bool
) -> None:
    assert prefills_natively(dtype, quantize=quantize, features=features) is expected


def test_chosen_decoder_prefills_as_the_kernels_can(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = tiny_gpt(COVERED)
    v3, v4 = target_named("x86-64-v3"), target_named("x86-64-v4")
    for target, expected in ((v3, False), (v4, True)):
        loaded = NativeLibrary(library, target, "prebuilt")
        monkeypatch.setattr(select, "load_library", lambda log, target, one=loaded: one)
        path = choose_decode_path(gpt, threads=1)
        cache = KVCache(gpt.config, 1, device=CPU, dtype=torch.float32)
        decoder = path.make_decoder(gpt, cache)
        assert isinstance(decoder, NativeDecoder)
        assert decoder.prefill_matches_decode is expected
        decoder.close()
