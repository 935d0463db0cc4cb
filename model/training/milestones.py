"""Milestones: what is measured, written and kept between the steps of a run.

Evaluations, samples, the trainer's state and checkpoints. The state is saved before an evaluation
and the checkpoint after it, so whatever fails in between loses nothing. Of several processes all
evaluate, each its share, and the first writes; it samples alone, unless they share the model. Does
not decide when each is due (`model/training/trainer.py`), and knows the files only by their verbs
(`run`, `state`, `model/checkpoint/checkpoint.py`).
"""

import errno
import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from model.checkpoint.adapter import save_adapter
from model.checkpoint.checkpoint import TrainingRecord, save_checkpoint
from model.data.prepare import RUN
from model.data.windows import ValidationWindows
from model.device import describe
from model.training.config import TrainingError, command, run_name
from model.training.distributed.fsdp import gather_weights, is_sharded, local, without_backward
from model.training.distributed.ranks import ALONE
from model.training.events import Evaluated, Noticed, Reporter, Sampled, Saved
from model.training.optim.optimizers import Optimizers
from model.training.run import plot
from model.training.run.card import CardFacts, write_card
from model.training.run.samples import sample_text
from model.training.run.state import Counters, Environment, save_state
from model.training.setup import Plan
from model.training.step.forward import Forward
from model.training.step.validate import evaluate
from model.transformer.gpt import GPT
from model.transformer.lora import parameters_without_adapters

TEMPERATURE = 0.8
"""Of samples."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of a disk that is full, a quota, a limit to a file."""

PYTHON_PROMPTS = ("def read(self", "import os\nimport", "The built-in function")
"""What samples of the built-in text begin with."""


