"""Speed of a training step, compared with a plain PyTorch loop for the same model.

    python -m benchmarks.train_throughput [--presets tiny small] [--rounds 5] [--steps 20]
                                          [--threads N]

The plain loop is the one that a user writes first: the model under autocast in the same dtype,
torch's fused causal attention, `F.cross_entropy` of all logits in float32, and torch's Muon and
AdamW unchanged. `plain float32` is the same without autocast, as nanoGPT trains on a CPU.
`compiled` is the trainer with `--compile on`; its first step is timed separately, to show after how
many steps compiling pays off. Model, initial weights, batches of random ids and learning rates are
the same for all.

Each figure is the median time of a step in a separate process. The four processes take turns, and a
ratio is the median over the rounds of the ratio within each round. The last line is JSON. Run it on
an idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Muon

from logitd.model.device import Placement, keep_freed_memory, use_threads
from logitd.model.openmp import spin_variables
from logitd.model.training.configuration.presets import PRESETS, Recipe
from logitd.model.training.optim.optimizers import Optimizers, initialize, kind_of
from logitd.model.training.step.compile import CompiledLoss
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.transformer.attention import CausalAttend
from logitd.model.transformer.gpt import GPT

OWN = ("logitd", "compiled")
LOOPS = (*OWN, "plain", "plain float32")
WARM_UP = 3

Step = Callable[[Tensor], Tensor]
"""Trains on ids (B, T + 1) and returns the loss."""


def own_step(gpt: GPT, recipe: Recipe, placement: Placement, *, compiled: bool = False) -> Step:
    """The trainer's step."""
    optimizers = Optimizers(gpt, recipe)
    forward = Forward(gpt, placement, dropout=gpt.config.dropout)
    loss_of = CompiledLoss(forward, _refuse_eager) if compiled else forward.loss

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizers.step(1.0)
        return loss.detach()

    return step


def _refuse_eager(notice: str) -> None:
    """Raise an exception if compiling fails. Otherwise the trainer would continue without
    compiling, and the figure would be wrong."""
    if notice.startswith("not compiled"):
        raise RuntimeError(notice)


def plain_step(gpt: GPT, recipe: Recipe, placement: Placement) -> Step:
    """The same arithmetic with torch's stock parts. Here, as in any plain loop, Muon treats query,
    key and value as a single matrix, which makes the step slightly cheaper."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in gpt.named_parameters():
        is_matrix = recipe.optimizer == "muon" and kind_of(gpt, name) == "matrix"
        (matrices if is_matrix else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [AdamW(others, lr=recipe.scalar_lr)]
    if matrices:
        optimizers.append(Muon(matrices, lr=recipe.matrix_lr))
    attend = CausalAttend(gpt.config.dropout)
    in_bfloat16 = placement.dtype == torch.bfloat16

    def step(ids: Tensor) -> Tensor:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        with torch.autocast(placement.device.type, torch.bfloat16, enabled=in_bfloat16):
            logits = gpt.logits(gpt.transform(inputs, positions, attend))  # (B, T, V)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def measure(loop: str, name: str, steps: int, threads: int) -> dict[str, float]:
    """The median seconds of a step, the seconds of the first step, which may compile, and the first
    loss."""
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    recipe = PRESETS[name].recipe
    config = PRESETS[name].config(recipe.vocab_size)
    dtype = "float32" if loop == "plain float32" else recipe.dtype
    placement = training_placement("cpu", dtype, threads)
    use_threads(placement.threads)
    generator = torch.Generator().manual_seed(0)
    gpt = GPT(config)
    initialize(gpt, recipe, generator)
    gpt.train()
    if loop in OWN:
        keep_freed_memory()  # as `logitd train` does
        step = own_step(gpt, recipe, placement, compiled=loop == "compiled")
    else:
        step = plain_step(gpt, recipe, placement)
    shape = (recipe.batch_size, config.context_length + 1)
    times, losses = [], []
    for _ in range(WARM_UP + steps):
        ids = torch.randint(config.vocab_size, shape, generator=generator)
        began = time.perf_counter()
        losses.append(float(step(ids)))
        times.append(time.perf_counter() - began)
    return {
        "seconds": statistics.median(times[WARM_UP:]),
        "first_seconds": times[0],
        "tokens": recipe.batch_size * config.context_length,
        "first_loss": losses[0],
    }


def compare(name: str, rounds: int, steps: int, threads: int) -> dict[str, Any]:
    """Measure all loops once per round, in reverse order in every other round."""
    results: dict[str, list[dict[str, float]]] = {loop: [] for loop in LOOPS}
    for number in range(rounds):
        for loop in LOOPS if number % 2 == 0 else reversed(LOOPS):
            results[loop].append(_in_a_process(loop, name, steps, threads))
    first = [result["first_loss"] for each in results.values() for result in each]
    if max(first) - min(first) > 0.01:
        raise SystemExit(f"the loops compute different results: their first losses are {first}")
    seconds = {loop: [result["seconds"] for result in results[loop]] for loop in LOOPS}
    tokens = results["logitd"][0]["tokens"]
    return {
        "preset": name,
        "tokens_per_second": {loop: tokens / statistics.median(seconds[loop]) for loop in LOOPS},
        "times_as_fast_as": {
            loop: statistics.median(
                theirs / mine for mine, theirs in zip(seconds["logitd"], seconds[loop], strict=True)
            )
            for loop in LOOPS[1:]
        },
        "first_seconds": {
            loop: [result["first_seconds"] for result in results[loop]] for loop in LOOPS
        },
    }


def _in_a_process(loop: str, name: str, steps: int, threads: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.train_throughput", "--one", loop]
    command += ["--presets", name, "--steps", str(steps), "--threads", str(threads)]
    spin = {**os.environ, **spin_variables(os.environ)}  # `logitd train` sets it for itself
    done = subprocess.run(command, env=spin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{loop} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0, help="0: all processors")
    parser.add_argument("--one", choices=LOOPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name = arguments.presets[0]
        print(json.dumps(measure(arguments.one, name, arguments.steps, arguments.threads)))
        return
    results = []
    for name in arguments.presets:
        result = compare(name, arguments.rounds, arguments.steps, arguments.threads)
        results.append(result)
        for loop, speed in result["tokens_per_second"].items():
            ratio = result["times_as_fast_as"].get(loop)
            faster = "" if ratio is None else f"  logitd is {ratio:.2f} times as fast"
            print(f"{name:<12} {loop:<14} {speed:>9,.0f} tokens/s{faster}")
        compiling = ", ".join(f"{seconds:.0f}" for seconds in result["first_seconds"]["compiled"])
        print(f"{name:<12} compiled, the first step of each round: {compiling} s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
