"""Orientation: which matrices lie (in, out) in the file, and which (out, in).

Matrices that are not square say it by the width of the residual stream; it also shows where up and
down of the feed-forward were taken for one another. Moves no tensor: `MappedTensors.take` does.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from logitd.model.convert.by_role.tensor_map import Role, TensorMap

READS_STREAM: tuple[Role, ...] = (
    "qkv", "query", "key", "value", "mlp_gate", "mlp_up", "mlp_gate_up",
)  # fmt: skip
"""Matrices whose columns are the width of the residual stream; those of the rest are its rows."""


def orient(mapped: TensorMap, tensors: Mapping[str, Tensor], width: int) -> TensorMap:
    """The map with the matrices that lie (in, out) told from those that lie (out, in).

    Matrices that are not square say it themselves; square ones are as the others are.
    """
    transposed = _transposed_by_shape(mapped, tensors, width)
    attention = {
        transposed[role] for role in ("qkv", "query", "key", "value") if role in transposed
    }
    both = transposed.get("mlp_up") and transposed.get("mlp_down")
    if both and attention == {False}:  # taken for one another
        return orient(_with_up_and_down_swapped(mapped), tensors, width)
    if {flag for role, flag in transposed.items() if role != "head"} == {True}:
        square: tuple[Role, ...] = (*READS_STREAM, "attention_out", "mlp_down")
        transposed |= {role: True for role in square if mapped.has(role) and role not in transposed}
    return replace(mapped, transposed=frozenset(role for role, flag in transposed.items() if flag))


def _transposed_by_shape(
    mapped: TensorMap, tensors: Mapping[str, Tensor], width: int
) -> dict[Role, bool]:
    """For each matrix whose shape says it, whether it lies (in, out)."""
    transposed: dict[Role, bool] = {}
    for role, part in mapped.names:
        if part != "weight" or not mapped.has(role) or role in ("token_embedding", "positions"):
            continue
        whole = tensors[mapped.of(role, "weight")[0]].shape
        shape = whole[-2:]
        if len(shape) != 2 or shape[0] == shape[1]:
            continue
        if len(whole) == 3 and role == "attention_out":
            continue
        stream = 1 if role in READS_STREAM or role == "head" else 0
        if shape[stream] == width and shape[1 - stream] != width:
            transposed[role] = False
        elif shape[1 - stream] == width and shape[stream] != width:
            transposed[role] = True
    return transposed


def _with_up_and_down_swapped(mapped: TensorMap) -> TensorMap:
    swapped: dict[Role, Role] = {"mlp_up": "mlp_down", "mlp_down": "mlp_up"}
    names = {(swapped.get(role, role), part): name for (role, part), name in mapped.names.items()}
    return replace(mapped, names=names)
