"""Report: the result of a recognition, as lines for a person.

Roles with their names and shapes in the file, each number with its origin, the changes of weights,
and a table if variants were compared.
"""

from collections.abc import Iterator

from logitd.model.convert.by_role.questions import UNUSED
from logitd.model.convert.by_role.resolve import Alternative, Resolution
from logitd.model.convert.by_role.tensor_map import IDENTITY, MappedTensors
from logitd.model.transformer.config import GPTConfig


def understood(
    tensors: MappedTensors, config: GPTConfig, resolution: Resolution, folds: tuple[str, ...]
) -> Iterator[str]:
    """Everything that was understood, line by line."""
    yield "tensors:"
    yield from _tensor_lines(tensors)
    yield "computation:"
    yield from _number_lines(tensors, config, resolution)
    if folds:
        yield "changes of weights:"
        yield from (f"  {fold}" for fold in folds)
    if resolution.alternatives:
        yield from table(resolution)
    yield f"verified: {resolution.verified}"


def _tensor_lines(tensors: MappedTensors) -> Iterator[str]:
    mapped = tensors.map
    for (role, part), name in mapped.names.items():
        if name == IDENTITY:
            yield f"  {role:<16} none: the identity"
            continue
        shape = list(tensors.tensors[mapped.of(role, part)[0]].shape)
        label = role if part == "weight" else f"{role} {part}"
        yield f"  {label:<20} {name}  {shape}"
    if mapped.ignored:
        first = mapped.ignored[0]
        more = f" and {len(mapped.ignored) - 1} more" if len(mapped.ignored) > 1 else ""
        yield f"  {'not weights':<20} {first}{more}"


def _number_lines(
    tensors: MappedTensors, config: GPTConfig, resolution: Resolution
) -> Iterator[str]:
    head = "the head differs from the embedding"
    if config.tied_head:
        head = "the head is the embedding, or there is none"
    rows = tensors.shape("token_embedding")[0]
    yield _line("vocabulary", rows, "rows of the token embedding")
    yield _line("n_layer", config.n_layer, "running numbers in the names")
    yield _line("d_model", config.d_model, "columns of the token embedding")
    yield _line("n_kv_head", config.n_kv_head, "rows of the key")
    yield _line("head_dim", config.head_dim, "rows of the query, divided by n_head")
    yield _line("d_ff", config.d_ff, "columns of the feed-forward's second matrix")
    yield _line("tied_head", str(config.tied_head), head)
    how = resolution.computation
    hidden = set() if how.positions == "rotary" else {"rotary_layout", "rope_theta"}
    hidden |= {"qk_norm_eps"} if how.qk_norm == "none" else set()
    for name, origin in resolution.origins.items():
        if name not in hidden and origin != UNUSED:
            yield _line(name, getattr(how, name), origin)


def _line(name: str, value: object, origin: str) -> str:
    return f"  {name:<18} {_shown(value):<14} {origin}"


def table(resolution: Resolution) -> Iterator[str]:
    """The other values that were tried: a line for each field, the value taken first."""
    yield f"compared (lower is better; taken: {resolution.penalty:.4g}):"
    by_field: dict[str, list[Alternative]] = {}
    for alternative in resolution.alternatives:
        by_field.setdefault(alternative.field, []).append(alternative)
    for name, others in by_field.items():
        tried = ", ".join(
            f"{_shown(other.value)} {other.penalty:.4g}{'' if other.clear else ' (not told apart)'}"
            for other in sorted(others, key=lambda other: other.penalty)[:6]
        )
        yield _line(name, getattr(resolution.computation, name), f"against {tried}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
