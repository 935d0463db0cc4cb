"""Orientation: which matrices lie (in, out) in the file, and which (out, in).

Matrices that are not square say it by the width of the residual stream; it also shows where up and
down of the feed-forward were taken for one another. Moves no tensor: `MappedTensors.take` does.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from model.convert.by_role.tensor_map import Part, Role, TensorMap

READS_STREAM: tuple[Role, ...] = (
    "qkv", "query", "key", "value", "mlp_gate", "mlp_up", "mlp_gate_up",
)  # fmt: skip
"""Matrices whose columns are the width of the residual stream; those of the rest are its rows."""


def orient(mapped: TensorMap, tensors: Mapping[str, Tensor], width: int) -> TensorMap:
    """The map with the matrices that lie (in, out) told from those that lie (out, in).

    Matrices that are not square say it themselves; square ones are as the others are.
    """
    roles = [role for role, part in mapped.names if part == "weight" and mapped.has(role)]
    shapes = {role: tuple(tensors[mapped.of(role, "weight")[0]].shape) for role in roles}
    lies: dict[Role, bool] = {}  # transposed or not, where the shape says it
    for role in roles:
        shape = shapes[role][-2:]
        if len(shape) != 2 or role in ("token_embedding", "positions") or shape[0] == shape[1]:
            continue
        stream = 1 if role in READS_STREAM or role == "head" else 0
        if len(shapes[role]) == 3 and role == "attention_out":
            continue
        if shape[stream] == width and shape[1 - stream] != width:
            lies[role] = False
        elif shape[1 - stream] == width and shape[stream] != width:
            lies[role] = True
    up, down = lies.get("mlp_up"), lies.get("mlp_down")
    attention = {lies[role] for role in ("qkv", "query", "key", "value") if role in lies}
    if up and down and attention == {False}:  # taken for one another
        names = dict(mapped.names)
        parts: tuple[Part, ...] = ("weight", "bias")
        for part in parts:
            pair = names.pop(("mlp_up", part), None), names.pop(("mlp_down", part), None)
            swapped: tuple[Role, ...] = ("mlp_down", "mlp_up")
            for role, name in zip(swapped, pair, strict=True):
                if name is not None:
                    names[role, part] = name
        return orient(replace(mapped, names=names), tensors, width)
    inner = {flag for role, flag in lies.items() if role != "head"}
    if inner == {True}:
        square: tuple[Role, ...] = (*READS_STREAM, "attention_out", "mlp_down")
        lies |= {role: True for role in square if role in roles and role not in lies}
    return replace(mapped, transposed=frozenset(role for role, flag in lies.items() if flag))