class Milestones:
    """Looks at a model in training and keeps what it finds; changes nothing of it."""

    def __init__(self, plan: Plan, gpt: GPT, optimizers: Optimizers, report: Reporter) -> None:
        self.plan, self.run, self.gpt, self.optimizers = plan, plan.run, gpt, optimizers
        self.report, self.ranks = report, plan.ranks
        self.forward = without_backward(gpt, Forward(gpt, plan.placement, dropout=0.0))
        self.windows = ValidationWindows(
            plan.prepared.val,
            plan.prepared.tokenizer,
            window=plan.model.context_length,
            batch_size=plan.recipe.batch_size,
            batches=plan.recipe.eval_batches,
        )
        self.evaluations: list[dict[str, Any]] = []
        self.samples: list[tuple[str, str]] = []
        self.sampled_at: int | None = None
        self.saved_at: int | None = None  # the step of the saved state

    def resume(self, step: int) -> None:
        """Take up what the run's metrics tell, its state being that of `step`."""
        self.evaluations = [each for each in self.run.metrics() if each["kind"] == "eval"]
        self.saved_at = step

    def evaluate(self, counters: Counters) -> bool:
        """Measure and record the validation loss, unless it is known at this step. True: the best
        of the trained ones so far."""
        step = counters.step
        if self.evaluations and self.evaluations[-1]["step"] == step:
            return False
        evaluation = evaluate(
            self.gpt, self.windows, self.forward, self.ranks, together=is_sharded(self.gpt)
        )
        if not math.isfinite(evaluation.loss):
            raise TrainingError(
                f"training diverged: at step {step} the validation loss is {evaluation.loss}. "
                f"{self.safe()} Try lower learning rates or a warmup"
            )
        bits = evaluation.bits_per_byte
        best = min((each["val_loss"] for each in self.evaluations), default=math.inf)
        is_best = evaluation.loss < best
        record = {
            "kind": "eval",
            "step": step,
            "val_loss": evaluation.loss,
            "val_bits_per_byte": bits,
            "tokens": evaluation.tokens,
            "seconds": round(counters.seconds, 3),
        }
        self.record(record)
        self.evaluations.append(record)
        self.report(Evaluated(step, evaluation.loss, bits, is_best))
        if self.ranks.leads:
            self._draw(step, bits)
        return is_best and step > 0

    def record(self, record: Mapping[str, Any]) -> None:
        """Add to the run's metrics."""
        if self.ranks.leads:
            with self._writing(record["step"]):
                self.run.append(record)

    def _draw(self, step: int, bits: float) -> None:
        title = f"{self.run.path.name}, step {step}: {bits:.3f} bits per byte"
        with self._writing(step):
            drawn = plot.draw(self.run.metrics(), self.run.plot, title)
        if not drawn and step == 0:
            self.report(Noticed("no loss.png: matplotlib is not installed"))

    def without_best(self) -> int:
        """Evaluations since the best one."""
        losses = [each["val_loss"] for each in self.evaluations]
        return len(losses) - 1 - losses.index(min(losses))

    def sample(self, step: int) -> None:
        """Let the model write after each prompt, unless it did at this step."""
        if self.sampled_at == step or not (self.ranks.leads or is_sharded(self.gpt)):
            return
        self.samples = []
        self.sampled_at = step
        for number, prompt in enumerate(self.plan.config.prompts or self._prompts()):
            text = sample_text(
                self.gpt,
                self.plan.prepared.tokenizer,
                prompt,
                max_tokens=self.plan.config.sample_tokens,
                temperature=TEMPERATURE,
                seed=self.plan.recipe.seed + number,
                forward=self.forward,
                ranks=self.ranks if is_sharded(self.gpt) else ALONE,
            )
            self.samples.append((prompt, text))
            if self.ranks.leads:
                with self._writing(step):
                    self.run.append_sample(step, prompt, text)
            self.report(Sampled(step, prompt, text))

    def _prompts(self) -> tuple[str, ...]:
        """Openings that suit the text: Python's, or those of three places in the held-out text."""
        if self.plan.prepared.record["built_in"]:
            return PYTHON_PROMPTS
        tokenizer, tokens = self.plan.prepared.tokenizer, self.plan.prepared.val.tokens
        starts = (index * len(tokens) // 3 for index in range(3))
        texts = (tokenizer.decode(tokens[start : start + 8].tolist()) for start in starts)
        return tuple(text.strip("\ufffd") for text in texts)

    def save(self, counters: Counters, reports: Mapping[str, Any]) -> None:
        """State first, then evaluation and samples, then the checkpoint that shows them. `reports`
        is what the state keeps of what was reported, and of what was not yet."""
        self._require_finite(counters.step)
        with self._writing(counters.step):
            save_state(
                self.run.state,
                gpt=self.gpt,
                optimizers=self.optimizers,
                counters=counters,
                environment=self.environment(),
                reports=reports,
                ranks=self.ranks,
            )
        self.ranks.wait()  # here, where there is no limit to the time that writing takes
        self.saved_at = counters.step
        self.finish_save(counters)

    def finish_save(self, counters: Counters) -> None:
        """What follows a saved state, as far as it is not there: a kill may have prevented it."""
        self.evaluate(counters)
        if self.ranks.as_the_first(counters.step in self.run.checkpoints()):
            if self.ranks.leads:
                self.run.prune(self.plan.recipe.keep, self.saved_at)
        else:
            self.sample(counters.step)
            self.save_checkpoint(counters)

    def environment(self) -> Environment:
        """What the bits of a step depend on here."""
        sharded = is_sharded(self.gpt)
        return Environment.of(self.plan.placement, self.ranks.size, sharded=sharded)

    def _require_finite(self, step: int) -> None:
        """The last update may have spoiled the weights, and no loss has seen them yet."""
        named = self.gpt.named_parameters()
        spoiled = next((name for name, p in named if not bool(local(p).isfinite().all())), None)
        if not any(self.ranks.highest([spoiled is not None])):
            return
        if not self.ranks.leads:
            raise self.ranks.follows()
        raise TrainingError(
            f"training diverged: after step {step} {spoiled or 'the model'} holds numbers that are "
            f"not finite. {self.safe()} Try lower learning rates or a warmup"
        )

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"step {step} could not be saved: {error}. {self._way_on(error)}"
            ) from error

    def _way_on(self, error: Exception) -> str:
        """What is left, and what to do, as sentences."""
        if not (self.run.path / RUN).is_file():
            return f"{self.run.path} was removed meanwhile: there is nothing left to resume"
        # safetensors gives no number, and writes nothing that could fail for another reason.
        full = isinstance(error, SafetensorError) or getattr(error, "errno", None) in NO_ROOM
        mended = "With room on the disk" if full else "Once that is mended"
        return f"{self.safe()} {mended}, --resume goes on"

    def save_checkpoint(self, counters: Counters) -> None:
        """Write the weights as the last evaluation found them, and move the links."""
        weights = gather_weights(self.gpt, self.ranks)
        if self.ranks.leads:
            with self._writing(counters.step):
                path = self._save_checkpoint(counters, weights)
            self.report(Saved(counters.step, path))
        self.ranks.wait()

    def _save_checkpoint(self, counters: Counters, weights: Mapping[str, Tensor]) -> Path:
        run, evaluation = self.run, self.evaluations[-1]
        path = run.checkpoint(counters.step)
        base, lora = self.plan.base, self.plan.lora
        training = TrainingRecord(
            step=counters.step,
            tokens=counters.tokens,
            val_loss=evaluation["val_loss"],
            val_bits_per_byte=evaluation["val_bits_per_byte"],
            data=self.plan.prepared.record,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            base=None if base is None else base.record,
        )
        card = self._card(path.name, counters)
        if lora is not None:
            save_adapter(
                path,
                weights=weights,
                shape=lora,
                training=training,
                card=card,
                chat_template=self.plan.chat_template,
            )
        else:
            save_checkpoint(
                path,
                config=self.gpt.config,
                weights=weights,
                tokenizer=self.plan.prepared.tokenizer,
                training=training,
                card=card,
                dtype=getattr(torch, self.plan.recipe.save_dtype),
                chat_template=self.plan.chat_template,
            )
        run.link_newest_and_best()
        run.prune(self.plan.recipe.keep, self.saved_at)
        return path

    def _card(self, name: str, counters: Counters) -> str:
        plan, placement = self.plan, self.plan.placement
        return write_card(
            CardFacts(
                name=f"{run_name(plan.config)}, {name}",
                config=plan.model,
                parameters=parameters_without_adapters(self.gpt),
                recipe=plan.recipe,
                data=plan.prepared.record,
                command=command(plan.config),
                machine=f"{platform.machine()}, {describe(placement.device)}, "
                f"{placement.dtype_name}, {self._processes()}threads: {placement.threads}, "
                f"torch {torch.__version__}",
                step=counters.step,
                tokens=counters.tokens,
                seconds=counters.seconds,
                metrics=self.run.metrics(),
                samples=self.samples,
                sampled_at=self.sampled_at,
                temperature=TEMPERATURE,
                base=None if plan.base is None else plan.base.record,
                lora=plan.lora,
            )
        )

    def _processes(self) -> str:
        return f"processes: {self.ranks.size}, " if self.ranks.size > 1 else ""

    def safe(self) -> str:
        """What is left on the disk, as a sentence."""
        step = self.run.linked_step(self.run.latest)
        if step is None:
            return "Nothing was saved before."
        return f"The last good checkpoint is {self.run.checkpoint(step)}."
