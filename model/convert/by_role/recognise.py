"""Recognise: which tensor plays which role, by the words in its name and by its shape.

1) Tensors that are not weights are set aside (`buffers.py`): masks, rotary tables, integers.
2) The layers are found (`layers.py`): the one part of the names that is a running number over
   equal sets.
3) Outside the layers (`outer_roles.py`): token embedding, positions, final norm, head.
4) In a layer (`layer_roles.py`): query, key and value (fused, apart, or for each head), attention's
   output, the two or three matrices of the feed-forward, and the norms.
5) Matrices that lie (in, out) are told from those that lie (out, in) (`orientation.py`).

A name alone decides nothing that shapes contradict. What is not understood keeps no role, and
`tensor_map.check` names it. Does not find out what names cannot say: see `questions.py`.
"""

from collections.abc import Mapping

from torch import Tensor

from logitd.model.convert.by_role.buffers import is_buffer
from logitd.model.convert.by_role.layer_roles import layer_roles
from logitd.model.convert.by_role.layers import find_layers
from logitd.model.convert.by_role.modules import modules_of
from logitd.model.convert.by_role.orientation import orient
from logitd.model.convert.by_role.outer_roles import outer_roles
from logitd.model.convert.by_role.tensor_map import LAYER_ROLES, OUTER_ROLES, Part, Role, TensorMap


def recognise(where: str, tensors: Mapping[str, Tensor]) -> TensorMap:
    """The roles of a state dict's tensors. Raises ConvertError where a GPT's parts are missing."""
    ignored = tuple(name for name, tensor in tensors.items() if is_buffer(name, tensor))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in ignored}
    layers = find_layers(where, shapes)
    outer = outer_roles(where, modules_of(layers.outside), layers.matrices)
    width = outer.width
    inside = layer_roles(where, modules_of(layers.inside), width)
    mapped = TensorMap(
        n_layer=layers.count,
        first_layer=layers.first,
        n_head=layers.heads,
        names=_in_order(outer.names | inside),
        ignored=ignored,
    )
    return orient(mapped, tensors, width)


def _in_order(names: Mapping[tuple[Role, Part], str]) -> dict[tuple[Role, Part], str]:
    """Names in the order in which a forward pass meets their tensors."""
    order = (*OUTER_ROLES[:2], *LAYER_ROLES, *OUTER_ROLES[2:])
    return dict(
        sorted(names.items(), key=lambda item: (order.index(item[0][0]), item[0][1] == "bias"))
    )
