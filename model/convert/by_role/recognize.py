"""Recognize: finds the role of each tensor by the words in its name and by its shape.

1) Ignore tensors that are not weights: causal masks, rotary tables, integers.
2) Find the layers (`layers.py`): names that differ only in a number.
3) Assign roles outside the layers, then inside a layer: projections (fused, separate or per head),
   a feed-forward of one, two or three matrices, and one or two norms. A vector in a layer is a
   norm only if its name, a bias or its place in a Sequential shows it.
4) Determine the orientation of each matrix: (in, out) or (out, in).

If a name and a shape disagree, the shape decides. A tensor that is not recognized gets no role, and
`tensor_map.check` reports it. `questions.py` finds the details that names do not show.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.layers import (
    Module,
    Shape,
    find_layers,
    module_name,
    modules_of,
    outer_modules,
    projection_of,
)
from logitd.model.convert.by_role.rotary_table import is_rotary, last_part
from logitd.model.convert.by_role.tensor_map import (
    IDENTITY,
    LAYER_ROLES,
    OUTER_ROLES,
    QKV,
    SEPARATE,
    Part,
    Role,
    TensorMap,
)
from logitd.model.convert.foreign import ConvertError

Names = dict[tuple[Role, Part], str]
"""Names of tensors by role."""

READS_STREAM: tuple[Role, ...] = (*QKV, "mlp_gate", "mlp_up", "mlp_gate_up", "head")
"""Matrices that read the residual stream: their number of columns is the width of the stream. For
all other matrices, the number of rows is the width of the stream."""
SQUARE: tuple[Role, ...] = (*READS_STREAM[:-1], "attention_out", "mlp_down")
"""Matrices that may be square: all matrices of a layer, but not the head. The shape of a square
matrix does not show whether it is stored (in, out)."""
INTEGERS = (torch.int64, torch.int32)
LARGEST_FILL = -1e4
"""A tensor with one number of at most this fills the masked scores, as in GPT-2's `masked_bias`."""


class NotRecognized(ConvertError):
    """Raised if no tensor is found for one of the roles that a GPT needs. `known` has the roles
    that were found."""

    def __init__(self, message: str, known: Mapping[tuple[Role, Part], str]) -> None:
        super().__init__(message)
        self.known = known


def recognize(where: str, tensors: Mapping[str, Tensor]) -> TensorMap:
    """Find the roles of a state dict's tensors. Raises NotRecognized if a part of a GPT is
    missing."""
    ignored = tuple(name for name, tensor in tensors.items() if is_buffer(name, tensor))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in ignored}
    names: Names = {}
    try:
        layers = find_layers(where, shapes)
        width = _outer_roles(where, outer_modules(layers), layers.matrices, names)
        _layer_roles(where, modules_of(layers.inside), width, names)
    except ConvertError as error:
        raise NotRecognized(str(error), _in_order(names)) from error
    mapped = TensorMap(
        n_layer=layers.count,
        first_layer=layers.first,
        n_head=layers.heads,
        names=_in_order(names),
        ignored=ignored,
    )
    return _oriented(mapped, tensors, width)


def _in_order(names: Names) -> Names:
    order = (*OUTER_ROLES[:2], *LAYER_ROLES, *OUTER_ROLES[2:])
    return dict(
        sorted(names.items(), key=lambda item: (order.index(item[0][0]), item[0][1] == "bias"))
    )


def is_buffer(name: str, tensor: Tensor) -> bool:
    """True if a tensor is not a weight: a causal mask or the number that fills one, integers such
    as the numbers of positions, a cache, or a rotary table."""
    if is_causal_mask(tensor) or is_rotary(name, tensor):
        return True
    last = last_part(name)
    if tensor.dtype in INTEGERS:
        square = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] > 1
        return not square and not words.matches(words.ROTARY, last)
    if not tensor.is_floating_point():
        return tensor.dim() == 0 and not tensor.is_complex()
    fills_mask = tensor.numel() == 1 and float(tensor) <= LARGEST_FILL
    return fills_mask or words.matches(words.CACHES, last)


