"""CheckpointWriter: the checkpoints of a run, each with its card and ready to be served.

Writes weights, or an adapter, with what a checkpoint says of its training, moves the links `latest`
and `best`, and removes what is no longer kept. Of several processes the main one writes. Does not
save the trainer's state (`model/training/run/state.py`) and does not decide when to write.
"""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from logitd.model.checkpoint.adapter import save_adapter
from logitd.model.checkpoint.checkpoint import TrainingRecord, save_checkpoint
from logitd.model.device import describe
from logitd.model.training.distributed.fsdp import gather_weights
from logitd.model.training.events import EventHandler, Saved
from logitd.model.training.recording.sample_writer import TEMPERATURE, SampleWriter
from logitd.model.training.run.card import CardFacts, write_card
from logitd.model.training.run.errors import saving
from logitd.model.training.setup.resolve import ResolvedRun
from logitd.model.training.stopping.counters import Counters
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import parameter_count


class CheckpointWriter:
    """Writes a model in training to the directory of its run."""

    def __init__(self, run: ResolvedRun, gpt: GPT, report: EventHandler) -> None:
        self._run, self._gpt, self._report = run, gpt, report

    def exists(self, step: int) -> bool:
        """Whether the checkpoint of a step is there. All processes have to ask."""
        return bool(self._run.ranks.broadcast(step in self._run.directory.checkpoints()))

    def write(
        self,
        counters: Counters,
        evaluation: Mapping[str, Any],
        samples: SampleWriter,
        state_step: int | None,
    ) -> None:
        """Write the weights with the step's `evaluation` and the latest samples."""
        run, step = self._run, counters.step
        weights = gather_weights(self._gpt, run.ranks)
        if run.ranks.is_main:
            with saving(run.directory, step):
                self._save(weights, counters, evaluation, self._card(counters, samples))
                run.directory.link_newest_and_best()
                run.directory.prune(run.recipe.keep, state_step)
            self._report(Saved(step, run.directory.checkpoint(step)))
        run.ranks.barrier()

    def prune(self, state_step: int | None) -> None:
        """Remove old checkpoints, but not that of the saved state."""
        if self._run.ranks.is_main:
            self._run.directory.prune(self._run.recipe.keep, state_step)

    def _save(
        self,
        weights: Mapping[str, Tensor],
        counters: Counters,
        evaluation: Mapping[str, Any],
        card: str,
    ) -> None:
        run = self._run
        path = run.directory.checkpoint(counters.step)
        training = TrainingRecord(
            step=counters.step,
            tokens=counters.tokens,
            val_loss=evaluation["val_loss"],
            val_bits_per_byte=evaluation["val_bits_per_byte"],
            data=run.text.record,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            base=None if run.base is None else run.base.record,
        )
        if run.lora is not None:
            save_adapter(
                path,
                weights=weights,
                shape=run.lora,
                training=training,
                card=card,
                chat_template=run.chat_template,
            )
            return
        save_checkpoint(
            path,
            config=self._gpt.config,
            weights=weights,
            tokenizer=run.text.tokenizer,
            training=training,
            card=card,
            dtype=getattr(torch, run.recipe.save_dtype),
            chat_template=run.chat_template,
        )

    def _card(self, counters: Counters, samples: SampleWriter) -> str:
        run, placement = self._run, self._run.placement
        processes = f"processes: {run.ranks.size}, " if run.ranks.size > 1 else ""
        return write_card(
            CardFacts(
                name=f"{run.name}, {run.directory.checkpoint(counters.step).name}",
                config=run.model,
                parameters=parameter_count(run.model),
                recipe=run.recipe,
                data=run.text.record,
                command=run.command,
                machine=f"{platform.machine()}, {describe(placement.device)}, "
                f"{placement.dtype_name}, {processes}threads: {placement.threads}, "
                f"torch {torch.__version__}",
                step=counters.step,
                tokens=counters.tokens,
                seconds=counters.seconds,
                metrics=run.directory.metrics(),
                samples=samples.latest,
                sampled_at=samples.step,
                temperature=TEMPERATURE,
                base=None if run.base is None else run.base.record,
                lora=run.lora,
            )
        )
