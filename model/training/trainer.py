"""Trainer: from a configuration to a trained checkpoint. `train` is the entry.

A step: forward and backward over `accumulate` batches, clip, update, count. Between steps: log,
sample, evaluate, save, each when it is due. The trainer's state is saved before an evaluation and
the checkpoint after it, so whatever fails in between loses nothing.

Covers one process on one device. What each part does stands in the file of its name: `recipe`
(weights, optimizers, learning rates), `forward`, `batches`, `evaluate`, `sample`, `length`, `log`,
`state`, `run`, `card`.

Shapes: B sequences, T positions, V = vocab_size.
"""

import math
import platform
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from model.chat_template import ChatTemplate, ChatTemplateError
from model.checkpoint import TrainingRecord, save_checkpoint
from model.config import GPTConfig
from model.device import Placement, describe, use_threads
from model.gpt import GPT
from model.presets import Recipe, preset
from model.training import plot
from model.training.batches import Batches
from model.training.card import CardFacts, write_card
from model.training.config import TrainingConfig, TrainingError, command, settle, settle_again
from model.training.evaluate import ValidationWindows, evaluate
from model.training.events import (
    Evaluated,
    Noticed,
    Prepared,
    Progress,
    Reporter,
    Sampled,
    Saved,
    Started,
    silent,
)
from model.training.forward import Forward, training_placement
from model.training.interrupt import StopSignals
from model.training.length import Length
from model.training.log import StepLog
from model.training.prepare import PreparedText, prepare_text, read_prepared, require_window
from model.training.recipe import Optimizers, initialise, share_of_peak
from model.training.run import RunDirectory
from model.training.sample import sample_text
from model.training.state import Counters, Environment, load_state, save_state
from model.training.text.opening import open_text

Reason = Literal["finished", "time is up", "interrupted", "no improvement"]

TEMPERATURE = 0.8
"""Of samples."""

PYTHON_PROMPTS = ("def read(self", "import os\nimport", "The built-in function")
"""What samples of the built-in text begin with."""


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
            trainer = _resumed(config, report) if config.resume else _new(config, report)
            return trainer.fit()
        finally:
            use_threads(threads)


def _new(config: TrainingConfig, report: Reporter) -> "Trainer":
    recipe, shape = settle(config)
    start = preset(config.preset)
    start.config(recipe.vocab_size, **shape)  # refuse what no vocabulary makes possible right away
    chat_template = _chat_template(config)
    placement = training_placement(config.device, recipe.dtype, config.threads)
    text = open_text(config, report)
    run = RunDirectory.create(_path(config))
    try:
        prepared = prepare_text(text, recipe, run.data)
        model = start.config(prepared.tokenizer.vocab_size, **shape)
        require_window(prepared, model.context_length)
    except BaseException:
        run.discard()
        raise
    report(Prepared(prepared.record, prepared.tokenizer.vocab_size))
    _describe(run, config, recipe, model)
    return Trainer(config, recipe, model, prepared, run, placement, chat_template, report)


def _resumed(config: TrainingConfig, report: Reporter) -> "Trainer":
    run = RunDirectory.open(_path(config))
    description = run.read_description()
    first = TrainingConfig(**description["config"])
    recipe = settle_again(config, first, Recipe(**description["recipe"]))
    config = TrainingConfig(**{**description["config"], **_given(config)})
    chat_template = _chat_template(config)
    prepared = read_prepared(run.data)
    report(Prepared(prepared.record, prepared.tokenizer.vocab_size))
    model = GPTConfig.from_dict(description["model"])
    placement = training_placement(config.device, recipe.dtype, config.threads)
    trainer = Trainer(config, recipe, model, prepared, run, placement, chat_template, report)
    trainer.load()
    _describe(run, config, recipe, model)
    return trainer


def _chat_template(config: TrainingConfig) -> str | None:
    """The chat template for the checkpoints, read once: one that does not compile is refused
    before hours of training, not after."""
    if config.chat_template is None:
        return None
    try:
        return ChatTemplate(config.chat_template.read_text(encoding="utf-8")).source
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(
            f"the chat template {config.chat_template} cannot be read: {error}"
        ) from error
    except ChatTemplateError as error:
        raise TrainingError(f"{config.chat_template}: {error}") from error


def _path(config: TrainingConfig) -> Path:
    return config.out or Path("runs") / config.preset


def _given(config: TrainingConfig) -> dict[str, Any]:
    """What a person said, as JSON can hold it."""
    names = set(TrainingConfig.model_fields) - {"resume"}
    return config.model_dump(mode="json", include=names, exclude_unset=True)


