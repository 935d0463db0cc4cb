"""Trainer: trains a model from a configuration and saves checkpoints. `train` is the entry point.

    setup_run   resolve the run (`configuration/`), prepare or reopen its directory (`setup/`)
    Trainer     build the model (`setup/base`), optimizers (`optim/`), loss (`step/`)
    load        for a resumed run: weights, optimizer states, counters (`run/state`)
    fit         train until there is a reason to stop

A step runs forward and backward over this process's batches, adds up the gradients of all
processes, clips them, updates the weights, and counts the step and its tokens. Between steps the
trainer reports, and the recorder saves, evaluates and samples (`recording/`). If there are several
processes, each has a copy or a part of the model (`distributed/`). All modules are in
`model/training/`.

Shapes: B sequences, T positions.
"""

import math
import time
import warnings
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from logitd.model.convert.exportable import describe as describe_export
from logitd.model.data.batches import Batches, noise_seed
from logitd.model.device import to_device, use_threads
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.distributed.fsdp import clip_gradients, shard_model, unsummed_gradients
from logitd.model.training.distributed.ranks import ALONE, process_group
from logitd.model.training.events import EventHandler, Noticed, Progress, Started, ignore_events
from logitd.model.training.optim.average import Average
from logitd.model.training.optim.optimizers import Optimizers
from logitd.model.training.optim.schedule import head_scale, lr_scale, window_length
from logitd.model.training.recording.recorder import Due, RunRecorder
from logitd.model.training.run.run import Run
from logitd.model.training.run.state import DAMAGE, differences, environment, load_state
from logitd.model.training.run.step_log import StepLog
from logitd.model.training.run.tensorboard import TensorBoard, require_tensorboard
from logitd.model.training.setup.base import initial_model
from logitd.model.training.setup.begin import base_path, setup_run
from logitd.model.training.step.compile import CompiledLoss, Loss, compiles
from logitd.model.training.step.flops import flops_per_token, machine_rate
from logitd.model.training.step.forward import Forward
from logitd.model.training.stopping.divergence import DivergenceMonitor
from logitd.model.training.stopping.length import Counters
from logitd.model.training.stopping.signals import StopSignals
from logitd.model.training.stopping.worsening import ended_worse

