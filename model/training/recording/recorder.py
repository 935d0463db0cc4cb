"""RunRecorder: the files that are written between the steps of a run, and their order.

    state  ->  evaluation  ->  samples  ->  checkpoint

The state comes first, so that a resumed run can repeat whatever fails after it. A checkpoint
records the loss of the evaluation, and its card shows the samples. A checkpoint is written with
every state and with every evaluation that is the best so far.

Of several processes all call these methods: they share the evaluation and their parts of the model,
and the main one writes. Does not decide when anything is due (`model/training/trainer.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.checkpoint.adapter import save_adapter
from logitd.model.checkpoint.checkpoint import TrainingRecord, save_checkpoint
from logitd.model.training.distributed.fsdp import (
    gather_weights,
    is_sharded,
    local,
    without_backward,
)
from logitd.model.training.events import EventHandler, Sampled, Saved
from logitd.model.training.optim.optimizers import Optimizers
from logitd.model.training.recording.card import write_card
from logitd.model.training.recording.evaluator import Evaluator
from logitd.model.training.recording.samples import samples
from logitd.model.training.run.run import Run
from logitd.model.training.run.state import environment, save_state
from logitd.model.training.step.forward import Forward
from logitd.model.training.stopping.length import Counters
from logitd.model.transformer.gpt import GPT


@dataclass(frozen=True)
class Due:
    """The work after a step."""

    state: bool = False  # with an evaluation, and a checkpoint
    evaluation: bool = False
    samples: bool = False


class RunRecorder:
    """Evaluates and saves a model in training; changes nothing of it."""

    def __init__(self, run: Run, gpt: GPT, optimizers: Optimizers, report: EventHandler) -> None:
        self._forward = without_backward(gpt, Forward(gpt, run.placement, dropout=0.0))
        self._run, self._gpt, self._optimizers, self._report = run, gpt, optimizers, report
        self.evaluator = Evaluator(run, gpt, self._forward, report)
        self._state_step: int | None = None  # of the saved state
        self._sample_step: int | None = None  # of the latest samples
        self._samples: list[tuple[str, str]] = []  # prompts, and the text that follows each

    def restore(self, step: int) -> None:
        """Continue a run that was resumed from the state of `step`."""
        self.evaluator.restore()
        self._state_step = step

    def record(self, due: Due, counters: Counters, reports: Mapping[str, Any]) -> None:
        """Do the work after a step. `reports` is the state of the run's log."""
        if due.state:
            self._save_state(counters, reports)
        self.finish(due, counters)

    def finish(self, due: Due, counters: Counters) -> None:
        """Do the work that follows the state. A resumed run begins with it: a kill may have
        prevented any of it, and nothing is done twice."""
        directory, ranks = self._run.directory, self._run.ranks
        # 1) Evaluation.
        is_best = (due.state or due.evaluation) and self.evaluator.evaluate(counters)
        # 2) Samples, also if they are not due but a saved state lacks its checkpoint.
        exists = due.state and ranks.broadcast(counters.step in directory.checkpoints())
        lacks_checkpoint = due.state and not exists
        if due.samples or lacks_checkpoint:
            self._sample(counters.step)
        # 3) Checkpoint.
        if lacks_checkpoint or (is_best and not due.state):
            self._write_checkpoint(counters)
        elif due.state and ranks.is_main:
            directory.prune(self._run.training.recipe.keep, self._state_step)

    def write_metrics(self, record: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        if self._run.ranks.is_main:
            with self._run.directory.saving(record["step"]):
                self._run.directory.append(record)

    def environment(self) -> dict[str, Any]:
        """Everything but the run that the bits of a step depend on."""
        placement, size = self._run.placement, self._run.ranks.size
        return environment(placement, size, sharded=is_sharded(self._gpt))

    def _save_state(self, counters: Counters, reports: Mapping[str, Any]) -> None:
        run, ranks = self._run, self._run.ranks
        self._require_finite(counters.step)
        with run.directory.saving(counters.step):
            save_state(
                run.directory.state,
                gpt=self._gpt,
                optimizers=self._optimizers,
                counters=counters,
                environment=self.environment(),
                reports=reports,
                ranks=ranks,
            )
        ranks.barrier()  # here, where the time that writing takes has no limit
        self._state_step = counters.step

    def _require_finite(self, step: int) -> None:
        """Raise TrainingError if the last update spoiled the weights: no loss has seen them yet."""
        ranks = self._run.ranks
        named = self._gpt.named_parameters()
        spoiled = next((name for name, p in named if not bool(local(p).isfinite().all())), None)
        if not any(ranks.all_reduce_max([spoiled is not None])):
            return
        if not ranks.is_main:
            raise ranks.secondary_error()
        raise self._run.directory.diverged(
            f"training diverged: after step {step} {spoiled or 'the model'} has numbers that are "
            "not finite",
        )

    def _sample(self, step: int) -> None:
        """Let the model write after each prompt, unless it did at this step."""
        run = self._run
        if self._sample_step == step or not (run.ranks.is_main or is_sharded(self._gpt)):
            return
        self._samples, self._sample_step = [], step
        for prompt, text in samples(run, self._gpt, self._forward):
            self._samples.append((prompt, text))
            if run.ranks.is_main:
                with run.directory.saving(step):
                    run.directory.append_sample(step, prompt, text)
            self._report(Sampled(step, prompt, text))

    def _write_checkpoint(self, counters: Counters) -> None:
        """Write the weights with the last evaluation and the latest samples, move the links
        `latest` and `best`, and remove old checkpoints."""
        run, directory, ranks = self._run, self._run.directory, self._run.ranks
        weights = gather_weights(self._gpt, ranks)
        if ranks.is_main:
            path = directory.checkpoint(counters.step)
            with directory.saving(counters.step):
                self._save(path, weights, counters)
                directory.link_newest_and_best()
                directory.prune(run.training.recipe.keep, self._state_step)
            self._report(Saved(counters.step, path))
        ranks.barrier()

    def _save(self, path: Path, weights: Mapping[str, Tensor], counters: Counters) -> None:
        run, training, evaluation = self._run, self._run.training, self.evaluator.history[-1]
        card = write_card(run, counters, self._samples, self._sample_step)
        record = TrainingRecord(
            step=counters.step,
            tokens=counters.tokens,
            val_loss=evaluation["val_loss"],
            val_bits_per_byte=evaluation["val_bits_per_byte"],
            data=run.text.record,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            base=None if training.base is None else training.base.record,
        )
        if (lora := training.lora) is not None:
            save_adapter(
                path,
                weights=weights,
                shape=lora,
                training=record,
                card=card,
                chat_template=run.chat_template,
            )
            return
        save_checkpoint(
            path,
            config=self._gpt.config,
            weights=weights,
            tokenizer=run.text.tokenizer,
            training=record,
            card=card,
            dtype=getattr(torch, training.recipe.save_dtype),
            chat_template=run.chat_template,
        )