def is_causal_mask(tensor: Tensor) -> bool:
    """True if each row of a tensor (..., T, T) has one value up to the diagonal and another value
    after it."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2:
        return False
    squares = tensor.reshape(-1, *tensor.shape[-2:])
    low, high = squares[0, 0, 0], squares[0, 0, -1]
    lower = torch.ones_like(squares[0], dtype=torch.bool).tril()
    return bool(
        low != high and (squares[:, lower] == low).all() and (squares[:, ~lower] == high).all()
    )


def _give(names: Names, role: Role, module: Module) -> None:
    names[role, "weight"] = module.weight
    if module.bias is not None:
        names[role, "bias"] = module.bias


def _listed(modules: Iterable[Module]) -> str:
    return ", ".join(f"{m.weight} {list(m.shape)}" for m in modules)


def _outer_roles(
    where: str, modules: Sequence[Module], matrices: Sequence[Shape], names: Names
) -> int:
    """Add the tensors outside the layers (embedding, positions, final norm and head) to `names`.
    Returns the width of the residual stream. `matrices` are the shapes of the matrices in a layer.
    Raises ConvertError if there is no token embedding."""
    sides = {side for shape in matrices for side in shape}
    wide = [m for m in modules if len(m.table) == 2 and sides & set(m.table)]
    positions = [m for m in wide if m.mentions(words.POSITIONS)]
    tables = [m for m in wide if m not in positions]
    embedding = _choose_embedding(tables)
    if embedding is None:
        raise ConvertError(
            f"{where} has no token embedding: it must be a matrix (vocabulary, width) outside the "
            "layers, with the width of the layers' matrices; found "
            f"{_listed(modules) or 'no tensors'} outside the layers. Name the token embedding with "
            "--map"
        )
    rows, width = embedding.table
    names["token_embedding", "weight"] = embedding.weight
    head = _choose_head(tables, embedding)
    if not positions:  # use a table whose name does not show its role
        positions = [m for m in tables if m is not head and m.shape != embedding.shape]
    if added := [m for m in positions if m.table[-1] == width]:
        names["positions", "weight"] = added[0].weight
    if head is not None:
        _give(names, "head", head)
    if (norm := _choose_final_norm(modules, width)) is not None:
        _give(names, "final_norm", norm)
    biases = [
        m for m in modules if m.shape == (rows,) and rows != width and m.names_part(words.BIAS_WORD)
    ]
    if biases and ("head", "bias") not in names:  # stored as a separate parameter
        names["head", "bias"] = biases[0].weight
    return width


def _choose_embedding(tables: Sequence[Module]) -> Module | None:
    """The token embedding. A table named like an embedding is preferred, then a table with the
    shape of a head, then any other table that is not named like a head."""
    heads = [m for m in tables if m.mentions(words.HEAD) or m.names_part(words.OUTPUT_WORD)]

    def rank(table: Module) -> int:
        if table in heads:  # `vocab_emb` is a name of both
            named = table.named(words.TOKEN_EMBEDDING) and table.named(words.HEAD)
            return 1 if named else 4
        if table.mentions(words.TOKEN_EMBEDDING):
            return 0
        return 2 if any(table.shape == head.shape for head in heads) else 3

    candidates = [m for m in tables if m not in heads or m.mentions(words.TOKEN_EMBEDDING)]
    return min(candidates, key=rank, default=None)


def _choose_head(tables: Sequence[Module], embedding: Module) -> Module | None:
    """The head: a table with the embedding's shape or the transposed shape that is named like a
    head or has a bias. Any other table may be a second embedding, such as one of bigrams."""
    sides = sorted(embedding.table)
    alike = [
        m
        for m in tables
        if m is not embedding and sorted(m.shape) == sides
        if m.bias is not None or m.names_part(words.OUTPUT_WORD) or m.mentions(words.HEAD)
    ]
    return min(alike, key=lambda m: not m.mentions(words.HEAD), default=None)


def _choose_final_norm(modules: Sequence[Module], width: int) -> Module | None:
    """The final norm: the only vector with the width of the stream that is named like a final norm
    or, if none is, the only vector with this width. None if there is not exactly one."""
    vectors = [
        m
        for m in modules
        if m.shape == (width,) and not m.scales
        if m.names_part(words.OUTPUT_WORD) or not m.names_part(words.INPUT_WORD)
    ]
    norms = [m for m in vectors if m.named(words.FINAL_NORM)] or vectors
    return norms[0] if len(norms) == 1 else None


def _layer_roles(where: str, modules: Sequence[Module], width: int, names: Names) -> None:
    """Add the tensors of a layer to `names`. Raises ConvertError if attention or the feed-forward
    is incomplete."""
    rest, home = list(modules), _home_of_attention(modules)
    norms: dict[Role, re.Pattern[str]] = {
        "query_norm": words.QUERY_NORM,
        "key_norm": words.KEY_NORM,
    }
    for norm_role, pattern in norms.items():
        for module in [m for m in rest if len(m.shape) == 1 and m.named(pattern)][:1]:
            _give(names, norm_role, module)
            rest.remove(module)
    for module in [m for m in rest if len(m.shape) in (2, 3)]:
        role = projection_of(module.weight)
        if role is not None and (role, "weight") not in names:
            _give(names, role, module)
            rest.remove(module)
    missing = [role for role in SEPARATE if (role, "weight") not in names]
    if ("qkv", "weight") not in names and missing:
        raise ConvertError(
            f"{where}: a layer lacks {', '.join(missing)}; its tensors without a role are "
            f"{_listed(rest)}. Give them roles with --map"
        )
    # The remaining matrices are attention's output and the feed-forward.
    matrices = [m for m in rest if len(m.shape) in (2, 3) and width in m.shape]
    out, feed_forward = _split_matrices(matrices, home)
    if out is None:
        names["attention_out", "weight"] = IDENTITY
    else:
        _give(names, "attention_out", out)
    _feed_forward_roles(where, feed_forward, names)
    vectors = [m for m in rest if m.shape == (width,) and not m.scales]
    _norm_roles([m for m in vectors if _is_norm(m, modules)], home, names)


def _home_of_attention(modules: Sequence[Module]) -> tuple[str, ...]:
    """The path of the attention module, which may have any name: the common prefix of the paths of
    query, key and value. Empty if the paths of all other matrices have this prefix, too."""
    projections = [m for m in modules if projection_of(m.weight) is not None]
    others = [m for m in modules if len(m.shape) >= 2 and m not in projections]
    paths = [m.path[: m.path.index("{M}")] if "{M}" in m.path else m.path[:-1] for m in projections]
    shared: tuple[str, ...] = ()
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared = (*shared, parts[0])
    return shared if any(m.path[: len(shared)] != shared for m in others) else ()


def _is_in(module: Module, home: tuple[str, ...]) -> bool:
    return bool(home) and module.path[: len(home)] == home


def _split_matrices(
    matrices: Sequence[Module], home: tuple[str, ...]
) -> tuple[Module | None, list[Module]]:
    """Attention's output matrix (None if there is none) and the matrices of the feed-forward."""
    loose = [m for m in matrices if not m.within(words.FEED_FORWARD)]
    inside = [
        m for m in loose if m.within(words.ATTENTION) or m.within(words.HEADS) or _is_in(m, home)
    ]
    if not inside and len(matrices) > 2:
        inside = [m for m in loose if m.named(words.ATTENTION_OUT)][:1]
    return next(iter(inside), None), [m for m in matrices if m not in inside]