Reason = Literal["finished", "time is up", "no improvement", "interrupted"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""All reasons to stop. If processes have different reasons, the run stops for the one that comes
last in this list."""
MILESTONES = (0.01, 0.03, 0.1, 0.3)
"""Shares of a run after which an additional checkpoint and samples are written. Both are also
written before the first and after the last step."""
MOST_FOR_A_MILESTONE = 0.02
"""Maximum share of the run's minutes that a checkpoint at a milestone may take."""
CLOCK = ("seconds", "setup", "ending", "pace", "ending_pace", "share")
"""Counters whose values in the main process replace the values in all other processes."""
SHORTER = 0.8
"""A notice is given if less than this share of the expected steps fits into the run's minutes."""


@dataclass(frozen=True)
class TrainingResult:
    run: Path
    checkpoint: Path  # the newest
    best: Path
    step: int
    tokens: int
    seconds: float
    val_loss: float
    val_bits_per_byte: float
    reason: Reason
    rank: int = 0  # rank of the process that returns it; 0 is the main one
    adapter_of: Path | None = None  # the base of an adapter


def train(
    config: TrainingConfig, report: EventHandler = ignore_events, began: float | None = None
) -> TrainingResult:
    """Train a new run, or continue one with `resume`. `began` is the time on the monotonic clock
    when the command started; `minutes` count from then (None: from now).

    Raises TrainingError (options, runs, divergence), DataError, ConfigError and DeviceError, all
    with messages for the user. At the end, restores the random state and the number of threads that
    the caller had.
    """
    began = time.monotonic() if began is None else began
    with ExitStack() as stack:
        ranks = stack.enter_context(process_group())
        device = ranks.device(config.device)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.callback(use_threads, torch.get_num_threads())
        stack.enter_context(warnings.catch_warnings())
        # With autocast the norms of queries and keys get bfloat16 inputs and float32 weights, and
        # torch warns that it does not fuse them.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        warnings.filterwarnings("ignore", "Guards may run slower")  # on Python 3.13.0
        report = report if ranks.is_main else ignore_events
        if config.tensorboard:
            require_tensorboard()
        deadline = began + 60 * (config.minutes or math.inf)
        run = setup_run(config, ranks, report, deadline)
        stack.callback(run.directory.release)
        if run.training.config.tensorboard and ranks.is_main:
            report = stack.enter_context(closing(TensorBoard(report)))
        trainer = Trainer(run, report, began)
        if config.resume:
            trainer.load()
        with ranks.connected():
            result = trainer.fit()
        ranks.barrier()  # wait until the main process has written everything
        return result


class Trainer:
    """A run in progress: the model, its optimizers and counters."""

    def __init__(self, run: Run, report: EventHandler, began: float) -> None:
        training, placement, ranks = run.training, run.placement, run.ranks
        self.run, self.recipe, self.length = run, training.recipe, training.length
        self.report, self.ranks = report, ranks
        use_threads(placement.threads)
        if placement.device.type == "cuda" and ranks.size > 1:
            torch.cuda.set_device(placement.device)  # NCCL allocates its buffers there
        torch.manual_seed(self.recipe.seed)
        # 1) The model, or this process's part of it.
        self.gpt = initial_model(training, report)
        if run.sharded:
            shard_model(self.gpt, placement, ranks)
        else:
            self.gpt.to(placement.device)
        self.gpt.train()
        # 2) The parts of a step: batches, loss, update.
        end_of_text = run.text.tokenizer.end_of_text
        assert end_of_text is not None
        self.batches = Batches(run.text.train, seed=self.recipe.seed, end_of_text=end_of_text)
        forward = Forward(self.gpt, placement, dropout=training.model.dropout)
        self.loss: Loss = forward.loss
        if compiles(training.config.compile, placement.device, self.length.minutes):
            self.loss = CompiledLoss(forward, self._notice, peers=ranks if run.sharded else ALONE)
        self.optimizers = Optimizers(self.gpt, self.recipe, ranks)
        self.average = Average(self.gpt, self.recipe.average, ranks)
        # 3) The work between steps.
        self.counters = Counters()
        self.first = 0  # step at which this command began
        self.planned = Counters()  # with the share of the minutes that the next step completes
        self.expected = self.length.steps  # number of steps of the whole run; None: unknown
        self.done_before = 0.0  # completed share of the run before the last step
        self.window = 0  # number of positions in each window of the last step; 0 before the first
        self.log = StepLog(machine_rate(placement))
        self.divergence = DivergenceMonitor(self.recipe.warmup)
        self.recorder = RunRecorder(run, self.gpt, self.optimizers, self.average, report)
        self.began = began

    def load(self) -> None:
        """Load the saved state of a resumed run, if it has one, and rewind its directory."""
        state = self.run.directory.state
        if state.exists():
            self.counters, before, reports = load_state(
                state, gpt=self.gpt, optimizers=self.optimizers, average=self.average
            )
            run = self.run
            now = environment(run.placement, run.ranks.size, sharded=run.sharded)
            if changed := differences(now, before):
                self._notice(f"resuming; bits will differ from an uninterrupted run: {changed}")
            try:
                self.log.restore(reports["log"])
                # Earlier versions saved the smoothed loss in the log.
                smoothed = {"smoothed": reports["log"].get("smoothed")}
                self.divergence.restore(smoothed | reports["health"])
                tasks = {task: float(took) for task, took in reports.get("tasks", {}).items()}
                self.recorder.seconds.update(tasks)
            except DAMAGE as error:
                raise TrainingError(f"{state} has damaged reports: {error!r}") from error
        self.done_before = self.length.done(self.counters)
        self.first = self.counters.step
        self._rewind()
        self.recorder.restore(self.first)
        self.began -= self.counters.seconds

    def _rewind(self) -> None:
        """Remove everything that the run wrote after the saved state."""
        directory = self.run.directory
        if self.ranks.is_main:
            with directory.preparing():
                notes = directory.rewind(self.counters.step)
            for note in notes:
                self._notice(note)
        self.ranks.barrier()  # the other processes read the metrics next

    def fit(self) -> TrainingResult:
        """Train until the end of the run or an interrupt, and save."""
        self._report_start()
        stopping = "stopping after this step, then saving; interrupt again to stop without saving"
        before = self.counters
        with StopSignals(lambda: self._notice(stopping)) as signals:
            # 1) Save and evaluate the untrained model, or finish the saving of a resumed run.
            if self.counters.step == 0:
                self._record(Due(state=True, history=self.recipe.keeps(0)))
            else:
                kept = self.recipe.keeps(self.counters.step)
                self.recorder.finish(Due(state=True, history=kept), self.counters)
            self._count_setup(since=before.seconds)
            notice = self.length.setup_notice(self.counters)
            if self.counters.step == 0 and notice:
                self._notice(notice)
            # 2) Train, and do due tasks between steps. The log's clock runs only during steps.
            self.log.start()
            reason = self._reason_to_stop(signals)
            if self.first and reason in ("finished", "time is up"):
                minutes = self.counters.seconds / 60
                self._notice(
                    f"the run is over at step {self.first:,}, after {minutes:.1f} minutes in "
                    "total: to continue, increase --steps or --minutes, which count the whole run"
                )
            while reason is None:
                before, window = self.counters, self.window
                self._step()
                if window != self.window:  # compiling and warming up
                    self._count_setup(since=before.seconds)
                reason = self._reason_to_stop(signals)
                if reason is None and self._between_steps():
                    self.log.start()
                    reason = self._reason_to_stop(signals)
            # 3) Save the last step.
            self._end(reason)
            return self._result(reason)

    def _step(self) -> None:
        recipe, batch, device = self.recipe, self.run.batch, self.run.placement.device
        self.done_before = self.length.done(self.counters)
        self.counters = replace(
            self.counters, share=self.planned.share, minutes=self.planned.minutes
        )
        done = self.length.done(self.counters)
        training, model = self.run.training, self.run.training.model
        scale = lr_scale(recipe, self.counters.step, done, training.rewarming)
        window = window_length(recipe, model.context_length, done, training.rewarming)
        warm = window == self.window
        if self.window and not warm:
            self._notice(
                f"from step {self.counters.step + 1:,} on, windows have {window:,} tokens instead "
                f"of {self.window:,}"
            )
        self.window = window
        # 1) Compute the gradients of this process's batches. Dropout depends only on the sequence.
        loss = torch.zeros((), device=device)
        pieces = model.context_length // window  # windows in place of one of the context length
        for first in batch.batches(self.counters.step):
            inputs, targets = self.batches.batch(
                first * pieces, batch.batch_size * pieces, window
            )  # (B, T) each
            torch.manual_seed(noise_seed(recipe.seed, first))
            part_loss = self.loss(to_device(inputs, device), to_device(targets, device))
            (part_loss / batch.parts).backward()
            loss += part_loss.detach() / batch.parts
        # 2) Add up the gradients of all processes, and update the weights.
        parameters = list(self.gpt.parameters())
        self.ranks.all_reduce_sum([*unsummed_gradients(parameters), loss])
        norm = clip_gradients(parameters, recipe.clip)
        self.optimizers.step(scale, head_scale(recipe, self.counters.step))
        by_steps = 1 / self.length.steps if self.length.steps else 0.0
        self.average.follow(max(done - self.done_before, by_steps))
        # 3) Count. The loss stays on the device until a report is due.
        tokens = batch.total * pieces * window
        operations = tokens * flops_per_token(model, window)
        self.log.add(loss=loss, norm=norm, lr_scale=scale, tokens=tokens, operations=operations)
        self.counters = self.counters.stepped(self._now(), tokens, warm=warm)
        if self.counters.step == 1:
            self.divergence.start(float(loss))

    def _now(self) -> float:
        """Seconds that the run has taken so far."""
        return time.monotonic() - self.began

    def _count_setup(self, since: float) -> None:
        now = self._now()
        setup = self.counters.setup + now - since
        self.counters = replace(self.counters, seconds=now, setup=setup)

    def _record(self, due: Due) -> None:
        """Do the tasks that are due. If the state was saved, reserve time for saving the last
        step, based on the time that this save took."""
        began = self._now()
        reports = {
            "log": self.log.state(),
            "health": self.divergence.state(),
            "tasks": self.recorder.seconds,
        }
        self.recorder.record(due, self.counters, reports)
        now = self._now()
        # The last step also evaluates the average.
        more = self.recorder.seconds.get("evaluation", 0.0) if self.average.time else 0.0
        counters = self.counters.saved(now - began + more) if due.state else self.counters
        self.counters = replace(counters, seconds=now)  # the pace does not include the tasks

    def _between_steps(self) -> bool:
        """After a step that is not the last, report and do the tasks that are due. Returns True if
        any were due."""
        due = self._due()
        if not self._reports(due):
            return False
        self._log()  # first, because the loss decides whether the state may be saved
        if due.state and self.divergence.suspect:
            self._record(replace(due, state=False, evaluation=True, history=False))
            self._notice_not_saved()
        else:
            self._record(due)
        return True

    def _due(self) -> Due:
        step, recipe = self.counters.step, self.recipe
        if self.length.clock_left(self.counters) < self.length.reserved(self.counters):
            return Due()  # the run is about to end, which saves, evaluates and samples
        return Due(
            state=step % recipe.checkpoint_every == 0 or self._at_milestone(),
            evaluation=step % recipe.eval_every == 0,
            samples=step % (recipe.sample_every or recipe.eval_every) == 0,
            history=recipe.keeps(step),
        )

    def _at_milestone(self) -> bool:
        """True if the last step reached one of MILESTONES, and the time reserved for saving
        is at most MOST_FOR_A_MILESTONE of the run's minutes."""
        counters, minutes = self.counters, self.length.minutes
        if (
            minutes is not None
            and self.length.reserved(counters) > MOST_FOR_A_MILESTONE * 60 * minutes
        ):
            return False
        done = self.length.done(counters)
        return any(self.done_before < milestone <= done for milestone in MILESTONES)

    def _reports(self, due: Due) -> bool:
        """True if a report is due. It is due together with any other task, and every `log_every`
        steps."""
        logs = self.counters.step % self.run.training.config.log_every == 0
        return due.state or due.evaluation or due.samples or due.history or logs

    def _log(self) -> None:
        """Report the steps since the last report, and append them to the metrics. Only this method
        reads the loss from the device."""
        if not self.log.steps:
            return
        figures, counters = self.log.take(), self.counters
        self.divergence.observe(counters.step, figures)
        if diagnosis := self.divergence.diagnosis():
            raise self._diverged(diagnosis)
        self._notice_fewer_steps()
        pace, tasks = counters.pace or figures.seconds_per_step, self.recorder.seconds_per_step()
        share = self.length.done(counters)
        seconds_left = self.length.seconds_left(counters, pace, tasks)
        self.recorder.write_metrics(
            {"kind": "train", "step": counters.step, "tokens": counters.tokens}
            | asdict(figures)
            | {"seconds": round(counters.seconds, 3), "seconds_left": round(seconds_left, 3)}
            | {"done": share, "minutes": self.length.minutes}
        )
        self.report(Progress(counters.step, share, figures, seconds_left))

    def _notice_fewer_steps(self) -> None:
        counters, tasks = self.counters, self.recorder.seconds_per_step()
        left = self.length.steps_left(counters, counters.pace, tasks)
        if self.length.minutes is None or not counters.pace:
            return
        steps = counters.step + round(left)
        expected = self.expected or steps
        if steps < SHORTER * expected:
            self._notice(self.length.shortening_notice(steps, expected))
            expected = steps
        self.expected = expected

    def _end(self, reason: Reason) -> None:
        """Save the last step unless the loss is suspect. If the run is interrupted between two
        reports, the saved state includes the steps since the last report, so that the resumed run
        reports the same as an uninterrupted one."""
        divergence = self.divergence
        if reason != "interrupted" or self._reports(self._due()):
            self._log()
        elif self.log.steps:
            divergence = copy(divergence)  # the resumed run reports these steps again
            divergence.observe(self.counters.step, self.log.figures())
        if diagnosis := divergence.diagnosis(last=reason != "interrupted"):
            raise self._diverged(diagnosis)
        if divergence.suspect:
            self.recorder.evaluate(self.counters)
            self._notice_not_saved()
        else:
            kept = self.recipe.keep_every is not None and reason != "interrupted"
            self._record(Due(state=True, history=kept or self.recipe.keeps(self.counters.step)))
        # Only the main process has the metrics.
        if reason == "interrupted" or not self.ranks.is_main:
            return
        if notice := ended_worse(self.run.directory.metrics()):
            self._notice(notice)

    def _reason_to_stop(self, signals: StopSignals) -> Reason | None:
        """The reason to stop, the same in all processes. The main process decides, except that a
        signal to any process stops all."""
        own, counters = self._own_reason(signals), self.counters
        planned = self.length.plan(counters, self.recorder.seconds_per_step())
        clock = [*(getattr(counters, name) for name in CLOCK), planned.share]
        if not self.ranks.is_main:
            clock = [0.0] * len(clock)
        reason = REASONS.index(own) if own else -1
        code, *clock, share = self.ranks.all_reduce_max([reason, *clock])
        shared: dict[str, Any] = dict(zip(CLOCK, clock, strict=True))
        self.counters = replace(counters, **shared)
        self.planned = replace(planned, share=share)
        return REASONS[int(code)] if code >= 0 else None

    def _own_reason(self, signals: StopSignals) -> Reason | None:
        patience = self.recipe.patience
        if signals.asked:
            return "interrupted"
        if not self.ranks.is_main:
            return None
        if self.length.is_over(self.counters):
            by_clock = self.length.is_over_by_clock(self.counters)
            return "time is up" if by_clock else "finished"
        if patience is not None and self.recorder.evaluations_since_best() >= patience:
            return "no improvement"
        return None

    def _diverged(self, diagnosis: str) -> TrainingError:
        if not self.ranks.is_main:
            return self.ranks.secondary_error()
        return self.run.directory.diverged(diagnosis)

    def _notice(self, message: str) -> None:
        self.report(Noticed(message))

    def _notice_not_saved(self) -> None:
        self._notice(
            f"step {self.counters.step} is not saved: the loss is far above its best. "
            f"{self.run.directory.last_good()}"
        )

    def _report_start(self) -> None:
        run = self.run
        # Report the formats of `logitd export` before training, which may take hours.
        export = ""
        if run.training.config.exportable:
            export = describe_export(run.training.model, run.text.tokenizer)
        self.report(
            Started(
                run=run.directory.path,
                parameters=self.gpt.parameter_count(),
                step=self.counters.step,
                steps=self.length.steps,
                placement=run.placement,
                processes=self.ranks.size,
                sharded=run.sharded,
                export=export,
            )
        )

    def _result(self, reason: Reason) -> TrainingResult:
        last, run = self.recorder.evaluations[-1], self.run
        return TrainingResult(
            run=run.directory.path,
            checkpoint=run.directory.latest,
            best=run.directory.best,
            step=self.counters.step,
            tokens=self.counters.tokens,
            seconds=self.counters.seconds,
            val_loss=last["val_loss"],
            val_bits_per_byte=last["val_bits_per_byte"],
            reason=reason,
            rank=self.ranks.rank,
            adapter_of=base_path(run.training, run.directory) if run.training.lora else None,
        )
