"""A small text with structure, a configuration that trains on it in a second or two, and processes
to train in."""

import ctypes
import multiprocessing
import random
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.step import flops
from logitd.model.training.trainer import train

Configure = Callable[..., TrainingConfig]


def story(sentences: int, seed: int = 0) -> str:
    """Sentences of a fixed grammar: easy to learn, the same on every machine."""
    draw = random.Random(seed)
    who = ("the cat", "a dog", "the old man", "my sister", "a small bird", "the king")
    did = ("saw", "found", "lost", "painted", "wanted", "forgot")
    what = ("a red ball", "the river", "some bread", "an open door", "the long road", "nothing")
    when = ("today", "last night", "in the morning", "again")
    return "\n".join(
        f"{draw.choice(who)} {draw.choice(did)} {draw.choice(what)} {draw.choice(when)}."
        for _ in range(sentences)
    )


@pytest.fixture(scope="session", autouse=True)
def small_products() -> Iterator[None]:
    """Shrink the matrices of the speed measurement at the start of a run. The usual 512 x 512
    matrices would take a quarter of the time of a short run. In bfloat16 they would take seconds on
    machines where torch has no fast bfloat16 products. No test here uses the measured speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "RATE_WIDTH", 64)
        yield


@pytest.fixture(scope="session")
def story_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(story(1500), encoding="utf-8")
    return path


def configuration(story_file: Path, out: Path, **given: Any) -> TrainingConfig:
    """Configuration of a very small model; keyword arguments replace its values."""
    values: dict[str, Any] = {
        "data": (str(story_file),),
        "out": out,
        "vocab_size": 320,
        "n_layer": 2,
        "n_head": 2,
        "n_kv_head": 1,
        "d_model": 32,
        "context_length": 32,
        "steps": 12,
        "batch_size": 4,
        "dtype": "float32",
        "threads": 1,
        "log_every": 2,
        "eval_every": 6,
        "eval_batches": 2,
        "checkpoint_every": 6,
        "sample_every": 1000,
        "sample_tokens": 1,
    }
    return TrainingConfig(**{**values, **given})


@pytest.fixture
def configure(story_file: Path, tmp_path: Path) -> Configure:
    """A function that makes a configuration of a very small model; its arguments replace values."""

    def make(*, out: Path = tmp_path / "run", **given: Any) -> TrainingConfig:
        return configuration(story_file, out, **given)

    return make


@pytest.fixture(scope="session")
def straight(story_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `configure()` that was never interrupted. Read or copy it; do not change it."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    train(configuration(story_file, out))
    return out


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """A source of new processes that have imported the trainer but have computed nothing yet."""
    context = multiprocessing.get_context("forkserver")
    used = ["torch._dynamo", "hypothesis"]  # torch's optimizers import the first when they begin
    context.set_forkserver_preload(["logitd.model.training.trainer", *used, __name__])
    return context


LESSER = ("x86-64-v3", "x86-64-v2")
"""Targets of the native kernels for less capable processors, with and without AVX2. The slow set
repeats the tests of native code for these targets."""


@pytest.fixture(
    scope="session",
    params=["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in LESSER)],
)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The native kernels for one target. Skips the test if there is no compiler, or if the
    processor cannot run them."""
    try:
        return load_library(target=request.param).functions
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
