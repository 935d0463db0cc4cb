"""Several processes that train one model and communicate over loopback.

torchrun starts some of them. It imports torch, and each process that it starts imports torch again.
Tests that need only the processes use `Forked`, which takes a third of the time.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.checkpoint.adapter import read_adapter
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.run.state import read_state
from logitd.model.training.trainer import train
from tests.conftest import MATPLOTLIB
from tests.model.conftest import story
from tests.zygote import ForkedProcess, written

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 32,
    "context_length": 32,
    "dropout": 0.1,
}
RECIPE: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "batch_size": 4,
    "accumulate": 2,
    "decay": "constant",
    "clip": 1.0,
    "log_every": 1,
    "eval_every": 3,
    "eval_batches": 3,
    "checkpoint_every": 3,
    "sample_every": 1000,
    "sample_tokens": 2,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(story(600), encoding="utf-8")
    return path


def configuration(text: Path, out: str, **given: Any) -> Any:
    """A TrainingConfig that trains on `text`. `out` names the folder of the run, next to `text`."""
    values = SHAPE | RECIPE | {"data": (str(text),), "out": text.parent / out} | given
    return TrainingConfig(**values)


def flags(config: TrainingConfig) -> list[str]:
    words = []
    for name in sorted(config.model_fields_set):
        value = getattr(config, name)
        flag = "--from" if name == "from_checkpoint" else "--" + name.replace("_", "-")
        for each in value if isinstance(value, tuple) else (value,):
            words += [flag] if each is True else [flag, str(each)]
    return words


class Torchrun:
    """`torchrun --no-python --nproc-per-node N logitd train ...` in its own session."""

    def __init__(self, config: TrainingConfig, processes: int = 2) -> None:
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--no-python", *meeting,
             "--nproc-per-node", str(processes),
             sys.executable, "-m", "logitd", "train", *flags(config)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # fmt: skip

    def finish(self, timeout: float = 100) -> tuple[int, str, str]:
        """Wait for the end. Returns the output and the exit code (0 only if all processes exit with
        0)."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun ends its processes
            raise
        return self.process.returncode, out, err

    def running(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[int]:
        """Process ids in the order of the ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        ranks = {}
        for pid in map(int, children.read_text().split()):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks[next(each for each in environment if each.startswith(b"RANK="))] = pid
        return [ranks[name] for name in sorted(ranks)]


class Forked:
    """The processes that torchrun would start, forked by the zygote. They have no parent that ends
    the others when one fails, so each must end by itself."""

    def __init__(self, config: TrainingConfig, processes: int = 2) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.processes = [
            ForkedProcess(
                ["train", *flags(config)],
                stdout=self._out.fileno(),
                stderr=self._err.fileno(),
                environment={
                    **os.environ, **meeting, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank),
                },
                without=[MATPLOTLIB],
            )
            for rank in range(processes)
        ]  # fmt: skip

    def finish(self, timeout: float = 100) -> tuple[int, str, str]:
        with self._out, self._err:
            try:
                codes = [process.wait(timeout) for process in self.processes]
            finally:
                for process in self.processes:
                    process.kill()
            return max(map(abs, codes)), written(self._out), written(self._err)

    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def workers(self) -> list[int]:
        return [process.pid for process in self.processes]


Group = Torchrun | Forked


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def wait_for_step(group: Group, metrics: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while not any(each["step"] >= step for each in read(metrics)):
        assert time.monotonic() < deadline
        assert group.running(), group.finish()
        time.sleep(0.01)


def read(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(each) for each in lines if each.endswith("\n")]


def losses(run: Path) -> list[tuple[str, int, float]]:
    return [
        (each["kind"], each["step"], each["loss" if each["kind"] == "train" else "val_loss"])
        for each in read(run / "metrics.jsonl")
    ]


def assert_same_losses(one: Path, other: Path) -> None:
    """Check that the training losses are equal at all steps, and the validation losses at every
    step that both runs evaluated. The length of a run decides which of its early steps are
    evaluated."""
    both = losses(one), losses(other)
    steps = {each[:2] for each in both[0]} & {each[:2] for each in both[1]}
    shared = [[each for each in found if each[:2] in steps] for found in both]
    assert shared[0] == shared[1]
    trained = [[each for each in found if each[0] == "train"] for found in both]
    assert trained[0] == trained[1]


def test_two_processes_have_the_bits_of_one_that_accumulates_two_batches(text: Path) -> None:
    """The runs use dropout, clipping and Muon. One process then continues the run of two and
    reports the changed number of processes."""
    one = configuration(text, "one", steps=6)
    two = configuration(text, "two", steps=3)
    started = Torchrun(two)
    train(one)
    code, out, err = started.finish()
    assert code == 0, err
    assert out.count("step      3  saved") == 1, "one of the two reports"
    assert "in each of 2 processes" in out
    assert out.count("serve it") == 1
    notices: list[str] = []
    resume = TrainingConfig(out=two.out, resume=True, steps=6)
    train(resume, lambda event: notices.append(str(event)))
    assert any("processes 1, was 2" in notice for notice in notices)
    assert_same_losses(one.out, two.out)
    weights = [read_state(run / "state" / "state.pt").weights for run in (one.out, two.out)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_two_processes_continue_where_one_stopped(text: Path) -> None:
    one = configuration(text, "one", steps=6)
    resumed = configuration(text, "resumed", steps=3)
    train(one)
    train(resumed)
    code, _, err = Forked(TrainingConfig(out=resumed.out, resume=True, steps=6)).finish()
    assert code == 0, err
    assert_same_losses(one.out, resumed.out)


def test_batch_is_divided_if_accumulation_is_not(text: Path) -> None:
    """One process computes 8 sequences in one pass; two processes compute 4 each, or twice as many
    while windows are short. The tokens are the same, but sums are computed in a different order."""
    given = {"batch_size": 8, "accumulate": 1, "dropout": 0.0, "steps": 4}
    given |= {"context_length": 256, "short_windows": 0.5}
    one, two = configuration(text, "one", **given), configuration(text, "two", **given)
    train(one)
    code, _, err = Forked(two).finish()
    assert code == 0, err
    pairs = list(zip(losses(one.out), losses(two.out), strict=True))
    assert all(a[:2] == b[:2] and a[2] == pytest.approx(b[2], rel=1e-3) for a, b in pairs)


@pytest.mark.parametrize("to", ["torchrun", "rank 1"])
def test_signal_to_one_process_stops_all_at_the_same_step(text: Path, to: str) -> None:
    """A cluster sends SIGTERM to torchrun. The signal may also reach a process other than the main
    one."""
    config = configuration(text, "run", steps=100_000, sample_every=100_000)
    started: Group
    if to == "torchrun":
        started = torchrun = Torchrun(config)
        wait_for_step(started, config.out / "metrics.jsonl", 2)
        torchrun.process.terminate()
    else:
        started = Forked(config)
        wait_for_step(started, config.out / "metrics.jsonl", 2)
        os.kill(started.workers()[1], signal.SIGTERM)
    code, out, err = started.finish()
    assert code == (1 if to == "torchrun" else 0), err  # torchrun reports that it was stopped
    assert out.count("continue with") == 1
    step = read_state(config.out / "state" / "state.pt").counters.step
    assert f"stopped at step {step:,};" in out
    assert read_checkpoint(config.out / "latest").training.step == step
    assert train(TrainingConfig(out=config.out, resume=True, steps=step + 1)).step == step + 1


def test_clock_of_the_main_process_stops_all_processes(text: Path) -> None:
    config = configuration(text, "run", minutes=0.03)
    code, out, err = Forked(config).finish()
    assert code == 0, err
    assert "serve it" in out
    rates = [each["learning_rate"] for each in read(config.out / "metrics.jsonl")
             if each["kind"] == "train"]  # fmt: skip
    assert rates
    assert read_checkpoint(config.out / "latest").training.step == len(rates)


@pytest.mark.parametrize(("shard", "start"), [("off", Forked), ("on", Forked), ("on", Torchrun)])
def test_killed_process_ends_the_others_with_a_sentence(
    text: Path, shard: str, start: Callable[[TrainingConfig], Group]
) -> None:
    """Processes that share a model once ended with torch's traceback. Torch itself starts most of
    their communication, and its errors were not caught."""
    config = configuration(text, "run", steps=100_000, sample_every=100_000, shard=shard)
    started = start(config)
    wait_for_step(started, config.out / "metrics.jsonl", 4)
    os.kill(started.workers()[1], signal.SIGKILL)
    code, _, err = started.finish()
    assert code != 0
    assert "logitd train: process 0 of 2 stops: another process of the run has ended" in err, err
    step = read_state(config.out / "state" / "state.pt").counters.step
    assert step >= 2
    assert train(TrainingConfig(out=config.out, resume=True, steps=step + 1)).step == step + 1


def states_equal(one: Any, other: Any) -> bool:
    """True if two optimizer states have the same keys and bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(states_equal(one[k], other[k]) for k in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("given", [{"dtype": "bfloat16"}, {"optimizer": "adamw"}])
def test_shared_model_has_the_bits_of_a_whole_one(text: Path, given: dict[str, Any]) -> None:
    """Each of two processes makes one pass per step, so that all sums are computed in the same
    order. Clipping is set so high that it has no effect, because two processes sum the gradient
    norm in a different order. The runs use dropout, and either Muon in bfloat16 or AdamW. One
    process continues the run of two, and two continue the run of one."""
    given = given | {"clip": 1000.0}
    one = configuration(text, "one", steps=6, **given)
    two = configuration(text, "two", steps=3, shard="on", **given)
    started = Forked(two)
    train(one)
    code, out, err = started.finish()
    assert code == 0, err
    assert "in each of 2 processes that share the model" in out
    assert out.count("sample: ") == 3 * 3, "of steps 0, 1 and 3, once each"
    notices: list[str] = []
    resume = TrainingConfig(out=two.out, resume=True, steps=5, checkpoint_every=5)
    train(resume, lambda event: notices.append(str(event)))
    assert any("sharded False, was True" in notice for notice in notices)
    code, _, err = Forked(TrainingConfig(out=two.out, resume=True, steps=6)).finish()
    assert code == 0, err
    assert_same_losses(one.out, two.out)
    samples = [set((run / "samples.txt").read_text().split("=== ")) for run in (one.out, two.out)]
    steps = [sorted({each.split("\n")[0] for each in found if each}) for found in samples]
    assert steps == [
        [f"step {step}" for step in found] for found in ((0, 1, 2, 3, 6), (0, 1, 3, 5, 6))
    ]
    shared = [{each for each in found if each[:6] not in ("step 2", "step 5")} for found in samples]
    assert shared[0] == shared[1]
    first, second = (read_state(run / "state" / "state.pt") for run in (one.out, two.out))
    assert states_equal(first.weights, second.weights)
    assert states_equal(first.optimizers, second.optimizers)
    weights = [read_checkpoint(run / "latest").weights_sha256 for run in (one.out, two.out)]
    assert weights[0] == weights[1]


def test_adapters_of_a_shared_model_are_those_of_a_whole_one(text: Path) -> None:
    base = configuration(text, "base", steps=2)
    train(base)
    found = []
    for name, shard in (("whole", "off"), ("shared", "on")):
        config = TrainingConfig(
            data=(str(text),), out=text.parent / name, from_checkpoint=base.out / "best", lora=2,
            steps=3, **{**RECIPE, "shard": shard, "clip": 1000.0},
        )  # fmt: skip
        code, _, err = Forked(config).finish()
        assert code == 0, err
        assert config.out is not None
        found.append((losses(config.out), read_adapter(config.out / "best").weights))
    assert found[0][0] == found[1][0]
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(tensor, found[1][1][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shard", ["off", "on"])
def test_several_processes_fine_tune_as_one(text: Path, shard: str) -> None:
    """Processes other than the main one once started from random weights, and the run finished
    without an error."""
    base = configuration(text, "base", steps=12)
    train(base)
    runs = []
    for name, processes in (("one", 1), ("two", 2)):
        config = TrainingConfig(
            data=(str(text),), out=text.parent / name, from_checkpoint=base.out / "best",
            steps=3, **{**RECIPE, "shard": shard if processes > 1 else "off", "clip": 1000.0},
        )  # fmt: skip
        if processes == 1:
            train(config)
        else:
            code, _, err = Forked(config).finish()
            assert code == 0, err
        assert config.out is not None
        runs.append(losses(config.out))
    assert runs[0] == runs[1]
    before = next(loss for kind, step, loss in losses(base.out) if (kind, step) == ("eval", 12))
    assert runs[0][0][2] == pytest.approx(before, abs=0.02), "saved in bfloat16"


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_shared_model_is_compiled_by_all_processes(text: Path) -> None:
    given = {"steps": 2, "clip": 1000.0, "dropout": 0.0, "accumulate": 2, "n_layer": 1}
    whole = configuration(text, "whole", **given)
    shared = configuration(text, "shared", shard="on", compile="on", **given)
    train(whole)
    code, out, err = Forked(shared).finish(timeout=300)
    assert code == 0, err
    assert "compiling" in out
    assert "not compiled" not in out
    pairs = list(zip(losses(whole.out), losses(shared.out), strict=True))
    assert all(a[:2] == b[:2] and a[2] == pytest.approx(b[2], rel=1e-4) for a, b in pairs)


def test_refusal_is_printed_once(text: Path) -> None:
    """The refused run has 3 processes, which cannot share 8 sequences."""
    config = configuration(text, "run", steps=2)
    code, _, err = Forked(config, processes=3).finish()
    assert code == 1
    assert err.count("a step has 8 sequences (batch_size 4 x accumulate 2), which 3 processes") == 1
    assert not config.out.exists()


def test_second_group_is_locked_out(text: Path) -> None:
    config = configuration(text, "run", steps=100_000)
    first = Forked(config)
    wait_for_step(first, config.out / "metrics.jsonl", 2)
    code, _, err = Forked(config.model_copy(update={"resume": True})).finish()
    assert code == 1
    assert err.count(f"{config.out} is being trained by process ") == 1
    os.kill(first.workers()[0], signal.SIGTERM)
    assert "continue with" in first.finish()[1]
