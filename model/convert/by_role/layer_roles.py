"""Roles in a layer: query, key and value, attention's output, the feed-forward and the norms.

Covers projections that are fused, apart or for each head, feed-forwards of one, two or three
matrices, and one or two norms. Does not say which way round a matrix lies: see `orientation.py`.
"""

import re
from collections.abc import Callable, Sequence

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.modules import Module, projection_of
from logitd.model.convert.by_role.tensor_map import IDENTITY, Part, Role
from logitd.model.convert.foreign import ConvertError

_Give = Callable[[Role, Module], None]
"""Notes the role of a module."""


def layer_roles(where: str, modules: Sequence[Module], width: int) -> dict[tuple[Role, Part], str]:
    """Names by role of the tensors in a layer. Raises ConvertError where attention or the
    feed-forward is incomplete; what has no role in a GPT is left out."""
    names: dict[tuple[Role, Part], str] = {}

    def give(role: Role, module: Module) -> None:
        names[role, "weight"] = module.weight
        if module.bias is not None:
            names[role, "bias"] = module.bias

    # 1) Norms of query and key, then the projections themselves.
    rest, home = list(modules), _home_of_attention(modules)
    for pattern, role in ((words.QUERY_NORM, "query_norm"), (words.KEY_NORM, "key_norm")):
        for module in [m for m in rest if len(m.shape) == 1 and m.named(pattern)][:1]:
            give(role, module)  # type: ignore[arg-type]
            rest.remove(module)
    for module in [m for m in rest if len(m.shape) in (2, 3)]:
        projection = projection_of(module.weight)
        if projection is not None and (projection, "weight") not in names:
            give(projection, module)
            rest.remove(module)
    if ("qkv", "weight") not in names and any(
        (role, "weight") not in names for role in ("query", "key", "value")
    ):
        raise ConvertError(
            f"{where}: a layer has no query, key and value; its tensors are "
            f"{', '.join(f'{m.weight} {list(m.shape)}' for m in modules)}. Name them with --map"
        )
    # 2) Attention's output and the feed-forward share what is left of the matrices.
    matrices = [m for m in rest if len(m.shape) >= 2 and width in m.shape]
    out, feed_forward = _split_matrices(matrices, home)
    if out is None:
        names["attention_out", "weight"] = IDENTITY
    else:
        give("attention_out", out)
    _feed_forward_roles(where, feed_forward, give, names)
    # 3) The two norms.
    _norm_roles([m for m in rest if m.shape == (width,)], home, give)
    return names


def _home_of_attention(modules: Sequence[Module]) -> tuple[str, ...]:
    """The path that query, key and value share and that other matrices do not all have: the module
    of attention, whatever it is called. Empty where there is none."""
    projections = [m for m in modules if projection_of(m.weight) is not None]
    others = [m for m in modules if len(m.shape) >= 2 and m not in projections]
    paths = [m.path[: m.path.index("{M}")] if "{M}" in m.path else m.path[:-1] for m in projections]
    shared: tuple[str, ...] = ()
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared = (*shared, parts[0])
    apart = any(m.path[: len(shared)] != shared for m in others)
    return shared if apart else ()


def _is_in(module: Module, home: tuple[str, ...]) -> bool:
    return bool(home) and module.path[: len(home)] == home


def _split_matrices(
    matrices: Sequence[Module], home: tuple[str, ...]
) -> tuple[Module | None, list[Module]]:
    """Attention's output, if there is one, and the matrices of the feed-forward."""
    in_attention = [
        m for m in matrices
        if m.within(words.ATTENTION) or m.within(words.HEADS) or _is_in(m, home)
    ]  # fmt: skip
    in_attention = [m for m in in_attention if not m.within(words.FEED_FORWARD)]
    if not in_attention:
        loose = [m for m in matrices if not m.within(words.FEED_FORWARD)]
        named = [m for m in loose if m.named(words.ATTENTION_OUT)]
        if len(matrices) > 2 or not any(m.within(words.FEED_FORWARD) for m in matrices):
            in_attention = named[:1] if len(matrices) > 2 else []
    out = in_attention[0] if in_attention else None
    return out, [m for m in matrices if m is not out and m not in in_attention[1:]]


