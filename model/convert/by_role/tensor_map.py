"""TensorMap: the names of a file's tensors, by their roles in a GPT.

A name may contain `{N}`, the number of the layer, and `{M}`, the number of the head. `recognize.py`
derives a map from names and shapes; users can write a map in TOML (`map_file.py`). `computation.py`
describes how the model computes with the tensors.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from logitd.model.convert.foreign import ConvertError, check_tensor, common_dtype
from logitd.model.plural import pluralize

OuterRole = Literal["token_embedding", "positions", "final_norm", "head"]
LayerRole = Literal[
    "attention_norm",
    "query",
    "key",
    "value",
    "qkv",
    "query_norm",
    "key_norm",
    "attention_out",
    "mlp_norm",
    "mlp_gate",
    "mlp_up",
    "mlp_gate_up",
    "mlp_down",
]
Role = Literal[OuterRole, LayerRole]
Part = Literal["weight", "bias"]

OUTER_ROLES: tuple[OuterRole, ...] = get_args(OuterRole)
LAYER_ROLES: tuple[LayerRole, ...] = get_args(LayerRole)
SEPARATE: tuple[Role, ...] = ("query", "key", "value")
QKV: tuple[Role, ...] = ("qkv", *SEPARATE)
IDENTITY = "identity"
"""Takes the place of a tensor's name if the source has no such matrix. An identity matrix is used
instead."""


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """The tensors' names by role. `ignored` has the full names of tensors that are not weights
    (masks, tables).

    first_layer   number of the first layer, 0 or 1
    n_head        number of heads with separate tensors; 0 if all heads are in one tensor
    transposed    roles whose matrices are stored (in, out)
    unclear       roles whose matrices are square, so that their orientation is not known
    """

    n_layer: int
    first_layer: int = 0
    n_head: int = 0
    names: Mapping[tuple[Role, Part], str]
    ignored: tuple[str, ...] = ()
    transposed: frozenset[Role] = frozenset()
    unclear: frozenset[Role] = frozenset()

    def has(self, role: Role, part: Part = "weight") -> bool:
        """True if a tensor has this role."""
        return self.names.get((role, part), IDENTITY) != IDENTITY

    def has_bias(self, *roles: Role) -> bool:
        """True if at least one of these roles has a bias."""
        return any(self.has(role, "bias") for role in roles)

    @property
    def has_gate(self) -> bool:
        return self.has("mlp_gate") or self.has("mlp_gate_up")

    def name(self, role: Role) -> str:
        """The name of the weight with this role, including the placeholders {N} and {M}; "" if the
        model has no such weight."""
        return self.names.get((role, "weight"), "")

    def of(self, role: Role, part: Part, layer: int = 0) -> tuple[str, ...]:
        """The names of a role's tensors in a layer: one name, or one for each head."""
        pattern = self.names[role, part].replace("{N}", str(layer + self.first_layer))
        if "{M}" not in pattern:
            return (pattern,)
        return tuple(pattern.replace("{M}", str(head)) for head in range(self.n_head))

    @property
    def has_norms(self) -> bool:
        """True if the norms of the layers have weights."""
        return self.has("attention_norm", "weight")

    def all_names(self) -> list[str]:
        return [
            name
            for (role, part), pattern in self.names.items()
            if pattern != IDENTITY
            for layer in range(self.n_layer if role in LAYER_ROLES else 1)
            for name in self.of(role, part, layer)
        ]


@dataclass(frozen=True)
class MappedTensors:
    """Reads the tensors of a file by role. If each head has its own tensor, the tensors of the
    heads are joined into one.

    tensors   tensors by name, each of a float dtype and finite (see `check`)
    """

    where: str
    tensors: Mapping[str, Tensor]
    map: TensorMap

    def take(self, role: Role, part: Part = "weight", layer: int = 0) -> Tensor:
        """The tensor with a role: a matrix (out, in) or a vector. Separate tensors of heads are
        concatenated along the rows, in the order of the heads."""
        parts = [_at_least_float32(self.tensors[name]) for name in self.map.of(role, part, layer)]
        if part == "bias":
            return torch.cat([tensor.flatten() for tensor in parts])
        if role == "positions":
            return parts[0].flatten(0, -2)  # (1, T, C) or (T, 1, C) to (T, C)
        if role == "attention_out" and parts[0].dim() == 3:
            return parts[0].flatten(0, 1).mT  # (H, D, C) to (C, H * D)
        if role in self.map.transposed:
            parts = [tensor.mT for tensor in parts]
        if parts[0].dim() == 3:
            parts = [tensor.flatten(0, 1) for tensor in parts]  # (H, D, C) to (H * D, C)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def get(self, role: Role, part: Part = "weight", layer: int = 0) -> Tensor | None:
        """The tensor that `take` returns; None if no tensor has the role."""
        return self.take(role, part, layer) if self.map.has(role, part) else None

    def shape(self, role: Role) -> tuple[int, ...]:
        """The shape of the tensor that `take` returns for the first layer."""
        return tuple(self.take(role).shape)


