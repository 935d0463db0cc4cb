"""RunRecorder: saves, evaluates and samples between the steps of a run, in this order:

    state  ->  evaluation  ->  samples  ->  checkpoint  ->  history

The state comes first, so that a resumed run can repeat any later task that failed. The checkpoint
comes last, because it records the validation loss, and its card shows the samples. A checkpoint is
written with every state and after every evaluation that is the best so far.

All processes call these methods. Each computes a part of the evaluation and contributes its part of
the model; the main process writes. The model is not changed. The trainer decides when each task is
due.

After the last step of a run, the weights and their average (`model/training/optim/average.py`) are
evaluated. Evaluation, samples and checkpoint of this step use whichever are better; the state has
both.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from logitd.model.checkpoint.adapter import save_adapter
from logitd.model.checkpoint.checkpoint import TrainingRecord, save_checkpoint
from logitd.model.data.windows import validation_windows
from logitd.model.training.distributed.fsdp import gather_weights, local, without_backward
from logitd.model.training.events import Evaluated, EventHandler, Noticed, Sampled, Saved
from logitd.model.training.optim.average import Average
from logitd.model.training.optim.optimizers import Optimizers
from logitd.model.training.recording.card import write_card
from logitd.model.training.recording.samples import samples
from logitd.model.training.run import plot
from logitd.model.training.run.run import Run
from logitd.model.training.run.state import environment, save_state
from logitd.model.training.step.forward import Forward
from logitd.model.training.step.validate import ValidationLoss, validate
from logitd.model.training.stopping.length import Counters
from logitd.model.training.stopping.worsening import worsening
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.value_map import with_tables

Task = Literal["state", "evaluation", "samples", "checkpoint"]
SAMPLING = 0.02
"""Maximum share of the run's minutes that the samples of a step may take. Sampling ends at this
limit."""


@dataclass(frozen=True)
class Due:
    """The tasks that are due after a step."""

    state: bool = False  # followed by an evaluation and a checkpoint
    evaluation: bool = False
    samples: bool = False
    history: bool = False


class RunRecorder:
    """Evaluates, samples and saves a model in training.

    evaluations  evaluation records of metrics.jsonl, oldest first
    seconds      duration of each task the last time it was done
    """

    def __init__(
        self,
        run: Run,
        gpt: GPT,
        optimizers: Optimizers,
        average: Average,
        report: EventHandler,
    ) -> None:
        self._run, self._gpt, self._optimizers, self._report = run, gpt, optimizers, report
        self._average = average
        self._forward = without_backward(gpt, Forward(gpt, run.placement, dropout=0.0))
        self._windows = validation_windows(
            run.text.val,
            run.text.tokenizer,
            window=run.training.model.context_length,
            batch_size=run.training.recipe.batch_size,
            batches=run.training.recipe.eval_batches,
        )
        self.evaluations: list[dict[str, Any]] = []
        self.seconds: dict[Task, float] = {}
        self._state_step: int | None = None  # step of the saved state
        self._sample_step: int | None = None  # step of the latest samples
        self._samples: list[tuple[str, str]] = []  # prompts with the text that the model wrote

    def restore(self, step: int) -> None:
        """Continue a run that was resumed from the state of `step`."""
        metrics = self._run.directory.metrics()
        self.evaluations = [record for record in metrics if record["kind"] == "eval"]
        self._state_step = step

    def record(self, due: Due, counters: Counters, reports: Mapping[str, Any]) -> None:
        """Do the tasks due after a step. `reports` is the state of the step log and the divergence
        monitor."""
        if due.state:
            self._save_state(counters, reports)
        self.finish(due, counters)

    def finish(self, due: Due, counters: Counters) -> None:
        """Do the tasks that come after saving the state, unless they were already done for this
        step. A resumed run begins with this, because the process may have been killed before it did
        all of them."""
        # 1) Evaluation.
        is_best = (due.state or due.evaluation) and self.evaluate(counters)
        with self._average.in_place() if self._is_averaged(counters) else nullcontext():
            self._write(due, counters, is_best=is_best)

    def _is_averaged(self, counters: Counters) -> bool:
        """True if the checkpoint of this step gets the averaged weights."""
        last = self.evaluations[-1] if self.evaluations else {}
        return last.get("step") == counters.step and "unaveraged_val_loss" in last

    def _write(self, due: Due, counters: Counters, *, is_best: bool) -> None:
        """Sample with the model's current weights, and write their checkpoint."""
        directory, ranks = self._run.directory, self._run.ranks
        # 2) Samples: if they are due, or for the card of a checkpoint that a saved state lacks.
        exists = due.state and ranks.broadcast(counters.step in directory.checkpoints())
        lacks_checkpoint = due.state and not exists
        if due.samples or lacks_checkpoint:
            self._sample(counters.step)
        # 3) Checkpoint.
        if lacks_checkpoint or (is_best and not due.state):
            self._write_checkpoint(counters)
        elif due.state and ranks.is_main:
            directory.prune(self._run.training.recipe.keep, self._state_step)
        # 4) History.
        if due.history and not ranks.broadcast(directory.kept(counters.step).exists()):
            self._keep(counters)

    def evaluate(self, counters: Counters) -> bool:
        """Compute and record the validation loss, unless this step was already evaluated. Returns
        True if it is the best so far, except at step 0."""
        if self.evaluations and self.evaluations[-1]["step"] == counters.step:
            return False
        with self._timed("evaluation"):
            return self._evaluate(counters)

    def _evaluate(self, counters: Counters) -> bool:
        run, step = self._run, counters.step
        result, unaveraged = self._validate(), None
        saved = self._state_step == step  # not if the loss is suspect
        if self._average.time and saved and run.training.length.is_over(counters):
            with self._average.in_place():
                averaged = self._validate()
            if averaged.loss < result.loss:
                result, unaveraged = averaged, result
        if not math.isfinite(result.loss):
            raise run.directory.diverged(
                f"training diverged: at step {step} the validation loss is {result.loss}"
            )
        best = min((record["val_loss"] for record in self.evaluations), default=math.inf)
        is_best = result.loss < best
        record = {
            "kind": "eval",
            "step": step,
            "val_loss": result.loss,
            "val_bits_per_byte": result.bits_per_byte,
            "tokens": result.tokens,
            "seconds": round(counters.seconds, 3),
        }
        if unaveraged is not None:
            record["unaveraged_val_loss"] = unaveraged.loss
            self._report(
                Noticed(
                    f"the last checkpoint has the averaged weights: {result.bits_per_byte:.4f} "
                    f"bits per byte, compared with {unaveraged.bits_per_byte:.4f} for the weights "
                    "of the last step"
                )
            )
        self.evaluations.append(record)
        self.write_metrics(record)
        self._report(Evaluated(step, result.loss, result.bits_per_byte, is_best))
        if run.ranks.is_main:
            metrics = run.directory.metrics()
            if notice := worsening(metrics, run.training.recipe.patience):
                self._report(Noticed(notice))
            bits = f"{result.bits_per_byte:.3f} bits per byte"
            with run.directory.saving(step):
                title = f"{run.directory.path.name}, step {step}: {bits}"
                drawn = plot.draw(metrics, run.directory.plot, title)
            if not drawn and step == 0:
                self._report(Noticed("no loss.png: matplotlib is not installed"))
        return is_best and step > 0

    def _validate(self) -> ValidationLoss:
        run = self._run
        return validate(self._gpt, self._windows, self._forward, run.ranks, sharded=run.sharded)

    def evaluations_since_best(self) -> int:
        """Number of regular evaluations since the best of them. All others are left out, because
        an interrupted run has one that an undisturbed run lacks, and both must end at the same
        step."""
        every = self._run.training.recipe.eval_every
        losses = [
            record.get("unaveraged_val_loss", record["val_loss"])
            for record in self.evaluations
            if record["step"] % every == 0
        ]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0

    def seconds_per_step(self) -> float:
        """Average time in seconds that tasks take per training step, assuming that each task takes
        as long as it did last time and that every evaluation is the best so far."""
        recipe, seconds = self._run.training.recipe, self.seconds
        saves = recipe.checkpoint_every
        evaluations = _frequency(saves, recipe.eval_every)
        return (
            seconds.get("state", 0.0) / saves
            + (seconds.get("evaluation", 0.0) + seconds.get("checkpoint", 0.0)) * evaluations
            + seconds.get("samples", 0.0)
            * _frequency(saves, recipe.sample_every or recipe.eval_every)
        )

    @contextmanager
    def _timed(self, task: Task) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[task] = time.monotonic() - began

    def write_metrics(self, record: Mapping[str, Any]) -> None:
        if self._run.ranks.is_main:
            with self._run.directory.saving(record["step"]):
                self._run.directory.append(record)

    def _save_state(self, counters: Counters, reports: Mapping[str, Any]) -> None:
        run, ranks = self._run, self._run.ranks
        self._require_finite(counters.step)
        with self._timed("state"), run.directory.saving(counters.step):
            save_state(
                run.directory.state,
                gpt=self._gpt,
                optimizers=self._optimizers,
                average=self._average,
                counters=counters,
                environment=environment(run.placement, ranks.size, sharded=run.sharded),
                reports=reports,
                ranks=ranks,
            )
        ranks.barrier()  # no time limit here: writing may take long
        self._state_step = counters.step

    def _require_finite(self, step: int) -> None:
        """Raise TrainingError if the last update made weights non-finite, which no loss shows
        yet."""
        ranks = self._run.ranks
        named = self._gpt.named_parameters()
        spoiled = next((name for name, p in named if not bool(local(p).isfinite().all())), None)
        if not any(ranks.all_reduce_max([spoiled is not None])):
            return
        if not ranks.is_main:
            raise ranks.secondary_error()
        raise self._run.directory.diverged(
            f"training diverged: after step {step} {spoiled or 'the model'} has values that are "
            "not finite",
        )

    def _sample(self, step: int) -> None:
        """Sample a text after each prompt, unless this step was already sampled."""
        run = self._run
        if self._sample_step == step or not (run.ranks.is_main or run.sharded):
            return
        self._samples, self._sample_step = [], step
        allowed = SAMPLING * 60 * (run.training.length.minutes or math.inf)
        with self._timed("samples"):
            for prompt, text in samples(run, self._gpt, self._forward, allowed):
                self._samples.append((prompt, text))
                if run.ranks.is_main:
                    with run.directory.saving(step):
                        run.directory.append_sample(step, prompt, text)
                self._report(Sampled(step, prompt, text))

    def _write_checkpoint(self, counters: Counters) -> None:
        """Write a checkpoint with the last evaluation and the latest samples, update the links
        `latest` and `best`, and remove old checkpoints."""
        run, directory = self._run, self._run.directory
        weights = gather_weights(self._gpt, run.ranks)
        if run.ranks.is_main:
            path = directory.checkpoint(counters.step)
            with self._timed("checkpoint"), directory.saving(counters.step):
                card = write_card(run, counters, self._samples, self._sample_step)
                self._save(path, weights, counters, card)
                directory.link_newest_and_best()
                directory.prune(run.training.recipe.keep, self._state_step)
            self._report(Saved(counters.step, path))
        run.ranks.barrier()

    def _keep(self, counters: Counters) -> None:
        """Write a checkpoint into the history, with the loss of this step if it was evaluated."""
        run, directory = self._run, self._run.directory
        weights = gather_weights(self._gpt, run.ranks)
        if run.ranks.is_main:
            with directory.saving(counters.step):
                directory.history.mkdir(exist_ok=True)
                weights_are = ", with averaged weights" if self._is_averaged(counters) else ""
                card = f"Step {counters.step} of the run {directory.path.name}{weights_are}.\n"
                self._save(directory.kept(counters.step), weights, counters, card)
        run.ranks.barrier()

    def _save(
        self, path: Path, weights: Mapping[str, Tensor], counters: Counters, card: str
    ) -> None:
        """Write a checkpoint, or an adapter if only adapters are trained."""
        run, training = self._run, self._run.training
        about: dict[str, Any] = {
            "weights": with_tables(weights),
            "training": self._training_record(counters),
            "card": card,
            "chat_template": run.chat_template,
        }
        if training.lora is not None:
            save_adapter(path, shape=training.lora, **about)
        else:
            save_checkpoint(
                path,
                config=self._gpt.config,
                tokenizer=run.text.tokenizer,
                dtype=getattr(torch, training.recipe.save_dtype),
                **about,
            )

    def _training_record(self, counters: Counters) -> TrainingRecord:
        last, base = self.evaluations[-1], self._run.training.base
        evaluation = last if last["step"] == counters.step else {}
        return TrainingRecord(
            step=counters.step,
            tokens=counters.tokens,
            val_loss=evaluation.get("val_loss"),
            val_bits_per_byte=evaluation.get("val_bits_per_byte"),
            data=self._run.text.record,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            base=None if base is None else base.record,
        )


def _frequency(first: int, second: int) -> float:
    """The share of all steps that are multiples of `first` or of `second`."""
    return 1 / first + 1 / second - 1 / math.lcm(first, second)
