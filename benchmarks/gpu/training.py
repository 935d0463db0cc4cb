"""Training: steps of the trainer's own, and a model trained from text to checkpoint."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.plan import Finding, Plan, median_seconds
from benchmarks.train_throughput import own_step
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.training.configuration.presets import Optimizer, preset
from logitd.model.training.step.flops import flops_per_token
from logitd.model.training.step.forward import training_placement
from logitd.model.transformer.gpt import GPT


def training(plan: Plan) -> Iterator[Finding]:
    """The trainer's steps, without clipping and logging, on random ids: GPT-2 124M at a context of
    1,024 with AdamW, eager and compiled, and with Muon; and what of the matrix rate that is."""
    config, recipe = plan.config(next(iter(plan.shapes.values()))), preset("gpt2-124m").recipe
    placement = training_placement(str(plan.placement.device), "auto", 0)
    ways: tuple[tuple[str, Optimizer], ...]
    ways = (("eager", "adamw"), ("compiled", "adamw"), ("compiled", "muon"))
    for batch in (2,) if plan.tiny else (8, 32):
        for mode, optimizer in ways:
            case = f"{batch} windows of {config.context_length}, {mode}, {optimizer}"
            torch._dynamo.reset()  # or what is compiled second is compiled for batches of any size
            gpt = GPT(config).to(placement.device).train()
            recipe = replace(recipe, optimizer=optimizer)
            step = own_step(gpt, recipe, placement, compiled=mode == "compiled")
            shape = (batch, config.context_length + 1)
            ids = torch.randint(config.vocab_size, shape, device=placement.device)
            rounds = 3 if plan.tiny else 10
            seconds = median_seconds(partial(step, ids), placement.device, rounds)
            tokens = batch * config.context_length
            rate = flops_per_token(config) * tokens / seconds
            share = rate / plan.machine.matrix_rate
            yield Finding(
                "training",
                case,
                f"{placement.dtype_name}: {1e3 * seconds:.1f} ms a step, "
                f"{tokens / seconds:,.0f} tokens/s, {rate / 1e12:.2f} TFLOP/s, "
                f"{share:.0%} of the matrix rate",
                {"step_ms": 1e3 * seconds, "tokens_per_second": tokens / seconds, "mfu": share},
            )


def trained(plan: Plan) -> Iterator[Finding]:
    """`logitd train` as a person starts it: the preset `small` on the text that Python carries, for
    at most eight minutes and until validation stops improving; its loss, and what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        name = "tiny" if plan.tiny else "small"
        steps = 2 if plan.tiny else preset(name).recipe.steps  # or the minutes, if they end first
        command = [sys.executable, "-m", "logitd", "train", "--preset", name]
        command += ["--steps", str(steps), "--minutes", "8", "--patience", "3"]
        if plan.tiny:
            command += ["--eval-batches", "1", "--sample-tokens", "4", "--threads", "1"]
        command += ["--device", str(plan.placement.device), "--out", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the trainer ended with {done.returncode}: {done.stderr[-2000:]}")
        best = read_checkpoint(run / "best").training
        samples = (run / "samples.txt").read_text(encoding="utf-8")
        last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
        yield Finding(
            "trained",
            f"preset {name}, best at step {best.step:,}",
            f"{best.val_bits_per_byte:.4f} bits per byte; stopped at step {last['step']:,} after "
            f"{last['seconds'] / 60:.1f} minutes",
            {"bits_per_byte": best.val_bits_per_byte, "val_loss": best.val_loss, "last": last,
             "samples": samples[-4000:]},
        )  # fmt: skip
