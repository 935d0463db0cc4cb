"""Recognise: which tensor plays which role, by the words in its name and by its shape.

1) Tensors that are not weights are set aside: masks, rotary tables, integers.
2) The layers are found (`layers.py`): the one part of the names that is a running number over
   equal sets.
3) Roles are given outside the layers and in a layer (`roles.py`).
4) Each matrix is oriented: (in, out) or (out, in).

A name alone decides nothing that shapes contradict. A tensor that is not understood gets no role,
and `tensor_map.check` names it. Does not find out what names cannot say (`questions.py`).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.layers import find_layers
from logitd.model.convert.by_role.modules import modules_of
from logitd.model.convert.by_role.roles import Names, layer_roles, outer_roles
from logitd.model.convert.by_role.tensor_map import LAYER_ROLES, OUTER_ROLES, Role, TensorMap

READS_STREAM: tuple[Role, ...] = (
    "qkv", "query", "key", "value", "mlp_gate", "mlp_up", "mlp_gate_up", "head",
)  # fmt: skip
"""Matrices whose columns are as many as the stream is wide; of the others the rows are."""
SQUARE: tuple[Role, ...] = (*READS_STREAM[:-1], "attention_out", "mlp_down")
"""Matrices of a layer, which may be square."""


def recognise(where: str, tensors: Mapping[str, Tensor]) -> TensorMap:
    """The roles of a state dict's tensors. Raises ConvertError if a GPT's parts are missing."""
    ignored = tuple(name for name, tensor in tensors.items() if is_buffer(name, tensor))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in ignored}
    layers = find_layers(where, shapes)
    outside, width = outer_roles(where, modules_of(layers.outside), layers.matrices)
    inside = layer_roles(where, modules_of(layers.inside), width)
    mapped = TensorMap(
        n_layer=layers.count,
        first_layer=layers.first,
        n_head=layers.heads,
        names=_in_order(outside | inside),
        ignored=ignored,
    )
    return _oriented(mapped, tensors, width)


def _in_order(names: Names) -> Names:
    """Names in the order in which a forward pass meets their tensors."""
    order = (*OUTER_ROLES[:2], *LAYER_ROLES, *OUTER_ROLES[2:])
    return dict(
        sorted(names.items(), key=lambda item: (order.index(item[0][0]), item[0][1] == "bias"))
    )


def is_buffer(name: str, tensor: Tensor) -> bool:
    """True if a tensor is not a weight: by its name, its dtype, or because it is a causal mask."""
    last = name.rpartition(".")[2]
    if words.matches(words.BUFFERS, last.lstrip("_")) or tensor.is_complex():
        return True
    if not tensor.is_floating_point():
        return tensor.dtype in (torch.bool, torch.int64, torch.int32) or tensor.dim() == 0
    return tensor.dim() not in (1, 2, 3) or is_causal_mask(tensor)


def is_causal_mask(tensor: Tensor) -> bool:
    """True if a tensor (..., T, T) has one value up to each position and another after it."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2:
        return False
    square = tensor.reshape(-1, *tensor.shape[-2:])[0]
    low, high = square[0, 0], square[0, -1]
    lower = torch.ones_like(square, dtype=torch.bool).tril()
    return bool(low != high and (square[lower] == low).all() and (square[~lower] == high).all())


def _oriented(mapped: TensorMap, tensors: Mapping[str, Tensor], width: int) -> TensorMap:
    """The map with the matrices that lie (in, out). Matrices that are not square show it by the
    width of the stream; square ones are as the others are."""
    transposed = _transposed_by_shape(mapped, tensors, width)
    attention = {transposed[r] for r in ("qkv", "query", "key", "value") if r in transposed}
    if transposed.get("mlp_up") and transposed.get("mlp_down") and attention == {False}:
        return _oriented(_with_up_and_down_swapped(mapped), tensors, width)
    if {flag for role, flag in transposed.items() if role != "head"} == {True}:
        transposed |= {r: True for r in SQUARE if mapped.has(r) and r not in transposed}
    return replace(mapped, transposed=frozenset(role for role, flag in transposed.items() if flag))


def _transposed_by_shape(
    mapped: TensorMap, tensors: Mapping[str, Tensor], width: int
) -> dict[Role, bool]:
    """For each matrix whose shape shows it, whether it lies (in, out)."""
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
