"""Trainer: from a configuration to a trained checkpoint. `train` is the entry.

A step: forward and backward over this process's share of its batches, add up the gradients of all
processes, clip, update, count. Between steps: log, sample, evaluate, save, each when it is due.

Covers one process on one device, or several, each with a copy of the model or a part of it. What
each part does stands in the file of its name: `begin` (what a run is made of), `finetune`, `recipe`
(weights, optimizers, learning rates), `forward`, `batches`, `ranks` (several processes), `sharding`
(of one model), `milestones` (evaluations, samples, checkpoints), `health` (whether it still
learns), `length`, `log`, `state`.

Shapes: B sequences, T positions, V = vocab_size.
"""

import time
import warnings
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from model.data.batches import Batches, noise_seed
from model.device import describe, sent, use_threads
from model.training.config import TrainingConfig, TrainingError
from model.training.distributed.fsdp import clip_gradients, shard, unsummed_gradients
from model.training.distributed.ranks import ALONE, Ranks, together
from model.training.events import Noticed, Progress, Reporter, Started, silent
from model.training.finetune import initial_model
from model.training.milestones import Milestones
from model.training.optim.optimizers import Optimizers, share_of_peak
from model.training.run.state import Counters, load_state
from model.training.run.step_log import Figures, StepLog
from model.training.run.tensorboard import require_tensorboard, with_tensorboard
from model.training.setup import Plan, begin
from model.training.step.compile import choose_loss
from model.training.step.flops import Meter
from model.training.step.forward import Forward
from model.training.stopping.divergence import Health, Look
from model.training.stopping.length import Length
from model.training.stopping.signals import StopSignals

