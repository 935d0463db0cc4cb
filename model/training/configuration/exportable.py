"""Exportable: what `--exportable` changes in a model's shape, so that `logitd export` can write it
for other programs.

What is in the way, and what can stand in its place, is said by `model/convert/family.py`. Nothing
is known there of what a person asked for; here what was given and is in the way is refused by name.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from logitd.model.convert.family import nearest, objections
from logitd.model.convert.foreign import ConvertError
from logitd.model.training.configuration.config import TrainingError
from logitd.model.transformer.config import GPTConfig


def exportable_changes(model: GPTConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a shape that have to be others, and what follows from them; a width of the
    feed-forward that was given stays. Raises TrainingError where one of them was `given`."""
    try:
        wanted = nearest(model)
    except ConvertError as error:
        raise TrainingError(f"--exportable: {error}") from error
    names = [field.name for field in fields(GPTConfig)]
    changes = {
        name: getattr(wanted, name)
        for name in names
        if getattr(wanted, name) != getattr(model, name)
    }
    if "d_ff" in given:
        changes.pop("d_ff", None)
    if refused := sorted(changes.keys() & given.keys()):
        reasons = {objection.key: objection.reason for objection in objections(model)}
        listed = "; ".join(
            f"{name} {given[name]!r} was given, and it needs {changes[name]!r}"
            + (f": {reasons[name]}" if name in reasons else "")
            for name in refused
        )
        raise TrainingError(f"--exportable: {listed}")
    return changes


def require_exportable(model: GPTConfig) -> None:
    """Raise TrainingError where a shape that is there already cannot be exported: a checkpoint's,
    which a fine-tuned run keeps."""
    if found := objections(model):
        raise TrainingError(
            "--exportable: the shape of the checkpoint stays, and cannot be exported: "
            + "; ".join(map(str, found))
        )
