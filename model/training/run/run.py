"""Run: an open training run, as one of its processes sees it."""

from dataclasses import dataclass

from logitd.model.data.batches import RankBatch
from logitd.model.data.prepare import PreparedText
from logitd.model.device import Placement
from logitd.model.training.configuration.resolve import ResolvedTraining
from logitd.model.training.distributed.ranks import Ranks
from logitd.model.training.run.directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that training, evaluating and saving need to know about a run.

    placement  device, dtype and threads of this process
    batch      this process's part of each step
    sharded    this process has a part of the model instead of a copy
    """

    training: ResolvedTraining
    ranks: Ranks
    placement: Placement
    batch: RankBatch
    directory: RunDirectory
    text: PreparedText
    chat_template: str | None = None  # for checkpoints; None in processes that write none
    sharded: bool = False
