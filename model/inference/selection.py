"""Selection: what the indices, names and patterns of a request choose of a prompt and a model.

Negative indices count from the end, `*` stands for all layers. What is not there is refused with an
`InvalidRequest` that says what is. Not here: whether the model can compute what was chosen
(`model/inference/engine/validation.py`).
"""

from collections.abc import Sequence

from logitd.model.inference.errors import InvalidRequest
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import Stage, UnknownStage, match_stages


def resolve_indices(
    param: str, indices: Sequence[int] | None, count: int, what: str
) -> tuple[int, ...]:
    """Indices into `count` things, negative ones counted from the end; None: all of them. `what`
    says how many there are, for the message. Raises InvalidRequest unless they are at least one,
    within the range, ascending and distinct."""
    if indices is None:
        return tuple(range(count))
    for index in indices:
        if not -count <= index < count:
            raise InvalidRequest(
                f"{param} has {index}; {what} (0 to {count - 1}, or -{count} to -1 from the end)",
                param,
            )
    resolved = tuple(index % count for index in indices)
    if not resolved or list(resolved) != sorted(set(resolved)):
        raise InvalidRequest(
            f"{param} {list(resolved[:20])} must be ascending, distinct and at least one", param
        )
    return resolved


def resolve_stages(patterns: Sequence[str], config: GPTConfig) -> tuple[Stage, ...]:
    """The stages that names and patterns choose, in the order in which they are computed. Raises
    InvalidRequest for a pattern that chooses none."""
    if not patterns:
        raise InvalidRequest("stages is empty; name at least one, GET /stages lists them", "stages")
    try:
        return match_stages(patterns, config)
    except UnknownStage as error:
        raise InvalidRequest(str(error), "stages") from error


def resolve_heads(
    heads: Sequence[int], stages: Sequence[Stage], config: GPTConfig
) -> tuple[int, ...]:
    """Indices from 0 of heads that each of the stages has, if it has any; negative ones count from
    the end. Raises InvalidRequest."""
    with_heads = [stage for stage in stages if stage.heads_axis]
    if not with_heads:
        names = [stage.name for stage in stages]
        raise InvalidRequest(f"heads are given, and {_named(names)} has none", "heads")
    resolved = []
    for stage in with_heads:
        assert stage.heads_axis is not None
        count = getattr(config, stage.heads_axis)
        resolved.append(resolve_indices("heads", heads, count, f"{stage.name} has {count} heads"))
    if len(set(resolved)) > 1:
        raise InvalidRequest(
            f"heads count from the end, and {_named([stage.name for stage in with_heads])} have "
            "not the same count of them; ask for them one by one, or count from 0",
            "heads",
        )
    return resolved[0]


def _named(names: Sequence[str]) -> str:
    """Names as a sentence has them, so many that it stays readable."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} others"
