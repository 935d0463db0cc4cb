"""Questions about norms: their kind, eps and place."""

from dataclasses import replace

import torch

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.evidence import NOT_SAID, Evidence
from logitd.model.convert.by_role.finding import CONVENTION, Finding
from logitd.model.convert.by_role.layers import module_name
from logitd.model.convert.by_role.stated import (
    may_be_optimizers,
    of_type,
    read_eps,
    setting,
    states_rms,
)
from logitd.model.convert.by_role.tensor_map import Role

NORMS: tuple[Role, ...] = ("attention_norm", "mlp_norm", "final_norm")
NOT_POSITIVE = 0.25
"""If more than this part of the norms' weights is not positive, they may be added to 1."""


def norm(file: Evidence) -> Finding:
    found, doubts = _norm_by_name(file), list[str]()
    if _norms_are_around_zero(file):
        doubts.append("their weights are around 0, so the source may multiply by 1 + weight")
    names = [name for role in NORMS if (name := file.tensors.map.name(role))]
    own = {name: last for name in names if not (last := name.rpartition(".")[2]).endswith("weight")}
    tutorial = [name for name, last in own.items() if words.matches(words.TUTORIAL_NORM, last)]
    if tutorial and "layernorm" in found.values:
        doubts.append(
            f"in tutorials, norms with names such as {tutorial[0]} divide by the unbiased standard "
            "deviation (x.std without unbiased=False)"
        )
    if doubts:
        origin = f"{found.origin}; {', and '.join(doubts)}, which cannot be imported"
        return Finding(found.values, origin, True)
    if own and found.values == ("layernorm",):
        return replace(found, origin=f"{found.origin}; assumed: their variance is torch's, biased")
    return found


def _norms_are_around_zero(file: Evidence) -> bool:
    tensors = [tensor for role in NORMS if (tensor := file.tensors.get(role)) is not None]
    return bool(tensors) and float((torch.cat(tensors) <= 0).float().mean()) > NOT_POSITIVE


def _norm_by_name(file: Evidence) -> Finding:
    mapped = file.tensors.map
    if not mapped.has_norms:
        return Finding(
            ("rmsnorm", "layernorm"), "its norms have no weights, or there are none", True
        )
    rms = words.names_rms(mapped.name("attention_norm")) or states_rms(file.settings)
    if mapped.has("attention_norm", "bias"):
        origin = f"norms have biases{', but names say that they are RMS norms' if rms else ''}"
        return Finding(("layernorm",), origin, rms)
    if rms:
        return Finding(("rmsnorm",), "its names contain rms")
    return Finding(("layernorm", "rmsnorm"), "norms have no biases, so either is possible", True)


def norm_eps(file: Evidence) -> Finding:
    usual = Finding((1e-5, 1e-6, 1e-12, 1e-8), "torch's default of LayerNorm")
    kind = file.found["norm"]
    if kind.values == ("rmsnorm",):
        usual = Finding((1e-6, 1e-5, 1e-8, 2**-23), f"{CONVENTION} of RMS norms")
    elif kind.ambiguous:
        usual = replace(usual, origin=f"{usual.origin}; for RMS norms, 1e-06 is usual")
    found = file.said_or("norm_eps", read_eps, usual)
    key = setting(file.settings, "norm_eps")[1]
    if may_be_optimizers(key, file.settings) and not found.ambiguous:
        origin = f"{found.origin} may be the optimizer's, whose settings are next to it"
        return Finding(tuple(dict.fromkeys((*found.values, *usual.values))), origin, True)
    return found


def norm_position(file: Evidence) -> Finding:
    said = file.said("norm_first", of_type(bool))
    if said is None:
        return Finding(("pre", "post"), NOT_SAID, True)
    return Finding(("pre" if said.values[0] else "post",), said.origin)


def final_norm(file: Evidence) -> Finding:
    mapped = file.tensors.map
    if name := mapped.name("final_norm"):
        origin = "a norm behind the layers is in the file"
        if not words.names_norm(module_name(name)) and not mapped.has("final_norm", "bias"):
            origin = f"only its shape says that {name} is a norm behind the layers"
        return Finding((True, False), origin, True)
    if not mapped.has_norms:
        return Finding((True, False), "its norms have no weights", True)
    origin = "no norm behind the layers is in the file, but there may be one without weights"
    return Finding((False, True), origin, True)
