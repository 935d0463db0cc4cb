"""Selection: resolves a request's indices and patterns to positions, layers, heads and stages.

Negative indices count from the end, and `*` means all layers. The messages of `InvalidRequest` list
the valid choices. `model/inference/engine/validation.py` checks whether the model can compute the
result.
"""

import itertools
import operator
from collections.abc import Sequence

from logitd.model.inference.errors import InvalidRequest
from logitd.model.owner_code.config import CodeConfig
from logitd.model.plural import pluralize
from logitd.model.transformer.config import GPTConfig, ModelConfig
from logitd.model.transformer.stages import Stage, UnknownStage, match_stages


def resolve_indices(
    param: str, indices: Sequence[int] | None, count: int, what: str
) -> tuple[int, ...]:
    """Resolve indices into a list of `count` items; None: all of them. Negative indices count from
    the end. `what` is the part of an error message that states the number of items. Raises
    InvalidRequest unless there is at least one index and all are in range, ascending and
    distinct."""
    if indices is None:
        return tuple(range(count))
    if indices and indices[0] >= 0 and indices[-1] < count and _ascends(indices):  # much faster
        return tuple(indices)
    for index in indices:
        if not -count <= index < count:
            raise InvalidRequest(
                f"{param} has {index}, but {what} (0 to {count - 1}, or -{count} to -1 from the "
                "end)",
                param,
            )
    resolved = tuple(index % count for index in indices)
    if not resolved or list(resolved) != sorted(set(resolved)):
        counted = f" (from the start: {list(resolved[:20])})" if min(indices, default=0) < 0 else ""
        raise InvalidRequest(
            f"{param} is {list(indices[:20])}{counted}; it needs at least one index, and indices "
            "must be ascending and distinct",
            param,
        )
    return resolved


def _ascends(indices: Sequence[int]) -> bool:
    return all(map(operator.lt, indices, itertools.islice(indices, 1, None)))


def gpt_only(config: ModelConfig, what: str) -> GPTConfig:
    """The configuration of a GPT. Raises InvalidRequest for a model computed by its owner's code,
    which cannot return `what`."""
    if isinstance(config, CodeConfig):
        raise InvalidRequest(
            f"this model is computed by its owner's code ({config.code}), which cannot return "
            f"{what}: use /activations, whose stages are the outputs of its submodules"
        )
    return config


def lens_layers(config: ModelConfig) -> int:
    """Number of streams that a lens can read. Raises InvalidRequest if the owner's code computes
    the model, and its final norm and head were not named when the code was imported."""
    if isinstance(config, CodeConfig) and config.lens is None:
        raise InvalidRequest(
            f"this model is computed by its owner's code ({config.code}), and its final norm and "
            "head are not known: import it with --lens-norm and --lens-head"
        )
    return config.n_layer + 1


def resolve_stages(
    patterns: Sequence[str], config: ModelConfig, param: str = "stages"
) -> tuple[Stage, ...]:
    """The stages that match names and patterns, in the order of computation. Raises InvalidRequest
    if a name or pattern, which are from the field `param`, matches no stage."""
    if not patterns:
        raise InvalidRequest(
            "stages is empty: name at least one of the stages that GET /stages lists", "stages"
        )
    try:
        return match_stages(patterns, config)
    except UnknownStage as error:
        raise InvalidRequest(str(error), param) from error


def resolve_heads(
    heads: Sequence[int], stages: Sequence[Stage], config: ModelConfig
) -> tuple[int, ...]:
    """Resolve head indices for all stages that have heads; negative ones count from the end. Raises
    InvalidRequest if a head does not exist, or if an index means different heads in different
    stages."""
    resolved: dict[tuple[int, ...], None] = {}
    for stage in stages:
        if stage.heads_axis is not None:
            count = getattr(config, stage.heads_axis)
            what = f"{stage.name} has {pluralize(count, 'head')}"
            resolved[resolve_indices("heads", heads, count, what)] = None
    if not resolved:
        have = "has" if len(stages) == 1 else "have"
        raise InvalidRequest(f"{_names(stages)} {have} no heads: remove heads", "heads")
    if len(resolved) > 1:
        with_heads = [stage for stage in stages if stage.heads_axis]
        raise InvalidRequest(
            f"negative heads count from the end, and {_names(with_heads)} have different numbers "
            "of heads: request them separately, or count from 0",
            "heads",
        )
    return next(iter(resolved))


def _names(stages: Sequence[Stage]) -> str:
    shown = ", ".join(stage.name for stage in stages[:4])
    return shown if len(stages) <= 4 else f"{shown} and {len(stages) - 4} others"
