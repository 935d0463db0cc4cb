"""RunRecorder: what is written between the steps of a run, and in which order.

    state  ->  evaluation  ->  samples  ->  checkpoint

The state comes first, so that whatever fails after it can be done again by a resumed run. The
evaluation comes before the checkpoint, which says its loss, and so do the samples, which its card
shows. A checkpoint is written with every state and with every evaluation that is the best so far.

Of several processes all call these methods: they share the evaluation and what they have of the
model, and the main one writes. Does not decide when anything is due (`model/training/trainer.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logitd.model.training.distributed.fsdp import is_sharded, local, without_backward
from logitd.model.training.events import EventHandler
from logitd.model.training.optim.optimizers import Optimizers
from logitd.model.training.recording.checkpoint_writer import CheckpointWriter
from logitd.model.training.recording.evaluator import Evaluator
from logitd.model.training.recording.sample_writer import SampleWriter
from logitd.model.training.run.run import Run
from logitd.model.training.run.state import Environment, save_state
from logitd.model.training.step.forward import Forward
from logitd.model.training.stopping.length import Counters
from logitd.model.transformer.gpt import GPT


@dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    state: bool = False  # with an evaluation, and a checkpoint
    evaluation: bool = False
    samples: bool = False


class RunRecorder:
    """Evaluates and saves a model in training; changes nothing of it."""

    def __init__(self, run: Run, gpt: GPT, optimizers: Optimizers, report: EventHandler) -> None:
        forward = without_backward(gpt, Forward(gpt, run.share.placement, dropout=0.0))
        self._run, self._gpt, self._optimizers = run, gpt, optimizers
        self._evaluator = Evaluator(run, gpt, forward, report)
        self._samples = SampleWriter(run, gpt, forward, report)
        self._checkpoints = CheckpointWriter(run, gpt, report)
        self._state_step: int | None = None  # of the saved state

    def restore(self, step: int) -> None:
        """Take up a run that was resumed from the state of `step`."""
        self._evaluator.restore()
        self._state_step = step

    def record(self, due: Due, counters: Counters, reports: Mapping[str, Any]) -> None:
        """Do what is due after a step. `reports` are what the state keeps of the run's log."""
        if due.state:
            self._save_state(counters, reports)
        self.finish(due, counters)

    def finish(self, due: Due, counters: Counters) -> None:
        """What follows the state. A resumed run begins with it: a kill may have prevented any of
        it, and what is there already is not done again."""
        # 1) Evaluation.
        is_best = (due.state or due.evaluation) and self._evaluator.evaluate(counters)
        # 2) Samples, also where they are not due but a saved state lacks its checkpoint.
        lacks_checkpoint = due.state and not self._checkpoints.exists(counters.step)
        if due.samples or lacks_checkpoint:
            self._samples.sample(counters.step)
        # 3) Checkpoint.
        if lacks_checkpoint or (is_best and not due.state):
            evaluation = self._evaluator.history[-1]
            self._checkpoints.write(counters, evaluation, self._samples, self._state_step)
        elif due.state:
            self._checkpoints.prune(self._state_step)

    def evaluate(self, counters: Counters) -> None:
        """Evaluate and write nothing else, however good it is."""
        self._evaluator.evaluate(counters)

    def last_evaluation(self) -> Mapping[str, Any]:
        return self._evaluator.history[-1]

    def evaluations_since_best(self) -> int:
        return self._evaluator.since_best()

    def write_metrics(self, record: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        if self._run.share.ranks.is_main:
            with self._run.directory.saving(record["step"]):
                self._run.directory.append(record)

    def environment(self) -> Environment:
        """Everything but the run that the bits of a step depend on."""
        share = self._run.share
        return Environment.of(share.placement, share.ranks.size, sharded=is_sharded(self._gpt))

    def _save_state(self, counters: Counters, reports: Mapping[str, Any]) -> None:
        run, ranks = self._run, self._run.share.ranks
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
        """The last update may have spoiled the weights, and no loss has seen them yet."""
        ranks = self._run.share.ranks
        named = self._gpt.named_parameters()
        spoiled = next((name for name, p in named if not bool(local(p).isfinite().all())), None)
        if not any(ranks.all_reduce_max([spoiled is not None])):
            return
        if not ranks.is_main:
            raise ranks.secondary_error()
        raise self._run.directory.diverged(
            f"training diverged: after step {step} {spoiled or 'the model'} holds numbers that are "
            "not finite",
        )
