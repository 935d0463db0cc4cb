"""Evidence: what a file shows about its computation, as every question reads it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.finding import Finding
from logitd.model.convert.by_role.rotary_table import RotaryTable
from logitd.model.convert.by_role.stated import Settings, setting
from logitd.model.convert.by_role.tensor_map import MappedTensors

OF_SETTINGS = " of its settings"
NOT_SAID = "names and shapes do not show it"


@dataclass(frozen=True)
class Evidence:
    """The evidence in a file: its weights, its masks and tables (`ignored`), its settings, and the
    rotary tables among the ignored tensors.

    found   the findings and the user's answers for the questions before this one
    """

    tensors: MappedTensors
    ignored: Mapping[str, Tensor]
    settings: Settings
    tables: list[RotaryTable]
    found: Mapping[str, Finding]

    def said(self, field: str, read: Callable[[Any], Any]) -> Finding | None:
        """The value of a field in the settings, as `read` returns it; None if it is missing or if
        `read` returns None."""
        value, key = setting(self.settings, field)
        value = None if value is None else read(value)
        return None if value is None else Finding((value,), f"{key}{OF_SETTINGS}")

    def said_or(self, field: str, read: Callable[[Any], Any], usual: Finding) -> Finding:
        """The value of a field in the settings, or else the usual values. They are a question if
        the settings have a value that `read` does not understand."""
        value, key = setting(self.settings, field)
        if (said := self.said(field, read)) is not None or value is None:
            return said or usual
        origin = f"{key} of its settings is {value!r}, which is not understood"
        return Finding(usual.values, origin, True)

    def flag(self, pattern: re.Pattern[str]) -> tuple[bool | None, str]:
        """The value and the name of the first flag among the settings whose name matches a pattern;
        (None, "") if there is none."""
        named = ((v, k) for k, v in self.settings.items() if words.matches(pattern, str(k)))
        return next(((v, k) for v, k in named if isinstance(v, bool)), (None, ""))