def _at_least_float32(tensor: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32, so that changes to its values are not rounded to 16
    bits."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def check(where: str, tensors: Mapping[str, Tensor], mapped: TensorMap) -> torch.dtype:
    """Raise ConvertError unless every tensor is mapped or ignored, and every mapped tensor exists,
    has a float dtype and finite values, and has the same shape in all layers. Returns the common
    dtype; float32 if the dtypes differ or are wider than float32."""
    names = mapped.all_names()
    if missing := [name for name in names if name not in tensors]:
        raise ConvertError(
            f"{where} lacks {pluralize(len(missing), 'tensor')} that the map names; the first is "
            f"{missing[0]}"
        )
    taken = {*names, *mapped.ignored}
    if left := [name for name in tensors if name not in taken]:
        shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in left[:4])
        raise ConvertError(
            f"{where} has {pluralize(len(left), 'tensor')} without a known role in a GPT: "
            f"{shapes}{', ...' if len(left) > 4 else ''}. Give them roles or ignore them with "
            "--map, or serve the owner's class with --code FILE:NAME --run-code"
        )
    _check_layers_agree(where, tensors, mapped)
    _check_axes(where, tensors, mapped)
    if mapped.unclear:
        roles = sorted(mapped.unclear)
        raise ConvertError(
            f"{where}: {', '.join(map(mapped.name, roles))}: the shape of a square matrix does not "
            "show whether it is stored (in, out) or (out, in). List the roles of those that are "
            f"(in, out) in a --map file: transposed = {roles} under [files], or transposed = []"
        )
    for name in names:
        check_tensor(where, name, tensors[name])
    return common_dtype({tensors[name].dtype for name in names})


def _check_axes(where: str, tensors: Mapping[str, Tensor], mapped: TensorMap) -> None:
    """Raise ConvertError if a tensor with three axes is not a query, key or value of all heads:
    (H, D, C) or (H, C, D). In (C, H, D), the first axis has the width of the stream, too."""
    width = tensors[mapped.of("token_embedding", "weight")[0]].shape[-1]
    for role in QKV:
        if not mapped.has(role):
            continue
        name = mapped.of(role, "weight")[0]
        shape = tensors[name].shape
        if len(shape) == 3 and (role == "qkv" or shape[0] == width or width not in shape):
            raise ConvertError(
                f"{where}: {name} has shape {list(shape)}, but only a query, key or value can have "
                f"three axes: (heads, channels, {width}) or (heads, {width}, channels). Save it as "
                f"a matrix (rows, {width}), or serve the owner's class with --code FILE:NAME "
                "--run-code"
            )


def _check_layers_agree(where: str, tensors: Mapping[str, Tensor], mapped: TensorMap) -> None:
    for (role, part), pattern in mapped.names.items():
        if pattern == IDENTITY or role not in LAYER_ROLES:
            continue
        first = mapped.of(role, part)[0]
        expected = tensors[first].shape
        for layer in range(mapped.n_layer):
            for name in mapped.of(role, part, layer):
                if tensors[name].shape != expected:
                    raise ConvertError(
                        f"{where}: {name} has shape {list(tensors[name].shape)}, but {first} "
                        f"has shape {list(expected)}: all layers of a GPT must have the same shapes"
                    )


def glob(patterns: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The names that match at least one pattern. `*` matches any text; `{N}` and `{M}` match any
    number."""
    compiled = [
        re.compile(
            re.escape(p).replace(r"\*", ".*").replace(r"\{N\}", r"\d+").replace(r"\{M\}", r"\d+")
        )
        for p in patterns
    ]
    return tuple(name for name in names if any(p.fullmatch(name) for p in compiled))
