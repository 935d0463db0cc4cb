"""RunDescription: what run.json holds of a run.

What was asked for, and what that was resolved to. With the tokenised text beside it, this is all
that another process needs to join the run and a later one needs to resume it. Knows no files
(`model/training/run/directory.py`), and decides nothing (`model/training/setup/resolve.py`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.presets import Recipe
from logitd.model.transformer.config import GPTConfig


@dataclass(frozen=True)
class RunDescription:
    """The contents of run.json."""

    config: TrainingConfig  # what was asked for, by all commands that this run was given to
    recipe: Recipe
    model: GPTConfig
    base: Mapping[str, Any] | None = None  # `Base.to_dict` of the checkpoint it began with

    def to_dict(self) -> dict[str, Any]:
        document = {
            "config": self.config.to_dict(),
            "recipe": asdict(self.recipe),
            "model": self.model.to_dict(),
        }
        return document if self.base is None else {**document, "base": dict(self.base)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "RunDescription":
        """What `to_dict` returned. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            config=TrainingConfig(**document["config"]),
            recipe=Recipe(**document["recipe"]),
            model=GPTConfig.from_dict(document["model"]),
            base=document.get("base"),
        )
