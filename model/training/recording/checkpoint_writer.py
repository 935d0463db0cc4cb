"""CheckpointWriter: the checkpoints of a run, each with its card and ready to be served.

Writes weights, or an adapter, with a record of its training, moves the links `latest` and `best`,
and removes old checkpoints. Of several processes the main one writes. Does not save the trainer's
state (`model/training/run/state.py`) and does not decide when to write.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from logitd.model.checkpoint.adapter import save_adapter
from logitd.model.checkpoint.checkpoint import TrainingRecord, save_checkpoint
from logitd.model.training.distributed.fsdp import gather_weights
from logitd.model.training.events import EventHandler, Saved
from logitd.model.training.recording.card import write_card
from logitd.model.training.recording.sample_writer import SampleWriter
from logitd.model.training.run.run import Run
from logitd.model.training.stopping.length import Counters
from logitd.model.transformer.gpt import GPT


class CheckpointWriter:
    """Writes a model in training to the directory of its run."""

    def __init__(self, run: Run, gpt: GPT, report: EventHandler) -> None:
        self._run, self._gpt, self._report = run, gpt, report

    def exists(self, step: int) -> bool:
        """Whether the checkpoint of a step is there. All processes have to ask."""
        return bool(self._run.share.ranks.broadcast(step in self._run.directory.checkpoints()))

    def write(
        self,
        counters: Counters,
        evaluation: Mapping[str, Any],
        samples: SampleWriter,
        state_step: int | None,
    ) -> None:
        """Write the weights with the step's `evaluation` and the latest samples."""
        run, step, ranks = self._run, counters.step, self._run.share.ranks
        weights = gather_weights(self._gpt, ranks)
        if ranks.is_main:
            with run.directory.saving(step):
                self._save(weights, counters, evaluation, write_card(run, counters, samples))
                run.directory.link_newest_and_best()
                self.prune(state_step)
            self._report(Saved(step, run.directory.checkpoint(step)))
        ranks.barrier()

    def prune(self, state_step: int | None) -> None:
        """Remove old checkpoints, but not that of the saved state."""
        if self._run.share.ranks.is_main:
            self._run.directory.prune(self._run.training.recipe.keep, state_step)

    def _save(
        self,
        weights: Mapping[str, Tensor],
        counters: Counters,
        evaluation: Mapping[str, Any],
        card: str,
    ) -> None:
        run, training = self._run, self._run.training
        path = run.directory.checkpoint(counters.step)
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
