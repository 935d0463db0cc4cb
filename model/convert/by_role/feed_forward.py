"""Questions about the feed-forward: its activation, and which matrix is the gate."""

from typing import get_args

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.computation import GateOrder
from logitd.model.convert.by_role.evidence import NOT_SAID, Evidence
from logitd.model.convert.by_role.finding import CONVENTION, UNUSED, Finding
from logitd.model.convert.by_role.layers import module_name
from logitd.model.convert.by_role.stated import is_on, of_type
from logitd.model.convert.foreign import ConvertError


def activation(file: Evidence) -> Finding:
    has_gate = file.tensors.map.has_gate
    known = words.GATED if has_gate else (*words.ACTIVATIONS, *words.SILU)
    said = file.said("activation", of_type(str))
    if said is not None and said.values[0].lower() not in known:
        raise ConvertError(
            f"{file.tensors.where}: {said.origin.split()[0]} is {said.values[0]!r}, which "
            f"is not supported in a feed-forward with{'' if has_gate else 'out'} a gate; the "
            f"supported activations are {', '.join(sorted(known))}"
        )
    gate = file.tensors.map.name("mlp_gate") or file.tensors.map.name("mlp_gate_up")
    if other := words.OTHER_GATE.search(gate.lower()):
        raise ConvertError(
            f"{file.tensors.where}: the name {gate} says {other[0]}, but silu is the only "
            "activation of a gate that can be imported. Serve the owner's class with --code "
            "FILE:NAME --run-code"
        )
    on, name = file.flag(words.SWIGLU_SETTING)
    if has_gate and on is False:
        return Finding(("swiglu",), f"there is a gate, but {name} of its settings is False", True)
    if has_gate:
        origin = "the feed-forward has a gate; silu is the only activation of one known here"
        return Finding(("swiglu",), origin, said is None and not _names_silu(file))
    if said is None:
        return Finding(("gelu", "gelu_tanh", "relu", "silu", "relu2"), NOT_SAID, True)
    return Finding((words.ACTIVATIONS.get(said.values[0].lower(), "silu"),), said.origin)


def _names_silu(file: Evidence) -> bool:
    """True if a tensor's name, a setting that is on or a setting's text names the activation of
    a gate."""
    texts = [file.tensors.map.name("mlp_down")]
    for name, value in file.settings.items():
        texts += [value] if isinstance(value, str) else [name] if is_on(value) else []
    return any(word in text.lower() for word in words.GATED for text in texts)


def gate_order(file: Evidence) -> Finding:
    orders: tuple[GateOrder, ...] = get_args(GateOrder)
    if not file.tensors.map.has_gate:
        return Finding(orders[:1], UNUSED)
    if "gate" in module_name(file.tensors.map.name("mlp_gate"))[-1].lower():
        return Finding(orders[:1], "its names say which is the gate")
    return Finding(orders, CONVENTION)