def _feed_forward_roles(where: str, matrices: Sequence[Module], names: Names) -> None:
    if len(matrices) == 1:
        _give(names, "mlp_up", matrices[0])
        names["mlp_down", "weight"] = IDENTITY
        return
    if len(matrices) == 2:
        up, down = _up_and_down(matrices)
        rows, columns = down.shape[0], down.shape[-1]
        fused = up.shape in ((2 * columns, rows), (columns, 2 * rows))  # (out, in) or (in, out)
        plain = up.shape == down.shape[::-1]
        if rows == columns and not _names_up_or_down(up.weight, down.weight):
            plain = fused = False  # nothing shows which is up
        if plain or fused:
            _give(names, "mlp_up" if plain else "mlp_gate_up", up)
            _give(names, "mlp_down", down)
            return
    if len(matrices) == 3:
        gate, up, down = _gate_up_down(matrices)
        known = down.shape[0] != down.shape[-1] or down.named(words.GATED_DOWN)
        if known and gate.shape == up.shape == down.shape[::-1]:
            _give(names, "mlp_gate", gate)
            _give(names, "mlp_up", up)
            _give(names, "mlp_down", down)
            return
    raise ConvertError(
        f"{where}: besides attention, a layer must have the up and down matrices of a "
        f"feed-forward, and optionally a gate; found {_listed(matrices) or 'no matrices'}. Name "
        "the matrices with --map"
    )


