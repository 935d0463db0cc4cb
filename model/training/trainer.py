"""Trainer: from a configuration to a trained checkpoint. `train` is the entry.

    setup_run   resolve the run (`configuration/`), prepare or reopen its directory (`setup/`)
    Trainer     build the model (`setup/base`), optimizers (`optim/`), loss (`step/`)
    load        for a resumed run: weights, optimizer states, counters (`run/state`)
    fit         take steps until there is a reason to stop

A step: forward and backward over this process's batches, add up the gradients of all processes,
clip, update, count. Between steps the trainer reports, and the recorder saves, evaluates and
samples (`recorder`). All modules are in `model/training/`. Covers one process on one device, or
several, each with a copy of the model or a part of it (`distributed/`).

Shapes: B sequences, T positions.
"""

import time
import warnings
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from logitd.model.convert.exportable import describe as describe_export
from logitd.model.convert.family import objections
from logitd.model.data.batches import Batches, noise_seed
from logitd.model.device import describe, to_device, use_threads
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.distributed.fsdp import clip_gradients, shard_model, unsummed_gradients
from logitd.model.training.distributed.ranks import ALONE, Ranks, process_group
from logitd.model.training.events import EventHandler, Noticed, Progress, Started, ignore_events
from logitd.model.training.optim.optimizers import Optimizers, lr_scale
from logitd.model.training.recording.recorder import Due, RunRecorder
from logitd.model.training.run.run import Run
from logitd.model.training.run.state import load_state
from logitd.model.training.run.step_log import Figures, StepLog
from logitd.model.training.run.tensorboard import require_tensorboard, with_tensorboard
from logitd.model.training.setup.base import initial_model
from logitd.model.training.setup.begin import setup_run
from logitd.model.training.step.compile import choose_loss, compiles
from logitd.model.training.step.flops import Meter
from logitd.model.training.step.forward import Forward
from logitd.model.training.stopping.divergence import DivergenceMonitor, Observation
from logitd.model.training.stopping.length import Counters
from logitd.model.training.stopping.signals import StopSignals
from logitd.model.training.stopping.worsening import ended_worse

