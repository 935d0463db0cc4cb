"""Parts: the commands that measure, and the checkpoints that they need.

Each is a command of benchmarks/README.md whose last line is JSON. Those that no goal is read from
are there for their tables.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.__main__ import SMALL, shape_named
from benchmarks.peers.weights import Shape
from benchmarks.synthetic import save_synthetic
from model.transformer.config import gpt2_shape

ROOT = Path(__file__).parent.parent.parent
BUNDLED = "python-small"
NUMBERS = ("float32", "bfloat16", "int8")
"""int8 are the matrices, the rest is bfloat16 then."""
OVER_HTTP = "bfloat16"
"""The numbers in which a server is measured too."""
BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class Part:
    """A command whose last line is JSON. `seconds`: it is ended after that."""

    name: str
    command: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`peer_python` None: nobody is compared with."""

    folder: Path
    threads: int
    peer_python: str | None
    small: bool

    @property
    def shapes(self) -> tuple[str, ...]:
        return ("small",) if self.small else ("124m", "30m", BUNDLED)

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 3) if self.small else BATCHES

    def checkpoint(self, shape: str) -> Path:
        bundled = shape == BUNDLED
        return ROOT / "checkpoints" / BUNDLED if bundled else self.folder / "checkpoints" / shape


def parts(plan: Plan) -> Iterator[Part]:
    for shape in plan.shapes:
        for numbers in NUMBERS:
            yield Part(f"bench-{shape}-{numbers}", bench(plan, shape, numbers), 1800)
    profiled = plan.shapes[-1]
    ends = ",".join(str(batch) for batch in sorted({plan.batches[0], plan.batches[-1]}))
    yield Part(
        "profile",
        (*logitd_bench(plan, profiled), "--profile", "--batches", ends, *load_of(plan)),
        900,
    )
    for shape in plan.shapes:
        where = str(plan.checkpoint(shape)) if plan.small or shape == BUNDLED else shape
        yield Part(
            f"determinism-{shape}",
            (*module("benchmarks.determinism"), "--shape", where, "--dtype", "bfloat16",
             "--threads", str(plan.threads)),
            900,
        )  # fmt: skip
        yield Part(
            f"footprint-{shape}",
            (*module("benchmarks.footprint"), "--checkpoint", str(plan.checkpoint(shape)),
             "--threads", str(plan.threads)),
            600,
        )  # fmt: skip
    if plan.peer_python is not None:
        for shape in plan.shapes:
            if shape != BUNDLED:
                yield Part(f"peers-{shape}", peers(plan, shape, plan.peer_python), 5400)
                yield Part(f"serving-{shape}", serving(plan, shape, plan.peer_python), 3600)
    if not plan.small:
        yield from tables(plan)


def tables(plan: Plan) -> Iterator[Part]:
    """What else benchmarks/README.md has tables of: of the bundled checkpoint, which is large."""
    threads = ("--threads", str(plan.threads))
    for name, flags in (
        ("engine_step", threads),
        ("speculation", threads),
        ("constraints", threads),
        ("constraints", (*threads, "--dtype", "bfloat16")),
        ("large_reply", threads),
    ):
        suffix = "-bfloat16" if "bfloat16" in flags else ""
        yield Part(f"{name}{suffix}", (*module(f"benchmarks.{name}"), *flags), 1800)
    spinning = ("env", "GOMP_SPINCOUNT=10000")  # as `logitd` sets it for itself
    yield Part("busy_neighbour", (*spinning, *module("benchmarks.busy_neighbour")), 1800)


def module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


def logitd_bench(plan: Plan, shape: str) -> tuple[str, ...]:
    checkpoint = str(plan.checkpoint(shape))
    return (*module("service.cli"), "bench", "--checkpoint", checkpoint,
            "--threads", str(plan.threads))  # fmt: skip


def load_of(plan: Plan) -> tuple[str, ...]:
    if not plan.small:
        return ()
    return ("--prompt-tokens", "8", "--tokens", "16", "--rounds", "1")


def bench(plan: Plan, shape: str, numbers: str) -> tuple[str, ...]:
    int8 = numbers == "int8"
    return (
        *logitd_bench(plan, shape),
        *("--dtype", "bfloat16" if int8 else numbers),
        *(("--quantize", "int8") if int8 else ()),
        *("--batches", ",".join(str(batch) for batch in plan.batches)),
        *(() if numbers == OVER_HTTP else ("--skip-http",)),
        *load_of(plan),
    )


def peers(plan: Plan, shape: str, python: str) -> tuple[str, ...]:
    small = ("--prompt", "8", "--steps", "10", "--rounds", "1") if plan.small else ()
    return (
        *module("benchmarks.peers"), "--shape", shape, "--threads", str(plan.threads),
        "--peers", "logitd", "torch", "transformers", "llama.cpp", "--peer-python", python,
        "--batches", *(str(batch) for batch in plan.batches), *small,
    )  # fmt: skip


def serving(plan: Plan, shape: str, python: str) -> tuple[str, ...]:
    small = ("--prompt", "8", "--tokens", "24", "--rounds", "1") if plan.small else ()
    return (
        *module("benchmarks.peers.serving"), "--shape", shape, "--threads", str(plan.threads),
        "--dtypes", OVER_HTTP, "--peer-python", python,
        "--batches", *(str(batch) for batch in plan.batches), *small,
    )  # fmt: skip


def make_checkpoints(plan: Plan) -> None:
    """Random weights of the shapes that are not bundled, where they are not there yet."""
    for shape in plan.shapes:
        path = plan.checkpoint(shape)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_synthetic(path, gpt2_shape(**asdict(sizes(shape))))


def sizes(shape: str) -> Shape:
    if shape == "small":
        return Shape(**{**asdict(SMALL), "context_length": 512})
    return shape_named(shape)