Reason = Literal["finished", "time is up", "no improvement", "interrupted"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""In rising order: of what several processes have, the last counts."""


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
    rank: int = 0  # of the process that says so; the first speaks for all
    adapter_of: Path | None = None  # the checkpoint that it goes with, where it is no whole one


def train(config: TrainingConfig, report: Reporter = silent) -> TrainingResult:
    """Train, or with `resume` go on training, and return where it ended.

    Raises TrainingError (texts, options, runs, divergence), PresetError, ConfigError and
    DeviceError, each with a sentence for the person who asked. Leaves the caller's random state
    and thread count as they were.
    """
    threads = torch.get_num_threads()
    with together() as ranks, _random_state(ranks, config), warnings.catch_warnings():
        # Autocast gives the norms of queries and keys bfloat16 inputs and float32 weights, and
        # torch says that this takes its unfused path.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        report = report if ranks.leads else silent
        try:
            if config.tensorboard:
                require_tensorboard()
            plan = begin(config, ranks, report)
            with with_tensorboard(plan.config.tensorboard and ranks.leads, report) as report:
                trainer = Trainer(plan, report)
                if config.resume:
                    trainer.load()
                with ranks.connected():
                    result = trainer.fit()
            ranks.wait()  # the first has written all
            return result
        finally:
            use_threads(threads)


def _random_state(ranks: Ranks, config: TrainingConfig) -> AbstractContextManager[None]:
    """Gives the caller's random state back at the end."""
    device = ranks.device(config.device)
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class Due(NamedTuple):
    """What is to be done after a step. With anything else, the steps up to it are reported."""

    saves: bool
    evaluates: bool
    samples: bool
    reports: bool


class Trainer:
    """One run in progress: the model, its optimizers, and how far they are."""

    def __init__(self, plan: Plan, report: Reporter) -> None:
        recipe, placement = plan.recipe, plan.placement
        use_threads(placement.threads)
        if placement.device.type == "cuda" and plan.ranks.size > 1:
            torch.cuda.set_device(placement.device)  # where NCCL takes its buffers
        torch.manual_seed(recipe.seed)
        self.plan, self.recipe, self.run, self.report = plan, recipe, plan.run, report
        self.gpt = initial_model(plan.model, recipe, plan.base, plan.lora, report)
        if plan.sharded:
            shard(self.gpt, placement, plan.ranks)
        else:
            self.gpt.to(placement.device)
        self.gpt.train()
        self.optimizers = Optimizers(self.gpt, recipe, plan.ranks)
        forward = Forward(self.gpt, placement, dropout=plan.model.dropout)
        self.loss = choose_loss(
            forward,
            placement,
            plan.config.compile,
            lambda message: report(Noticed(message)),
            together=plan.ranks if plan.sharded else ALONE,
        )
        self.batches = Batches(
            plan.prepared.train, window=plan.model.context_length, seed=recipe.seed
        )
        self.share, self.ranks = plan.share, plan.ranks
        self.milestones = Milestones(plan, self.gpt, self.optimizers, report)
        self.health = Health(recipe.warmup)
        by_clock = plan.config.minutes is not None and plan.config.steps is None
        self.length = Length(None if by_clock else recipe.steps, plan.config.minutes)
        self.counters = Counters()
        self.log = StepLog(Meter.measure(plan.model, placement))
        self.began = time.monotonic()

    def load(self) -> None:
        """Take up the run's saved state; a run that was killed before it first saved begins."""
        if self.run.state.exists():
            self.counters, before, reports = load_state(
                self.run.state, gpt=self.gpt, optimizers=self.optimizers
            )
            if differences := self.milestones.environment().differences(before):
                self.report(
                    Noticed(
                        f"resuming, but not bit for bit as one run would have gone: {differences}"
                    )
                )
            self.log.restore(reports["log"])
            self.health.restore(reports["health"])
        self.milestones.resume(self.counters.step)
        self.began = time.monotonic() - self.counters.seconds

    def fit(self) -> TrainingResult:
        """Train to the end, or until somebody asks to stop."""
        self._report_start()
        with StopSignals(self._stopping) as signals:
            if self.counters.step == 0:
                self.milestones.evaluate(self.counters)
            else:
                self.milestones.finish_save(self.counters)
            self.log.start()
            reason = self._reason_to_stop(signals)
            while reason is None:
                self._step()
                reason = self._reason_to_stop(signals)
                if reason is None and self._between_steps():
                    self.log.start()
                    reason = self._reason_to_stop(signals)
            self._end(reason)
            return self._result(reason)

    def _end(self, reason: Reason) -> None:
        """Keep what there is. Interrupted between two reports, the steps since the last one stay to
        be reported: they are in the state, and the resumed run reports as one run would have."""
        if reason == "interrupted" and not self._due().reports:
            self._look(self.log.figures())
        else:
            self._log()
        if complaint := self.health.complaint(last=reason != "interrupted"):
            raise self._diverged(complaint)
        if self.health.suspected:
            self.milestones.evaluate(self.counters)
            self.report(Noticed(self._not_saved()))
        else:
            self._save()

    def _report_start(self) -> None:
        placement = self.plan.placement
        self.report(
            Started(
                run=self.run.path,
                parameters=self.gpt.parameter_count(),
                step=self.counters.step,
                steps=self.length.steps,
                device=describe(placement.device),
                dtype=placement.dtype_name,
                threads=placement.threads,
                processes=self.ranks.size,
                sharded=self.plan.sharded,
            )
        )

    def _step(self) -> None:
        """Forward, backward, update."""
        recipe, share, device = self.recipe, self.share, self.plan.placement.device
        peak = share_of_peak(recipe, self.counters.step, self.length.done(self.counters))
        loss = torch.zeros((), device=device)
        for first in share.batches(self.counters.step):
            inputs, targets = self.batches.batch(first, share.batch_size)
            torch.manual_seed(noise_seed(recipe.seed, first))
            part_loss = self.loss(sent(inputs, device), sent(targets, device))
            (part_loss / share.parts).backward()
            loss += part_loss.detach() / share.parts
        parameters = list(self.gpt.parameters())
        self.ranks.add_up([*unsummed_gradients(parameters), loss])
        norm = clip_gradients(parameters, recipe.clip)
        self.optimizers.step(peak)
        tokens = share.total * self.gpt.config.context_length
        self.log.add(loss=loss, norm=norm, share=peak, tokens=tokens)
        self.counters = Counters(
            step=self.counters.step + 1,
            tokens=self.counters.tokens + tokens,
            seconds=time.monotonic() - self.began,
        )
        if self.counters.step == 1:
            self.health.begin(float(loss))

    def _between_steps(self) -> bool:
        """Whatever is due after a step that is not the last. True: there was something."""
        saves, evaluates, samples, reports = self._due()
        if not reports:
            return False
        self._log()
        if saves and not self.health.suspected:
            self._save()
        elif (saves or evaluates) and self.milestones.evaluate(self.counters):
            if samples:
                self.milestones.sample(self.counters.step)  # the checkpoint's card shows them
            self.milestones.save_checkpoint(self.counters)
        if saves and self.health.suspected:
            self.report(Noticed(self._not_saved()))
        if samples:
            self.milestones.sample(self.counters.step)
        return True

    def _due(self) -> Due:
        step, recipe = self.counters.step, self.recipe
        saves = step % recipe.checkpoint_every == 0
        evaluates = step % recipe.eval_every == 0
        samples = step % (recipe.sample_every or recipe.eval_every) == 0
        logs = step % self.plan.config.log_every == 0
        return Due(saves, evaluates, samples, saves or evaluates or samples or logs)

    def _save(self) -> None:
        reports = {"log": self.log.state(), "health": self.health.state()}
        self.milestones.save(self.counters, reports)

    def _log(self) -> None:
        """Report and record the steps since the last report. The loss is looked at only here."""
        if not self.log.steps:
            return
        figures, counters = self.log.take(), self.counters
        self._look(figures)
        if complaint := self.health.complaint():
            raise self._diverged(complaint)
        self.milestones.record(
            {"kind": "train", "step": counters.step, "tokens": counters.tokens}
            | asdict(figures)
            | {"seconds": round(counters.seconds, 3)}
        )
        self.report(
            Progress(
                step=counters.step,
                share=self.length.done(counters),
                loss=figures.loss,
                smoothed_loss=figures.smoothed_loss,
                learning_rate=figures.learning_rate,
                gradient_norm=figures.gradient_norm,
                tokens_per_second=figures.tokens_per_second,
                matrix_share=figures.matrix_share,
                seconds=counters.seconds,
                seconds_left=self.length.seconds_left(counters, figures.seconds_per_step),
            )
        )

    def _look(self, figures: Figures | None) -> None:
        if figures is not None:
            loss, smoothed, norm = figures.loss, figures.smoothed_loss, figures.gradient_norm
            self.health.look(Look(self.counters.step, loss, smoothed, norm))

    def _reason_to_stop(self, signals: StopSignals) -> Reason | None:
        """Decided by the first process, or by a signal to any, and the same for all."""
        own = self._own_reason(signals)
        code, seconds = self.ranks.highest(
            [
                REASONS.index(own) if own else -1,
                self.counters.seconds if self.ranks.leads else 0.0,
            ]
        )
        self.counters = replace(self.counters, seconds=seconds)
        return REASONS[int(code)] if code >= 0 else None

    def _own_reason(self, signals: StopSignals) -> Reason | None:
        patience = self.recipe.patience
        if signals.asked:
            return "interrupted"
        if not self.ranks.leads:
            return None
        if self.length.out_of_steps(self.counters):
            return "finished"
        if self.length.done(self.counters) >= 1:
            return "time is up"
        if patience is not None and self.milestones.without_best() >= patience:
            return "no improvement"
        return None

    def _diverged(self, complaint: str) -> TrainingError:
        if not self.ranks.leads:
            return self.ranks.follows()
        return TrainingError(
            f"{complaint}. {self.milestones.safe()} Try lower learning rates or a warmup"
        )

    def _not_saved(self) -> str:
        return (
            f"step {self.counters.step} is not saved: the loss stands far above its best. "
            f"{self.milestones.safe()}"
        )

    def _stopping(self) -> None:
        self.report(
            Noticed("stopping after this step, then saving; once more to stop without saving")
        )

    def _result(self, reason: Reason) -> TrainingResult:
        last = self.milestones.evaluations[-1]
        return TrainingResult(
            run=self.run.path,
            checkpoint=self.run.latest,
            best=self.run.best,
            step=self.counters.step,
            tokens=self.counters.tokens,
            seconds=self.counters.seconds,
            val_loss=last["val_loss"],
            val_bits_per_byte=last["val_bits_per_byte"],
            reason=reason,
            rank=self.ranks.rank,
            adapter_of=self.plan.config.from_checkpoint if self.plan.lora else None,
        )
