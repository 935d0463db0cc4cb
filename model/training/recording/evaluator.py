"""Evaluator: the validation loss of a run, step by step.

Computes it (`model/training/step/validate.py`), writes it to the metrics, draws the curves, and
knows which evaluation was the best. Of several processes each computes a part of the loss, and the
main one writes. Does not decide when to evaluate, and changes nothing of the model.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from logitd.model.data.windows import validation_windows
from logitd.model.training.distributed.fsdp import is_sharded
from logitd.model.training.events import Evaluated, EventHandler, Noticed
from logitd.model.training.run import plot
from logitd.model.training.run.errors import diverged, saving
from logitd.model.training.setup.resolve import ResolvedRun
from logitd.model.training.step.validate import validate
from logitd.model.training.stopping.counters import Counters
from logitd.model.training.stopping.worsening import worsening
from logitd.model.transformer.gpt import GPT


class Evaluator:
    """Evaluates a model in training. `forward` maps ids (B, T) to logits (B, T, V)."""

    def __init__(
        self, run: ResolvedRun, gpt: GPT, forward: Callable[[Tensor], Tensor], report: EventHandler
    ) -> None:
        self.history: list[dict[str, Any]] = []  # records of metrics.jsonl, oldest first
        self._run, self._gpt, self._forward, self._report = run, gpt, forward, report
        self._windows = validation_windows(
            run.text.val,
            run.text.tokenizer,
            window=run.model.context_length,
            batch_size=run.recipe.batch_size,
            batches=run.recipe.eval_batches,
        )

    def restore(self) -> None:
        """Take up the evaluations that the metrics of a resumed run hold."""
        self.history = [
            record for record in self._run.directory.metrics() if record["kind"] == "eval"
        ]

    def evaluate(self, counters: Counters) -> bool:
        """Compute and record the validation loss, unless this step has been evaluated. Returns
        whether it is the best so far of the steps that trained."""
        step = counters.step
        if self.history and self.history[-1]["step"] == step:
            return False
        run = self._run
        result = validate(
            self._gpt, self._windows, self._forward, run.ranks, sharded=is_sharded(self._gpt)
        )
        if not math.isfinite(result.loss):
            reason = f"training diverged: at step {step} the validation loss is {result.loss}"
            raise diverged(run.directory, reason)
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
        if run.ranks.is_main:
            with saving(run.directory, step):
                run.directory.append(record)
        self._report(Evaluated(step, result.loss, result.bits_per_byte, is_best))
        if run.ranks.is_main:
            if notice := worsening(run.directory.metrics(), run.recipe.patience):
                self._report(Noticed(notice))
            self._draw(step, result.bits_per_byte)
        return is_best and step > 0

    def since_best(self) -> int:
        """Evaluations since the best one."""
        losses = [record["val_loss"] for record in self.history]
        return len(losses) - 1 - losses.index(min(losses))

    def _draw(self, step: int, bits: float) -> None:
        directory = self._run.directory
        title = f"{directory.path.name}, step {step}: {bits:.3f} bits per byte"
        with saving(directory, step):
            drawn = plot.draw(directory.metrics(), directory.plot, title)
        if not drawn and step == 0:
            self._report(Noticed("no loss.png: matplotlib is not installed"))
