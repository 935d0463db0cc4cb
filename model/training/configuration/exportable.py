"""Exportability: the shape of a model that `logitd export` can write. Pure functions.

Which shapes other programs know is in `model/convert/family.py`.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from logitd.model.convert.family import nearest, objections
from logitd.model.convert.foreign import ConvertError
from logitd.model.training.configuration.config import TrainingError
from logitd.model.transformer.config import GPTConfig


def exportable_model(model: GPTConfig, given: Mapping[str, Any]) -> GPTConfig:
    """The nearest shape that can be exported. A given width of the feed-forward stays; any other
    `given` value that would have to change raises TrainingError."""
    try:
        wanted = nearest(model)
    except ConvertError as error:
        raise TrainingError(f"--exportable: {error}") from error
    values = {field.name: getattr(wanted, field.name) for field in fields(GPTConfig)}
    changes = {name: value for name, value in values.items() if value != getattr(model, name)}
    if "d_ff" in given:
        changes.pop("d_ff", None)
    if refused := sorted(changes.keys() & given.keys()):
        reasons = {each.key: f": {each.reason}" for each in objections(model)}
        listed = "; ".join(
            f"{name} is {given[name]!r}, but must be {changes[name]!r}{reasons.get(name, '')}"
            for name in refused
        )
        raise TrainingError(f"--exportable: {listed}")
    return replace(model, **changes)


def require_exportable(model: GPTConfig) -> None:
    """Raise TrainingError if a checkpoint's model, whose shape stays, cannot be exported."""
    if found := objections(model):
        raise TrainingError(
            "--exportable: the shape of the checkpoint stays, and cannot be exported: "
            + "; ".join(map(str, found))
        )