def _feed_forward_roles(
    where: str, matrices: Sequence[Module], give: _Give, names: dict[tuple[Role, Part], str]
) -> None:
    if len(matrices) == 1:
        give("mlp_up", matrices[0])
        names["mlp_down", "weight"] = IDENTITY
        return
    if len(matrices) == 2:
        up, down = _up_and_down(matrices)
        if up.shape == down.shape[::-1]:
            give("mlp_up", up)
            give("mlp_down", down)
            return
        rows, columns = down.shape[0], down.shape[-1]
        if up.shape in ((2 * columns, rows), (columns, 2 * rows)):  # either way round
            give("mlp_gate_up", up)
            give("mlp_down", down)
            return
    if len(matrices) == 3:
        gate, up, down = _gate_up_down(matrices)
        if gate.shape == up.shape == down.shape[::-1]:
            give("mlp_gate", gate)
            give("mlp_up", up)
            give("mlp_down", down)
            return
    raise ConvertError(
        f"{where}: the matrices of a layer besides attention's are "
        f"{', '.join(f'{m.weight} {list(m.shape)}' for m in matrices) or 'none'}; expected up and "
        "down of a feed-forward, with a gate or without. Name them with --map"
    )


def _up_and_down(matrices: Sequence[Module]) -> tuple[Module, Module]:
    """By name where both say it, by their numbers in a Sequential, else as the file has them: up
    comes first."""
    first, second = matrices
    if first.last.isdigit() and second.last.isdigit():
        first, second = sorted(matrices, key=lambda module: int(module.last))
    elif second.named(words.MLP_UP) and first.named(words.MLP_DOWN):
        first, second = second, first
    return first, second


def _gate_up_down(matrices: Sequence[Module]) -> tuple[Module, Module, Module]:
    """Gate, up and down. Names say it, or llama2.c's numbers: w1 is the gate, w3 is up."""
    numbers = {re.sub(r"\D", "", m.last): m for m in matrices if re.search(r"\d$", m.last)}
    shapes = [m.shape for m in matrices]
    odd = [m for m in matrices if shapes.count(m.shape) == 1]
    down = next((m for m in matrices if m.named(words.GATED_DOWN)), odd[0] if odd else None)
    if set(numbers) == {"1", "2", "3"}:
        down = odd[0] if odd else numbers["2"]
        others = [numbers[key] for key in "123" if numbers[key] is not down]
        return others[0], others[1], down
    if down is None:
        down = matrices[-1]
    first, second = (m for m in matrices if m is not down)
    if second.named(words.GATE) or (first.named(words.GATED_UP) and not first.named(words.GATE)):
        first, second = second, first
    return first, second, down


def _norm_roles(norms: Sequence[Module], home: tuple[str, ...], give: _Give) -> None:
    """The norm of attention and that of the feed-forward; a single one serves both."""
    if len(norms) == 1:
        give("attention_norm", norms[0])
        give("mlp_norm", norms[0])
        return
    if len(norms) != 2:
        return  # none, or more than a block has here: the leftover ones are named
    first, second = norms
    in_attention = [_is_in(norm, home) for norm in norms]
    if any(in_attention) and not all(in_attention):
        swap = in_attention[1]
    else:
        swap = _is_second(first) and not _is_second(second)
    if swap:
        first, second = second, first
    give("attention_norm", first)
    give("mlp_norm", second)


def _is_second(norm: Module) -> bool:
    """Whether a norm is the feed-forward's, by its name or the module that it is in."""
    if norm.named(words.SECOND_NORM):
        return True
    if norm.named(words.FIRST_NORM):
        return False
    return norm.within(words.FEED_FORWARD) and not norm.within(words.ATTENTION)
