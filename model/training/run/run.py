"""Run: a resolved training, opened by one of its processes."""

from dataclasses import dataclass

from logitd.model.data.batches import RankBatch, rank_batch
from logitd.model.data.prepare import PreparedText
from logitd.model.device import Placement
from logitd.model.training.configuration.resolve import ResolvedTraining
from logitd.model.training.distributed.fsdp import worth_sharding
from logitd.model.training.distributed.ranks import Ranks
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.step.forward import training_placement


@dataclass(frozen=True)
class Share:
    """The part of a run that one process computes, and its device."""

    ranks: Ranks
    placement: Placement
    batch: RankBatch

    @classmethod
    def of(cls, training: ResolvedTraining, ranks: Ranks) -> "Share":
        """Raises DeviceError, and DataError if the processes cannot share a step evenly."""
        config, recipe = training.config, training.recipe
        threads = ranks.threads(config.threads)
        placement = training_placement(str(ranks.device(config.device)), recipe.dtype, threads)
        batch = rank_batch(recipe.batch_size, recipe.accumulate, rank=ranks.rank, size=ranks.size)
        return cls(ranks, placement, batch)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that trains, evaluates and saves reads this alone."""

    training: ResolvedTraining
    share: Share
    directory: RunDirectory
    text: PreparedText
    chat_template: str | None
    sharded: bool = False  # this process has a part of the model instead of a copy

    def wants_sharding(self) -> bool:
        """Whether this process would divide the model among all."""
        ranks, option = self.share.ranks, self.training.config.shard
        if ranks.size == 1 or option == "off":
            return False
        adapted = self.training.lora is not None
        return option == "on" or worth_sharding(
            self.training.model, self.share.placement.device, ranks, adapted=adapted
        )
