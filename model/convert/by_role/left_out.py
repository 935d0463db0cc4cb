"""Left out: refuses a computation that does not use a tensor of the source.

A training changes no tensor that the model does not use, so a changed norm is used.
"""

from collections.abc import Iterator

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.layers import module_name
from logitd.model.convert.by_role.tensor_map import MappedTensors, Role
from logitd.model.convert.foreign import ConvertError


def require_roles(tensors: MappedTensors, how: Computation) -> None:
    """Raise ConvertError if the computation leaves out a tensor whose role it could use. `build`
    accepts this, so that a search can compare a computation without the tensor."""
    for unused in _left_out(tensors, how):
        raise ConvertError(
            f"{tensors.where}: {unused} has no role. If it changes no logit, ignore it with --map; "
            "otherwise serve the owner's class with --code FILE:NAME --run-code"
        )


def _left_out(tensors: MappedTensors, how: Computation) -> Iterator[str]:
    """The tensors that `how` leaves out, except norms that are known by their name and that no
    training has changed."""
    table, norm = tensors.map.name("positions"), tensors.map.name("final_norm")
    if how.positions != "learned" and table:
        yield f"positions is {how.positions}, but then {table}"
    if not how.final_norm and norm:
        if not words.matches(words.FINAL_NORM, module_name(norm)[-1]):
            yield f"final_norm is false, but then {norm}"
        elif is_trained(tensors, "final_norm"):
            yield f"final_norm is false, but then {norm}, which a training has changed,"
    if how.qk_norm != "learned" and is_trained(tensors, "query_norm", "key_norm"):
        query = tensors.map.name("query_norm")
        yield f"qk_norm is {how.qk_norm}, but then {query}, which a training has changed,"


def is_trained(tensors: MappedTensors, *norms: Role) -> bool:
    """True if one of these norms is not as it was created, with equal weights and no biases. A
    training changes no tensor that the computation does not use."""
    places = [(role, layer) for role in norms for layer in range(tensors.map.n_layer)]
    weights = [x for role, n in places if (x := tensors.get(role, "weight", n)) is not None]
    biases = [x for role, n in places if (x := tensors.get(role, "bias", n)) is not None]
    unequal = any(bool((weight != weight.flatten()[0]).any()) for weight in weights)
    return unequal or any(bool(bias.any()) for bias in biases)
