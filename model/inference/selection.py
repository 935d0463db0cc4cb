"""Selection: the positions, layers, heads and stages that a request's indices and patterns choose.

Negative indices count from the end, `*` means all layers. An `InvalidRequest` says what there
is instead of the missing thing. Not here: whether the model can compute the choice
(`model/inference/engine/validation.py`).
"""

from collections.abc import Sequence

from logitd.model.inference.errors import InvalidRequest
from logitd.model.plural import pluralize
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import Stage, UnknownStage, match_stages


def resolve_indices(
    param: str,
    indices: Sequence[int] | None,
    count: int,
    what: str,
    *,
    from_end: bool = True,
) -> tuple[int, ...]:
    """Indices into `count` things; None: all of them. With `from_end`, negative indices count from
    the end. `what` says in a message how many things there are. Raises InvalidRequest unless there
    is at least one index and all are in range, ascending and distinct."""
    if indices is None:
        return tuple(range(count))
    for index in indices:
        if not (-count if from_end else 0) <= index < count:
            more = f", or -{count} to -1 from the end" if from_end else ""
            raise InvalidRequest(f"{param} has {index}; {what} (0 to {count - 1}{more})", param)
    resolved = tuple(index % count for index in indices)
    if not resolved or list(resolved) != sorted(set(resolved)):
        raise InvalidRequest(
            f"{param} {list(resolved[:20])} must be ascending, distinct and at least one", param
        )
    return resolved


def resolve_stages(patterns: Sequence[str], config: GPTConfig) -> tuple[Stage, ...]:
    """The stages that names and patterns choose, in the order of computation. Raises InvalidRequest
    for a pattern that matches none."""
    if not patterns:
        raise InvalidRequest("stages is empty; name at least one, GET /stages lists them", "stages")
    try:
        return match_stages(patterns, config)
    except UnknownStage as error:
        raise InvalidRequest(str(error), "stages") from error


def resolve_heads(
    heads: Sequence[int], stages: Sequence[Stage], config: GPTConfig
) -> tuple[int, ...]:
    """Head indices from 0 that every stage with heads has; negative ones count from the end. Raises
    InvalidRequest."""
    resolved: dict[tuple[int, ...], None] = {}
    for stage in stages:
        if stage.heads_axis is not None:
            count = getattr(config, stage.heads_axis)
            what = f"{stage.name} has {pluralize(count, 'head')}"
            resolved[resolve_indices("heads", heads, count, what)] = None
    if not resolved:
        raise InvalidRequest(f"{_names(stages)} has no heads: remove heads", "heads")
    if len(resolved) > 1:
        with_heads = [stage for stage in stages if stage.heads_axis]
        raise InvalidRequest(
            f"heads count from the end, and {_names(with_heads)} have different numbers of heads: "
            "ask for them one by one, or count from 0",
            "heads",
        )
    return next(iter(resolved))


def _names(stages: Sequence[Stage]) -> str:
    shown = ", ".join(stage.name for stage in stages[:4])
    return shown if len(stages) <= 4 else f"{shown} and {len(stages) - 4} others"
