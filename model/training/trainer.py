"""Trainer: from a configuration to a trained checkpoint. `train` is the entry.

A step: forward and backward over `accumulate` batches, clip, update, count. Between steps: log,
sample, evaluate, save, each when it is due.

Covers one process on one device. What each part does stands in the file of its name: `begin` (what
a run is made of), `recipe` (weights, optimizers, learning rates), `forward`, `batches`,
`milestones` (evaluations, samples, checkpoints), `length`, `log`, `state`.

Shapes: B sequences, T positions, V = vocab_size.
"""

import math
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from model.device import describe, use_threads
from model.gpt import GPT
from model.training.batches import Batches
from model.training.begin import Plan, begin, begin_again
from model.training.config import TrainingConfig, TrainingError
from model.training.events import Noticed, Progress, Reporter, Started, silent
from model.training.forward import Forward
from model.training.interrupt import StopSignals
from model.training.length import Length
from model.training.log import StepLog
from model.training.milestones import Milestones
from model.training.recipe import Optimizers, initialise, share_of_peak
from model.training.state import Counters, Environment, load_state

Reason = Literal["finished", "time is up", "interrupted", "no improvement"]


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


def train(config: TrainingConfig, report: Reporter = silent) -> TrainingResult:
    """Train, or with `resume` go on training, and return where it ended.

    Raises TrainingError (texts, options, runs, divergence), PresetError, ConfigError and
    DeviceError, each with a sentence for the person who asked. Leaves the caller's random state
    and thread count as they were.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng(), warnings.catch_warnings():
        # Autocast gives the norms of queries and keys bfloat16 inputs and float32 weights, and
        # torch says that this takes its unfused path.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        try:
            plan = begin_again(config, report) if config.resume else begin(config, report)
            trainer = Trainer(plan, report)
            if config.resume:
                trainer.load()
            return trainer.fit()
        finally:
            use_threads(threads)


class Trainer:
    """One run in progress: the model, its optimizers, and how far they are."""

    def __init__(self, plan: Plan, report: Reporter) -> None:
        recipe, placement = plan.recipe, plan.placement
        use_threads(placement.threads)
        torch.manual_seed(recipe.seed)
        self.plan, self.recipe, self.run, self.report = plan, recipe, plan.run, report
        self.gpt = GPT(plan.model)
        initialise(self.gpt, recipe, torch.Generator().manual_seed(recipe.seed))
        self.gpt.to(placement.device).train()
        self.optimizers = Optimizers(self.gpt, recipe)
        self.forward = Forward(self.gpt, placement, dropout=plan.model.dropout)
        self.batches = Batches(
            plan.prepared.train, window=plan.model.context_length, seed=recipe.seed
        )
        self.milestones = Milestones(plan, self.gpt, self.optimizers, report)
        by_clock = plan.config.minutes is not None and plan.config.steps is None
        self.length = Length(None if by_clock else recipe.steps, plan.config.minutes)
        self.counters = Counters()
        self.log = StepLog()
        self.began = time.monotonic()

    def load(self) -> None:
        """Take up the run's saved state, and forget what was written after it."""
        self.counters, before = load_state(self.run.state, gpt=self.gpt, optimizers=self.optimizers)
        if differences := Environment.of(self.plan.placement).differences(before):
            self.report(
                Noticed(f"resuming, but not bit for bit as one run would have gone: {differences}")
            )
        self.run.rewind(self.counters.step)
        self.milestones.resume()
        self.log.resume(self.run.metrics())
        self.began = time.monotonic() - self.counters.seconds

    def fit(self) -> TrainingResult:
        """Train to the end, or until somebody asks to stop."""
        self._report_start()
        with StopSignals(self._stopping) as signals:
            if self.counters.step == 0:
                self.milestones.evaluate(self.counters)
            elif self.counters.step not in self.run.checkpoints():
                self.milestones.save(self.counters)
            self.log.start()
            reason = self._reason_to_stop(signals)
            while reason is None:
                self._step()
                reason = self._reason_to_stop(signals)
                if reason is None:
                    self._between_steps()
                    self.log.start()
                    reason = self._reason_to_stop(signals)
            self._log()
            self.milestones.save(self.counters)
            return self._result(reason)

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
            )
        )

    def _step(self) -> None:
        """Forward, backward, update."""
        recipe, device = self.recipe, self.plan.placement.device
        share = share_of_peak(recipe, self.counters.step, self.length.done(self.counters))
        size, total = recipe.batch_size, recipe.batch_size * recipe.accumulate
        loss = torch.zeros((), device=device)
        for part in range(recipe.accumulate):
            inputs, targets = self.batches.batch(self.counters.step * total + part * size, size)
            logits = self.forward(inputs.to(device))  # (B, T, V)
            part_loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())
            (part_loss / recipe.accumulate).backward()
            loss += part_loss.detach() / recipe.accumulate
        norm = torch.nn.utils.clip_grad_norm_(self.gpt.parameters(), recipe.clip or math.inf)
        self.optimizers.step(share)
        tokens = total * self.gpt.config.context_length
        self.log.add(loss=loss, norm=norm, share=share, tokens=tokens)
        self.counters = Counters(
            step=self.counters.step + 1,
            tokens=self.counters.tokens + tokens,
            seconds=time.monotonic() - self.began,
        )

    def _between_steps(self) -> None:
        """Whatever is due after a step that is not the last."""
        step, recipe = self.counters.step, self.recipe
        saves = step % recipe.checkpoint_every == 0
        evaluates = step % recipe.eval_every == 0
        samples = step % recipe.sample_every == 0
        if saves or evaluates or samples or step % self.plan.config.log_every == 0:
            self._log()
        if saves:
            self.milestones.save(self.counters)
        elif evaluates and self.milestones.evaluate(self.counters):
            self.milestones.save_checkpoint(self.counters)
        if samples:
            self.milestones.sample(step)

    def _log(self) -> None:
        """Report and record the steps since the last report. The loss is looked at only here."""
        if not self.log.steps:
            return
        figures, counters = self.log.take(), self.counters
        if not math.isfinite(figures.loss) or not math.isfinite(figures.gradient_norm):
            raise TrainingError(
                f"training diverged: at step {counters.step} the loss is {figures.loss} and the "
                f"gradient norm {figures.gradient_norm}. {self.milestones.safe()} Try lower "
                "learning rates or a warmup"
            )
        self.run.append(
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
                seconds=counters.seconds,
                seconds_left=self.length.seconds_left(counters, figures.seconds_per_step),
            )
        )

    def _reason_to_stop(self, signals: StopSignals) -> Reason | None:
        patience = self.recipe.patience
        if signals.asked:
            return "interrupted"
        if self.length.out_of_steps(self.counters):
            return "finished"
        if self.length.done(self.counters) >= 1:
            return "time is up"
        if patience is not None and self.milestones.without_best() >= patience:
            return "no improvement"
        return None

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
        )