def _up_and_down(matrices: Sequence[Module]) -> Sequence[Module]:
    """The two matrices of an MLP, up first. They are ordered by their numbers if they are in a
    Sequential, otherwise by their names. If the names do not help, the order in the file is
    kept."""
    first, second = matrices
    if first.last.isdigit() and second.last.isdigit():
        return sorted(matrices, key=lambda module: int(module.last))
    swap = second.named(words.MLP_UP) and first.named(words.MLP_DOWN)
    return (second, first) if swap else matrices


def _names_up_or_down(up: str, down: str) -> bool:
    """True if the name of one of these tensors, or their numbers, show which is up."""
    first, second = (
        next((part for part in reversed(module_name(name)) if part != "{N}"), "")
        for name in (up, down)
    )
    if first.isdigit() and second.isdigit():
        return True
    return words.matches(words.MLP_UP, first) or words.matches(words.MLP_DOWN, second)


def _gate_up_down(matrices: Sequence[Module]) -> tuple[Module, Module, Module]:
    """The gate, up and down matrices of a gated MLP, recognized by their names, by their
    shapes, or by llama2.c's numbers: w1 is the gate, w2 is down and w3 is up."""
    numbers = {re.sub(r"\D", "", m.last): m for m in matrices if re.search(r"\d$", m.last)}
    shapes = [m.shape for m in matrices]
    odd = next((m for m in matrices if shapes.count(m.shape) == 1), None)
    if set(numbers) == {"1", "2", "3"}:
        down = odd or numbers["2"]
        first, second = (numbers[key] for key in "123" if numbers[key] is not down)
        return first, second, down
    down = next((m for m in matrices if m.named(words.GATED_DOWN)), odd) or matrices[-1]
    first, second = (m for m in matrices if m is not down)
    if second.named(words.GATE) or (first.named(words.GATED_UP) and not first.named(words.GATE)):
        first, second = second, first
    return first, second, down


def _is_norm(vector: Module, modules: Iterable[Module]) -> bool:
    """True if a vector of a layer is the weight of a norm: its name says so, it has a bias, or it
    comes before a matrix in a Sequential. Any other vector may scale the output of a sublayer."""
    if vector.names_norm or vector.bias is not None:
        return True
    depth = len(vector.path) - 1
    matrices = [m.path for m in modules if len(m.shape) > 1 and len(m.path) > depth]
    later = [path[depth] for path in matrices if path[:depth] == vector.path[:depth]]
    return vector.path[-1].isdigit() and any(
        place.isdigit() and int(place) > int(vector.path[-1]) for place in later
    )


def _norm_roles(norms: Sequence[Module], home: tuple[str, ...], names: Names) -> None:
    """Assign the norms of attention and feed-forward. A single norm gets both roles, unless its
    name says that it belongs to one sublayer. Such a norm gets no role, and neither do more than
    two norms, or two whose names do not show which is first, so `tensor_map.check` reports
    them."""
    if len(norms) not in (1, 2):
        return
    first, second = norms[0], norms[-1]
    if first is second and (_is_in(first, home) or _is_second(first)):
        return
    if first is not second and not any(_has_place(m) or _is_in(m, home) for m in norms):
        return
    in_attention = [_is_in(norm, home) for norm in (first, second)]
    if in_attention == [False, True] or (
        in_attention[0] == in_attention[1] and _is_second(first) and not _is_second(second)
    ):
        first, second = second, first
    _give(names, "attention_norm", first)
    _give(names, "mlp_norm", second)


