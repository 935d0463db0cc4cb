"""Roles outside the layers: token embedding, positions, final norm and head.

Widths and rows of the tables decide together with their names. Does not look into the layers, but
for the shapes of their matrices, which say how wide the residual stream is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.modules import Module, Shape
from logitd.model.convert.by_role.tensor_map import Part, Role
from logitd.model.convert.foreign import ConvertError


@dataclass(frozen=True)
class OuterRoles:
    """Names by role, and the width of the residual stream."""

    names: dict[tuple[Role, Part], str]
    width: int


def outer_roles(where: str, modules: Sequence[Module], matrices: Sequence[Shape]) -> OuterRoles:
    """Names by role of the tensors outside the layers; `matrices` are the shapes of those in one.

    Raises ConvertError where there is no token embedding."""
    tables = [m for m in modules if len(_squeezed(m.shape)) == 2]
    sides = {side for shape in matrices for side in shape}
    fitting = [m for m in tables if sides & set(_squeezed(m.shape))]
    positions = [m for m in fitting if _names_positions(m)]
    others = [m for m in fitting if m not in positions]
    heads = [m for m in others if _named_anywhere(m, words.HEAD)]
    embeddings = [m for m in others if _named_anywhere(m, words.TOKEN_EMBEDDING)]
    # A head says how many rows the vocabulary has; without one, the first table is the embedding.
    alike = [m for m in others if m not in heads and any(m.shape == h.shape for h in heads)]
    embedding = next(
        (m for m in (*embeddings, *alike, *others) if m not in heads), next(iter(embeddings), None)
    )
    if embedding is None:
        raise ConvertError(
            f"{where} has no token embedding: a matrix (vocabulary, width) outside the layers "
            f"whose width is that of the layers' matrices; outside the layers there are "
            f"{', '.join(f'{m.weight} {list(m.shape)}' for m in modules) or 'no tensors'}. "
            "Name it with --map"
        )
    names: dict[tuple[Role, Part], str] = {("token_embedding", "weight"): embedding.weight}
    rows, width = _squeezed(embedding.shape)
    fits = [m for m in others if m is not embedding and sorted(m.shape) == sorted((rows, width))]
    head = next((m for m in fits if m in heads), next(iter(fits), None))
    left = [m for m in others if m not in (embedding, head) and m.shape[-1] == width]
    for table in (positions or left)[:1]:
        names["positions", "weight"] = table.weight
    if head is not None:
        names["head", "weight"] = head.weight
        if head.bias is not None:
            names["head", "bias"] = head.bias
    vectors = [m for m in modules if m.shape == (width,)]
    norms = [m for m in vectors if m.named(words.FINAL_NORM)] or vectors
    if len(norms) == 1:
        names["final_norm", "weight"] = norms[0].weight
        if norms[0].bias is not None:
            names["final_norm", "bias"] = norms[0].bias
    for module in modules:  # a head's bias as a parameter of its own
        if module.shape == (rows,) and ("head", "bias") not in names and rows != width:
            names["head", "bias"] = module.weight
    return OuterRoles(names, width)


def _squeezed(shape: Shape) -> Shape:
    """A table (1, T, C) or (T, 1, C) is one of (T, C)."""
    if len(shape) == 3 and 1 in shape[:2]:
        return (shape[1] if shape[0] == 1 else shape[0], shape[2])
    return shape


def _names_positions(module: Module) -> bool:
    return any(words.matches(words.POSITIONS, part) for part in module.path)


def _named_anywhere(module: Module, pattern: re.Pattern[str]) -> bool:
    return any(words.matches(pattern, part) for part in module.path)
