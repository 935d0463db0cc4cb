"""Targets: types of processors that the native kernels can be built for, instead of this machine's
processor. A machine without a compiler chooses among the targets of prebuilt kernels. Users can
choose one target for all their machines to get the same bits on different processors. The names
come from GCC and Clang. After `x86-64-v4`, the suffixes -vnni and -bf16 add dot products of
AVX-512, and the suffix -amx also adds the tiles of AMX.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from logitd.model.inference.options import TargetName

X86 = frozenset({"x86_64", "AMD64"})
ARM = frozenset({"aarch64", "arm64"})
V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Target:
    """A type of processor.

    machines   names of its architecture
    features   processor features that its code may use, by their names in Linux
    processor  the compiler's name of the processor
    extra      compiler flags for features that `processor` does not include
    """

    name: TargetName
    machines: frozenset[str]
    features: frozenset[str]
    processor: str
    extra: tuple[str, ...] = ()


_VNNI = ("-mavx512vnni",)
_BF16 = (*_VNNI, "-mavx512bf16")
_TILES = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
TARGETS = (
    Target("x86-64-v2", X86, V2, "x86-64-v2"),
    Target("x86-64-v3", X86, V3, "x86-64-v3"),
    Target("x86-64-v4", X86, V4, "x86-64-v4"),
    Target("x86-64-v4-vnni", X86, V4 | {"avx512_vnni"}, "x86-64-v4", _VNNI),
    Target(
        "x86-64-v4-bf16", X86, V4 | {"avx512_vnni", "avx512_bf16"},
        "x86-64-v4", _BF16,
    ),
    Target(
        "x86-64-v4-amx", X86, V4 | {"avx512_vnni", "avx512_bf16"} | _TILES,
        "x86-64-v4", (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    ),
    Target("armv8-a", ARM, frozenset(), "armv8-a"),
)  # fmt: skip
"""All targets, in ascending order of features within an architecture."""


def target_named(name: TargetName) -> Target:
    return next(target for target in TARGETS if target.name == name)


def targets_of(machine: str) -> tuple[Target, ...]:
    """The targets of this machine type (as in `platform.machine()`)."""
    return tuple(target for target in TARGETS if machine in target.machines)


def runnable(
    machine: str, features: Collection[str], among: Iterable[Target] = TARGETS
) -> tuple[Target, ...]:
    """The targets that a processor can run; the one with the most features is last."""
    return tuple(
        target for target in among if machine in target.machines and target.features <= {*features}
    )


def refusal(target: Target, machine: str, features: Collection[str]) -> str | None:
    """The reason why a processor cannot run a target; None if it can."""
    if machine not in target.machines:
        why = f"this machine is {machine}"
    elif lacking := sorted(target.features - {*features}):
        why = f"this processor lacks {', '.join(lacking)}"
    else:
        return None
    here = ", ".join(one.name for one in runnable(machine, features))
    return f"kernel_target is {target.name}, and {why}: set it to " + (
        f"auto or one of {here}" if here else "auto"
    )