def _has_place(norm: Module) -> bool:
    """True if a name shows whether a norm belongs to attention or to the feed-forward."""
    in_sublayer = norm.within(words.ATTENTION) or norm.within(words.FEED_FORWARD)
    return in_sublayer or norm.named(words.FIRST_NORM) or norm.named(words.SECOND_NORM)


def _is_second(norm: Module) -> bool:
    if norm.named(words.SECOND_NORM):
        return True
    if norm.named(words.FIRST_NORM):
        return False
    return norm.within(words.FEED_FORWARD) and not norm.within(words.ATTENTION)


def _oriented(mapped: TensorMap, tensors: Mapping[str, Tensor], width: int) -> TensorMap:
    """Mark the matrices that are stored (in, out). For a matrix that is not square, the width of
    the stream shows the orientation. A square matrix is stored like the others, unless only one of
    them belongs to a module (`q.weight`) or the others differ. Square weights of modules are (out,
    in) if there are no others, as in torch. All other square matrices are unclear."""
    transposed = _transposed_by_shape(mapped, tensors, width)
    shown = {
        role: flag
        for role, flag in transposed.items()
        if role != "head" and tensors[mapped.of(role, "weight")[0]].dim() == 2
    }
    attention = {shown[r] for r in QKV if r in shown}
    unclear: set[Role] = set()
    if (
        not mapped.has_gate  # the odd one of three shapes is down
        and (transposed.get("mlp_up") and transposed.get("mlp_down") and attention != {True})
        and not _names_up_or_down(mapped.name("mlp_up"), mapped.name("mlp_down"))
    ):  # fmt: skip
        if attention:
            return _oriented(_with_up_and_down_swapped(mapped), tensors, width)
        unclear |= {"mlp_up", "mlp_down"}
    for role in [r for r in SQUARE if mapped.has(r) and r not in transposed]:
        shape = tensors[mapped.of(role, "weight")[0]].shape
        in_module = mapped.name(role).endswith("weight") and len(shape) == 2
        alike = {
            flag for r, flag in shown.items() if mapped.name(r).endswith("weight") is in_module
        }
        square = shape[-2:] == (width, width) and (len(shape) == 2 or role in QKV)
        if alike == {True}:
            transposed[role] = True
        elif square and alike != {False} and (alike or not in_module):
            unclear.add(role)
    head = mapped.name("head")
    if head and "head" not in transposed and not head.endswith("weight"):
        unclear.add("head")
    return replace(
        mapped,
        transposed=frozenset(role for role, flag in transposed.items() if flag),
        unclear=frozenset(unclear),
    )


def _transposed_by_shape(
    mapped: TensorMap, tensors: Mapping[str, Tensor], width: int
) -> dict[Role, bool]:
    """For each matrix whose shape shows its orientation, by role: True if it is stored (in,
    out)."""
    transposed: dict[Role, bool] = {}
    for role, part in mapped.names:
        if part != "weight" or not mapped.has(role) or role in ("token_embedding", "positions"):
            continue
        shape = tensors[mapped.of(role, "weight")[0]].shape
        if len(shape) < 2 or (len(shape) == 3 and role == "attention_out"):
            continue
        stream = shape[-1 if role in READS_STREAM else -2] == width
        other = shape[-2 if role in READS_STREAM else -1] == width
        if stream != other:
            transposed[role] = other
    return transposed


def _with_up_and_down_swapped(mapped: TensorMap) -> TensorMap:
    swapped: dict[Role, Role] = {"mlp_up": "mlp_down", "mlp_down": "mlp_up"}
    names = {(swapped.get(role, role), part): name for (role, part), name in mapped.names.items()}
    return replace(mapped, names=names)
