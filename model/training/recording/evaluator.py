"""Evaluator: the validation loss of a run, step by step.

Computes it (`model/training/step/validate.py`), writes it to the metrics, draws the curves, and
knows the best evaluation. Of several processes each computes a part of the loss, and the main one
writes. Does not decide when to evaluate, and changes nothing of the model.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from logitd.model.data.windows import validation_windows
from logitd.model.training.distributed.fsdp import is_sharded
from logitd.model.training.events import Evaluated, EventHandler, Noticed
from logitd.model.training.run import plot
from logitd.model.training.run.run import Run
from logitd.model.training.step.validate import validate
from logitd.model.training.stopping.length import Counters
from logitd.model.training.stopping.worsening import worsening
from logitd.model.transformer.gpt import GPT


class Evaluator:
    """Evaluates a model in training. `forward` maps ids (B, T) to logits (B, T, V)."""

    def __init__(
        self, run: Run, gpt: GPT, forward: Callable[[Tensor], Tensor], report: EventHandler
    ) -> None:
        self.history: list[dict[str, Any]] = []  # records of metrics.jsonl, oldest first
        self._run, self._gpt, self._forward, self._report = run, gpt, forward, report
        recipe = run.training.recipe
        self._windows = validation_windows(
            run.text.val,
            run.text.tokenizer,
            window=run.training.model.context_length,
            batch_size=recipe.batch_size,
            batches=recipe.eval_batches,
        )

    def restore(self) -> None:
        """Read the evaluations of a resumed run from its metrics."""
        self.history = [
            record for record in self._run.directory.metrics() if record["kind"] == "eval"
        ]

    def evaluate(self, counters: Counters) -> bool:
        """Compute and record the validation loss, unless this step has been evaluated. Returns True
        if it is the best so far of the steps that trained."""
        step, directory, ranks = counters.step, self._run.directory, self._run.ranks
        if self.history and self.history[-1]["step"] == step:
            return False
        sharded = is_sharded(self._gpt)
        result = validate(self._gpt, self._windows, self._forward, ranks, sharded=sharded)
        if not math.isfinite(result.loss):
            raise directory.diverged(
                f"training diverged: at step {step} the validation loss is {result.loss}"
            )
        best = min((record["val_loss"] for record in self.history), default=math.inf)
        is_best = result.loss < best
        record = {
            "kind": "eval",
            "step": step,
            "val_loss": result.loss,
            "val_bits_per_byte": result.bits_per_byte,
            "tokens": result.tokens,
            "seconds": round(counters.seconds, 3),
        }
        self.history.append(record)
        if ranks.is_main:
            with directory.saving(step):
                directory.append(record)
        self._report(Evaluated(step, result.loss, result.bits_per_byte, is_best))
        if ranks.is_main:
            metrics = directory.metrics()
            if notice := worsening(metrics, self._run.training.recipe.patience):
                self._report(Noticed(notice))
            title = f"{directory.path.name}, step {step}: {result.bits_per_byte:.3f} bits per byte"
            with directory.saving(step):
                drawn = plot.draw(metrics, directory.plot, title)
            if not drawn and step == 0:
                self._report(Noticed("no loss.png: matplotlib is not installed"))
        return is_best and step > 0

    def since_best(self) -> int:
        """Evaluations since the best one."""
        losses = [record["val_loss"] for record in self.history]
        return len(losses) - 1 - losses.index(min(losses))