Reason = Literal["finished", "time is up", "no improvement", "interrupted"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""In rising order: where processes have different ones, the last counts."""


@dataclass(frozen=True)
class TrainingResult:
    """Where a run ended."""

    run: Path
    checkpoint: Path  # the newest
    best: Path
    step: int
    tokens: int
    seconds: float
    val_loss: float
    val_bits_per_byte: float
    reason: Reason
    rank: int = 0  # of the process that returns it; rank 0 is the main one
    adapter_of: Path | None = None  # the base of an adapter


def train(config: TrainingConfig, report: EventHandler = ignore_events) -> TrainingResult:
    """Train, or with `resume` go on training, and return where it ended.

    Raises TrainingError (texts, options, runs, divergence), PresetError, ConfigError and
    DeviceError, each with a sentence for the person who asked. Leaves the caller's random state
    and thread count as they were.
    """
    threads = torch.get_num_threads()
    with process_group() as ranks, _random_state(ranks, config), warnings.catch_warnings():
        # Autocast gives the norms of queries and keys bfloat16 inputs and float32 weights, and
        # torch warns that this takes its unfused path.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        report = report if ranks.is_main else ignore_events
        try:
            if config.tensorboard:
                require_tensorboard()
            run = setup_run(config, ranks, report)
            try:
                wanted = run.training.config.tensorboard and ranks.is_main
                with with_tensorboard(wanted, report) as report:
                    trainer = Trainer(run, report)
                    if config.resume:
                        trainer.load()
                    with ranks.connected():
                        result = trainer.fit()
                ranks.barrier()  # until the main process has written everything
            finally:
                run.directory.release()
            return result
        finally:
            use_threads(threads)


def _random_state(ranks: Ranks, config: TrainingConfig) -> AbstractContextManager[None]:
    """Restores the caller's random state at the end."""
    device = ranks.device(config.device)
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class Trainer:
    """One run in progress: the model, its optimizers, and how far they are."""

    def __init__(self, run: Run, report: EventHandler) -> None:
        self.run, self.training, self.ranks, self.report = (
            run,
            run.training,
            run.share.ranks,
            report,
        )
        recipe, model = run.training.recipe, run.training.model
        placement, ranks = run.share.placement, run.share.ranks
        use_threads(placement.threads)
        if placement.device.type == "cuda" and ranks.size > 1:
            torch.cuda.set_device(placement.device)  # where NCCL takes its buffers
        torch.manual_seed(recipe.seed)
        # 1) The model, whole or this process's part of it.
        self.gpt = initial_model(run.training, report)
        if run.sharded:
            shard_model(self.gpt, placement, ranks)
        else:
            self.gpt.to(placement.device)
        self.gpt.train()
        # 2) What a step takes: batches, loss, update.
        self.batches = Batches(run.text.train, window=model.context_length, seed=recipe.seed)
        self.loss = choose_loss(
            Forward(self.gpt, placement, dropout=model.dropout),
            lambda message: report(Noticed(message)),
            compiled=compiles(run.training.config.compile, placement.device),
            peers=ranks if run.sharded else ALONE,
        )
        self.optimizers = Optimizers(self.gpt, recipe, ranks)
        # 3) What happens between steps.
        self.counters = Counters()
        self.log = StepLog(Meter.measure(model, placement))
        self.divergence = DivergenceMonitor(recipe.warmup)
        self.recorder = RunRecorder(run, self.gpt, self.optimizers, report)
        self.began = time.monotonic()

    def load(self) -> None:
        """Load the saved state of a resumed run, if it was not killed before it first saved."""
        state = self.run.directory.state
        if state.exists():
            self.counters, before, reports = load_state(
                state, gpt=self.gpt, optimizers=self.optimizers
            )
            if differences := self.recorder.environment().differences(before):
                self.report(
                    Noticed(
                        f"resuming, but not bit for bit as one run would have gone: {differences}"
                    )
                )
            self.log.restore(reports["log"])
            self.divergence.restore(reports["health"])
        self.recorder.restore(self.counters.step)
        self.began = time.monotonic() - self.counters.seconds

    def fit(self) -> TrainingResult:
        """Train to the end, or until somebody asks to stop."""
        self._report_start()
        with StopSignals(self._stopping) as signals:
            # 1) Of a new run the loss before any step; of a resumed one what follows its state.
            if self.counters.step == 0:
                self.recorder.evaluate(self.counters)
            else:
                self.recorder.finish(Due(state=True), self.counters)
            # 2) Steps, and between two of them whatever is due. The log's clock runs in steps only.
            self.log.start()
            reason = self._reason_to_stop(signals)
            while reason is None:
                self._step()
                reason = self._reason_to_stop(signals)
                if reason is None and self._between_steps():
                    self.log.start()
                    reason = self._reason_to_stop(signals)
            # 3) Save the last step.
            self._end(reason)
            return self._result(reason)

    def _end(self, reason: Reason) -> None:
        """Save, unless the loss is suspect. Interrupted between two reports, the steps since the
        last one stay to be reported: they are in the state, and the resumed run reports as one run
        would have."""
        if reason == "interrupted" and not self._reports(self._due()):
            self._observe(self.log.figures())
        else:
            self._log()
        if diagnosis := self.divergence.diagnosis(last=reason != "interrupted"):
            raise self._diverged(diagnosis)
        if self.divergence.suspect:
            self.recorder.evaluate(self.counters)
            self.report(Noticed(self._not_saved()))
        else:
            self.recorder.record(Due(state=True), self.counters, self._reports_state())
        if reason == "interrupted" or not self.ranks.is_main:  # the main one has the metrics
            return
        if notice := ended_worse(self.run.directory.metrics()):
            self.report(Noticed(notice))

    def _report_start(self) -> None:
        placement = self.run.share.placement
        self.report(
            Started(
                run=self.run.directory.path,
                parameters=self.gpt.parameter_count(),
                step=self.counters.step,
                steps=self.training.length.steps,
                device=describe(placement.device),
                dtype=placement.dtype_name,
                threads=placement.threads,
                processes=self.ranks.size,
                sharded=self.run.sharded,
                export=self._export(),
            )
        )

    def _export(self) -> str:
        """Whether `logitd export` can write this model: known now, and not only after hours."""
        model, base = self.training.model, self.training.base
        sentence = describe_export(model, self.run.text.tokenizer)
        begins = self.counters.step == 0 and base is None
        way_out = ". --exportable trains one that can" if begins and objections(model) else ""
        return sentence + way_out

    def _step(self) -> None:
        """Forward, backward, update."""
        recipe, share = self.training.recipe, self.run.share.batch
        device = self.run.share.placement.device
        scale = lr_scale(recipe, self.counters.step, self.training.length.done(self.counters))
        # 1) Gradients of this process's batches. Dropout's noise is a function of the sequence.
        loss = torch.zeros((), device=device)
        for first in share.batches(self.counters.step):
            inputs, targets = self.batches.batch(first, share.batch_size)  # (B, T) each
            torch.manual_seed(noise_seed(recipe.seed, first))
            part_loss = self.loss(to_device(inputs, device), to_device(targets, device))
            (part_loss / share.parts).backward()
            loss += part_loss.detach() / share.parts
        # 2) Those of all processes together, and the update.
        parameters = list(self.gpt.parameters())
        self.ranks.all_reduce_sum([*unsummed_gradients(parameters), loss])
        norm = clip_gradients(parameters, recipe.clip)
        self.optimizers.step(scale)
        # 3) Count. The loss stays on the device until a report is due.
        tokens = share.total * self.gpt.config.context_length
        self.log.add(loss=loss, norm=norm, lr_scale=scale, tokens=tokens)
        self.counters = Counters(
            step=self.counters.step + 1,
            tokens=self.counters.tokens + tokens,
            seconds=time.monotonic() - self.began,
        )
        if self.counters.step == 1:
            self.divergence.start(float(loss))

    def _between_steps(self) -> bool:
        """Whatever is due after a step that is not the last. True: something was."""
        due = self._due()
        if not self._reports(due):
            return False
        self._log()  # first, as it tells whether the state is one to save
        not_saved = due.state and self.divergence.suspect
        if not_saved:
            due = replace(due, state=False, evaluation=True)
        self.recorder.record(due, self.counters, self._reports_state())
        if not_saved:
            self.report(Noticed(self._not_saved()))
        return True

    def _due(self) -> Due:
        """What the recipe asks for after this step."""
        step, recipe = self.counters.step, self.training.recipe
        return Due(
            state=step % recipe.checkpoint_every == 0,
            evaluation=step % recipe.eval_every == 0,
            samples=step % (recipe.sample_every or recipe.eval_every) == 0,
        )

    def _reports(self, due: Due) -> bool:
        """Whether the steps up to this one are reported: with anything else, and by themselves."""
        logs = self.counters.step % self.training.config.log_every == 0
        return due.state or due.evaluation or due.samples or logs

    def _reports_state(self) -> dict[str, Any]:
        return {"log": self.log.state(), "health": self.divergence.state()}

    def _log(self) -> None:
        """Report and record the steps since the last report. The loss is read only here."""
        if not self.log.steps:
            return
        figures, counters = self.log.take(), self.counters
        self._observe(figures)
        if diagnosis := self.divergence.diagnosis():
            raise self._diverged(diagnosis)
        self.recorder.write_metrics(
            {"kind": "train", "step": counters.step, "tokens": counters.tokens}
            | asdict(figures)
            | {"seconds": round(counters.seconds, 3)}
        )
        self.report(
            Progress(
                step=counters.step,
                share=self.training.length.done(counters),
                loss=figures.loss,
                smoothed_loss=figures.smoothed_loss,
                learning_rate=figures.learning_rate,
                gradient_norm=figures.gradient_norm,
                tokens_per_second=figures.tokens_per_second,
                matrix_share=figures.matrix_share,
                seconds=counters.seconds,
                seconds_left=self.training.length.seconds_left(counters, figures.seconds_per_step),
            )
        )

    def _observe(self, figures: Figures | None) -> None:
        if figures is not None:
            loss, smoothed, norm = figures.loss, figures.smoothed_loss, figures.gradient_norm
            self.divergence.observe(Observation(self.counters.step, loss, smoothed, norm))

    def _reason_to_stop(self, signals: StopSignals) -> Reason | None:
        """The same for all: the main process decides, or a signal to any of them."""
        own = self._own_reason(signals)
        code, seconds = self.ranks.all_reduce_max(
            [
                REASONS.index(own) if own else -1,
                self.counters.seconds if self.ranks.is_main else 0.0,
            ]
        )
        self.counters = replace(self.counters, seconds=seconds)
        return REASONS[int(code)] if code >= 0 else None

    def _own_reason(self, signals: StopSignals) -> Reason | None:
        patience = self.training.recipe.patience
        if signals.asked:
            return "interrupted"
        if not self.ranks.is_main:
            return None
        if self.training.length.out_of_steps(self.counters):
            return "finished"
        if self.training.length.done(self.counters) >= 1:
            return "time is up"
        if patience is not None and self.recorder.evaluations_since_best() >= patience:
            return "no improvement"
        return None

    def _diverged(self, diagnosis: str) -> TrainingError:
        if not self.ranks.is_main:
            return self.ranks.secondary_error()
        return self.run.directory.diverged(diagnosis)

    def _not_saved(self) -> str:
        return (
            f"step {self.counters.step} is not saved: the loss is far above its best. "
            f"{self.run.directory.last_good()}"
        )

    def _stopping(self) -> None:
        self.report(
            Noticed("stopping after this step, then saving; once more to stop without saving")
        )

    def _result(self, reason: Reason) -> TrainingResult:
        last, directory = self.recorder.last_evaluation(), self.run.directory
        return TrainingResult(
            run=directory.path,
            checkpoint=directory.latest,
            best=directory.best,
            step=self.counters.step,
            tokens=self.counters.tokens,
            seconds=self.counters.seconds,
            val_loss=last["val_loss"],
            val_bits_per_byte=last["val_bits_per_byte"],
            reason=reason,
            rank=self.ranks.rank,
            adapter_of=self.training.config.from_checkpoint if self.training.lora else None,
        )
