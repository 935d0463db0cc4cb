"""Targets: which targets a processor can run, computed as a pure function of its features."""

from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.kernels.cpu.targets import (
    TARGETS,
    refusal,
    runnable,
    target_named,
    targets_of,
)
from logitd.model.inference.options import TargetName

V3 = target_named("x86-64-v3").features
ZEN3 = V3 | {"fpu", "sse", "sse2", "sha_ni", "vaes"}
CASCADE_LAKE = ZEN3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
SAPPHIRE_RAPIDS = CASCADE_LAKE | {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}
"""Some features of these processors, as Linux names them."""
WORDS = sorted(SAPPHIRE_RAPIDS | {"asimd", "fp", "bf16"})

machines = st.sampled_from(["x86_64", "aarch64", "arm64", "AMD64", "riscv64"])
features = st.frozensets(st.sampled_from(WORDS))


@given(machines, features)
def test_accepted_targets_run(machine: str, has: frozenset[str]) -> None:
    for target in TARGETS:
        assert (target in runnable(machine, has)) == (refusal(target, machine, has) is None)


@given(machines, features, features)
def test_richer_processor_runs_targets_of_a_poorer_one(
    machine: str, some: frozenset[str], more: frozenset[str]
) -> None:
    fewer = runnable(machine, some)
    assert {*fewer} <= {*runnable(machine, some | more)}


@given(machines, features, st.sets(st.sampled_from(TARGETS)))
def test_last_runnable_target_is_the_greatest(
    machine: str, has: frozenset[str], among: set[object]
) -> None:
    there = tuple(target for target in TARGETS if target in among)
    fitting = runnable(machine, has, there)
    assert {*fitting} == {*there} & {*runnable(machine, has)}
    for target in fitting:
        assert target.features <= fitting[-1].features


@pytest.mark.parametrize(
    ("machine", "has", "best"),
    [
        ("x86_64", ZEN3, "x86-64-v3"),
        ("x86_64", ZEN3 - {"fma"}, "x86-64-v2"),
        ("x86_64", CASCADE_LAKE, "x86-64-v4-vnni"),
        ("x86_64", CASCADE_LAKE - {"avx512_vnni"}, "x86-64-v4"),
        ("x86_64", CASCADE_LAKE | {"avx512_bf16"}, "x86-64-v4-bf16"),
        ("x86_64", SAPPHIRE_RAPIDS, "x86-64-v4-amx"),
        ("x86_64", SAPPHIRE_RAPIDS - {"amx_int8"}, "x86-64-v4-bf16"),
        ("x86_64", CASCADE_LAKE - {"avx512vl"}, "x86-64-v3"),
        ("x86_64", frozenset({"fpu", "sse2"}), None),
        ("x86_64", frozenset(), None),
        ("aarch64", frozenset({"fp", "asimd"}), "armv8-a"),
        ("arm64", frozenset(), "armv8-a"),
        ("riscv64", frozenset(), None),
    ],
)
def test_best_target_of_real_processors(
    machine: Literal["x86_64"], has: frozenset[str], best: str | None
) -> None:
    assert [target.name for target in runnable(machine, has)][-1:] == ([best] if best else [])


def test_refusal_names_the_missing_features_and_the_runnable_targets() -> None:
    message = refusal(target_named("x86-64-v4-bf16"), "x86_64", CASCADE_LAKE) or ""
    for part in ("kernel_target", "x86-64-v4-bf16", "avx512_bf16", "x86-64-v4-vnni"):
        assert part in message
    message = refusal(target_named("armv8-a"), "x86_64", frozenset()) or ""
    for part in ("kernel_target", "armv8-a", "x86_64", "auto"):
        assert part in message


def test_every_name_has_a_target() -> None:
    assert [target.name for target in TARGETS] == [*get_args(TargetName)]
    assert {*targets_of("x86_64"), *targets_of("aarch64")} == {*TARGETS}