def _describe(run: RunDirectory, config: TrainingConfig, recipe: Recipe, model: GPTConfig) -> None:
    run.write_description(
        {"config": _given(config), "recipe": asdict(recipe), "model": model.to_dict()}
    )


class Trainer:
    """One run in progress: the model, its optimizers, and how far they are."""

    def __init__(
        self,
        config: TrainingConfig,
        recipe: Recipe,
        model: GPTConfig,
        prepared: PreparedText,
        run: RunDirectory,
        placement: Placement,
        chat_template: str | None,
        report: Reporter,
    ) -> None:
        use_threads(placement.threads)
        torch.manual_seed(recipe.seed)
        self.config, self.recipe, self.prepared = config, recipe, prepared
        self.run, self.placement, self.report = run, placement, report
        self.chat_template = chat_template
        self.gpt = GPT(model)
        initialise(self.gpt, recipe, torch.Generator().manual_seed(recipe.seed))
        self.gpt.to(placement.device).train()
        self.optimizers = Optimizers(self.gpt, recipe)
        self.forward = Forward(self.gpt, placement, dropout=model.dropout)
        self.forward_plain = Forward(self.gpt, placement, dropout=0.0)
        self.batches = Batches(prepared.train, window=model.context_length, seed=recipe.seed)
        self.windows = ValidationWindows(
            prepared.val,
            prepared.tokenizer,
            window=model.context_length,
            batch_size=recipe.batch_size,
            batches=recipe.eval_batches,
        )
        by_clock = config.minutes is not None and config.steps is None
        self.length = Length(None if by_clock else recipe.steps, config.minutes)
        self.counters = Counters()
        self.log = StepLog()
        self.evaluations: list[dict[str, Any]] = []
        self.samples: list[tuple[str, str]] = []
        self.sampled_at: int | None = None
        self.began = time.monotonic()

    def load(self) -> None:
        """Take up the run's saved state, and forget what was written after it."""
        self.counters, before = load_state(self.run.state, gpt=self.gpt, optimizers=self.optimizers)
        if differences := Environment.of(self.placement).differences(before):
            self.report(
                Noticed(f"resuming, but not bit for bit as one run would have gone: {differences}")
            )
        self.run.rewind(self.counters.step)
        metrics = self.run.metrics()
        self.evaluations = [record for record in metrics if record["kind"] == "eval"]
        self.log.resume(metrics)
        self.began = time.monotonic() - self.counters.seconds

    def fit(self) -> TrainingResult:
        """Train to the end, or until somebody asks to stop."""
        self.report(
            Started(
                run=self.run.path,
                parameters=self.gpt.parameter_count(),
                step=self.counters.step,
                steps=self.length.steps,
                device=describe(self.placement.device),
                dtype=self.placement.dtype_name,
                threads=self.placement.threads,
            )
        )
        with StopSignals(self._stopping) as signals:
            if self.counters.step == 0:
                self._evaluate()
            elif self.counters.step not in self.run.checkpoints():
                self._save()
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
            self._save()
            return self._result(reason)

    def _step(self) -> None:
        """Forward, backward, update."""
        recipe, device = self.recipe, self.placement.device
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
        if saves or evaluates or samples or step % self.config.log_every == 0:
            self._log()
        if saves:
            self._save()
        elif evaluates and self._evaluate():
            self._save_checkpoint()
        if samples and self.sampled_at != step:
            self._sample()

    def _log(self) -> None:
        """Report and record the steps since the last report. The loss is looked at only here."""
        if not self.log.steps:
            return
        figures, counters = self.log.take(), self.counters
        if not math.isfinite(figures.loss) or not math.isfinite(figures.gradient_norm):
            raise TrainingError(
                f"training diverged: at step {counters.step} the loss is {figures.loss} and the "
                f"gradient norm {figures.gradient_norm}. {self._safe()} Try lower learning rates "
                "or a warmup"
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

    def _evaluate(self) -> bool:
        """Measure and record the validation loss. True: the best of the trained ones so far."""
        evaluation = evaluate(self.gpt, self.windows, self.forward_plain)
        step, bits = self.counters.step, evaluation.bits_per_byte
        best = min((each["val_loss"] for each in self.evaluations), default=math.inf)
        is_best = evaluation.loss < best
        record = {
            "kind": "eval",
            "step": step,
            "val_loss": evaluation.loss,
            "val_bits_per_byte": bits,
            "tokens": evaluation.tokens,
            "seconds": round(time.monotonic() - self.began, 3),
        }
        self.run.append(record)
        self.evaluations.append(record)
        self.report(Evaluated(step, evaluation.loss, bits, is_best))
        title = f"{self.run.path.name}, step {step}: {bits:.3f} bits per byte"
        if not plot.draw(self.run.metrics(), self.run.plot, title) and step == 0:
            self.report(Noticed("no loss.png: matplotlib is not installed"))
        return is_best and step > 0

    def _sample(self) -> None:
        """Let the model write after each prompt."""
        self.samples = []
        self.sampled_at = self.counters.step
        for number, prompt in enumerate(self.config.prompts or self._prompts()):
            text = sample_text(
                self.gpt,
                self.prepared.tokenizer,
                prompt,
                max_tokens=self.config.sample_tokens,
                temperature=TEMPERATURE,
                seed=self.recipe.seed + number,
                forward=self.forward_plain,
            )
            self.samples.append((prompt, text))
            self.run.append_sample(self.counters.step, prompt, text)
            self.report(Sampled(self.counters.step, prompt, text))

    def _prompts(self) -> tuple[str, ...]:
        """Openings that suit the text: Python's, or those of three places in the held-out text."""
        if self.prepared.record["built_in"]:
            return PYTHON_PROMPTS
        tokenizer, tokens = self.prepared.tokenizer, self.prepared.val.tokens
        starts = (index * len(tokens) // 3 for index in range(3))
        texts = (tokenizer.decode(tokens[start : start + 8].tolist()) for start in starts)
        return tuple(text.strip("\ufffd") for text in texts)

    def _save(self) -> None:
        """State first, then evaluation and samples, then the checkpoint that shows them."""
        try:
            save_state(
                self.run.state,
                gpt=self.gpt,
                optimizers=self.optimizers,
                counters=self.counters,
                environment=Environment.of(self.placement),
            )
            if self.counters.step in self.run.checkpoints():
                return  # these weights are saved already: stopped at once after a save
            self._evaluate()
            self._sample()
            self._save_checkpoint()
        except OSError as error:
            raise TrainingError(
                f"step {self.counters.step} could not be saved: {error}. {self._safe()}"
            ) from error

    def _save_checkpoint(self) -> None:
        """Write the weights as the last evaluation found them, and move the links."""
        step, run, evaluation = self.counters.step, self.run, self.evaluations[-1]
        path = run.checkpoint(step)
        save_checkpoint(
            path,
            gpt=self.gpt,
            tokenizer=self.prepared.tokenizer,
            training=TrainingRecord(
                step=step,
                tokens=self.counters.tokens,
                val_loss=evaluation["val_loss"],
                val_bits_per_byte=evaluation["val_bits_per_byte"],
                data=self.prepared.record,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
            card=self._card(path.name),
            dtype=getattr(torch, self.recipe.save_dtype),
            chat_template=self.chat_template,
        )
        run.link_newest_and_best()
        run.prune(self.recipe.keep)
        self.report(Saved(step, path))

    def _card(self, name: str) -> str:
        placement = self.placement
        return write_card(
            CardFacts(
                name=f"{self.config.preset}, {name}",
                config=self.gpt.config,
                parameters=self.gpt.parameter_count(),
                recipe=self.recipe,
                data=self.prepared.record,
                command=command(self.config),
                machine=f"{platform.machine()}, {describe(placement.device)}, "
                f"{placement.dtype_name}, threads: {placement.threads}, torch {torch.__version__}",
                step=self.counters.step,
                tokens=self.counters.tokens,
                seconds=self.counters.seconds,
                metrics=self.run.metrics(),
                samples=self.samples,
                sampled_at=self.sampled_at,
                temperature=TEMPERATURE,
            )
        )

    def _reason_to_stop(self, signals: StopSignals) -> Reason | None:
        if signals.asked:
            return "interrupted"
        if self.length.out_of_steps(self.counters):
            return "finished"
        if self.length.done(self.counters) >= 1:
            return "time is up"
        if self.recipe.patience is not None and self._without_best() >= self.recipe.patience:
            return "no improvement"
        return None

    def _without_best(self) -> int:
        """Evaluations since the best one."""
        losses = [each["val_loss"] for each in self.evaluations]
        return len(losses) - 1 - losses.index(min(losses))

    def _stopping(self) -> None:
        self.report(
            Noticed("stopping after this step, then saving; once more to stop without saving")
        )

    def _safe(self) -> str:
        """What is left on the disk, as a sentence."""
        step = self.run.linked_step(self.run.latest)
        if step is None:
            return "Nothing was saved before."
        return f"The last good checkpoint is {self.run.checkpoint(step)}."

    def _result(self, reason: Reason) -> TrainingResult:
        last = self.evaluations[-1]
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
