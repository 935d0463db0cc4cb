"""Schedule: what changes in the course of a run: the learning rates, as shares of their peaks, and
the length of the windows.
"""

import math
from dataclasses import dataclass

from logitd.model.training.configuration.presets import Recipe

HEAD_STEPS = 150
"""Time constant, in steps, with which the head's learning rate falls to half."""

SHORTER = 4
"""Ratio of the context length to the length of short windows."""
SHORTEST = 128
"""Length of the shortest short windows, in positions."""


@dataclass(frozen=True, kw_only=True)
class Rewarming:
    """A gradual change from an old learning rate to the schedule, in a run that was extended, or
    that fine-tunes a checkpoint until the clock ends it.

    done   share of the run at which the change begins
    scale  learning rate at that point, as a share of the peak
    span   share of the run over which the change takes place
    """

    done: float
    scale: float
    span: float


def lr_scale(recipe: Recipe, step: int, done: float, rewarming: Rewarming | None = None) -> float:
    """The learning rate of a step as a share of its peak. `done` is the completed share of the
    run."""
    scale = _scheduled(recipe, step, done)
    if rewarming is None:
        return scale
    share = min(1.0, max(0.0, done - rewarming.done) / rewarming.span)
    return rewarming.scale + (scale - rewarming.scale) * share


def head_scale(recipe: Recipe, step: int) -> float:
    """An additional factor of the head's learning rate. With Muon it falls from 1 to a half: a low
    rate is better in the end, but runs of some sixty steps need the full rate to learn which tokens
    are frequent."""
    return (1 + math.exp(-step / HEAD_STEPS)) / 2 if recipe.optimizer == "muon" else 1.0


def window_length(
    recipe: Recipe, context_length: int, done: float, rewarming: Rewarming | None = None
) -> int:
    """Number of positions in each window of a step.

    Short windows come first. A batch of them has as many tokens from more places in the text, which
    helps most in the beginning, and their attention takes less time. Few steps with long windows
    are enough to learn what a long context adds. A run that was extended after its learning rate
    had begun to fall keeps long windows.
    """
    if done >= recipe.short_windows or rewarming is not None:
        return context_length
    return min(context_length, max(SHORTEST, context_length // SHORTER))


def _scheduled(recipe: Recipe, step: int, done: float) -> float:
    rise = min(1.0, (step + 1) / recipe.warmup) if recipe.warmup else 1.0
    fall = 0.0
    match recipe.decay:
        case "linear":
            fall = min(1.0, max(0.0, done - (1 - recipe.cooldown)) / max(recipe.cooldown, 1e-9))
        case "cosine":
            fall = (1 - math.cos(math.pi * min(done, 1.0))) / 2
        case "constant":
            pass
    return rise * (1 - fall * (1 - recipe.final_lr))
