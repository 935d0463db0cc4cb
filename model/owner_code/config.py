"""CodeConfig: the configuration of a model that is computed by its owner's code.

A checkpoint's `config.json` contains it in place of a `GPTConfig`, which describes a model that
this project computes itself. Its facts were measured when the model was imported
(`process/measure.py`). This module does not import torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import pydantic
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from logitd.model.first_error import first_error

KIND = "code"
"""Value of `kind` in the section `model` of a checkpoint's `config.json`."""
FOLDER = "code"
"""Folder in a checkpoint that contains the owner's source files."""
_STRICT = ConfigDict(strict=True, extra="forbid")
SourceName = Annotated[str, Field(pattern=r"^[\w-]+(\.[\w-]+)*(/[\w-]+(\.[\w-]+)*)*\.py$")]
"""A relative path of a `.py` file, without `..`."""


class CodeConfigError(ValueError):
    """Raised if a configuration is invalid. The message names the key."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModuleStage:
    """A submodule whose output is a stage: its name, the shape of its output at one position, and
    its class."""

    name: str
    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    kind: str


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_STRICT)
class Values:
    """The values with which the model was created when it was imported.

    top     values that replace the file's global variables, by name in lower case
    over    values that override the defaults of parameters, by name in lower case
    values  values for parameters without a default, by name in lower case
    names   values for the file's assignments that fail because other files are missing, by exact
            name
    """

    top: Mapping[str, Any]
    over: Mapping[str, Any]
    values: Mapping[str, Any]
    names: Mapping[str, Any] = Field(default_factory=dict)


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_STRICT)
class CodeConfig:
    """The owner's code, and the facts that serving needs.

    vocab_size           number of ids
    rows                 number of logits that the model returns for each position
    order                the model's id for each id of the vocabulary; None if they are the same
    context_length       maximum number of positions of prompt and completion together
    parameters           number of parameters
    file                 the file with the model, relative to the folder `code`
    expression           creates the model: a name in the file, or an expression that uses the
                         file's names
    call                 expression with `model` and `ids` that returns logits; None means
                         `model(ids)`
    values               values with which the expression created the model
    deterministic        False if two passes over the same ids give different logits. Results are
                         still reproducible, because each pass is seeded
    padding_is_harmless  True if neither right padding nor other rows of a batch change logits
    has_state            True if the model has its own cache (`process/call.py`)
    lens                 names of the final norm and the head, for the logit lens; None if there is
                         no lens
    streams              stages that the lens reads: the first block's input and each block's output
    stages               submodules whose outputs can be read and changed
    """

    vocab_size: Annotated[int, Field(ge=1)]
    rows: Annotated[int, Field(ge=1)]
    order: tuple[int, ...] | None = None
    context_length: Annotated[int, Field(ge=1)]
    parameters: Annotated[int, Field(ge=0)]
    file: SourceName
    expression: str
    call: str | None = None
    values: Values
    deterministic: bool
    padding_is_harmless: bool
    has_state: bool
    lens: tuple[str, str] | None = None
    streams: tuple[str, ...] = ()
    stages: tuple[ModuleStage, ...] = ()

    @property
    def code(self) -> str:
        """The file and the expression, as given by the user."""
        return f"{self.file}:{self.expression}"

    @property
    def n_layer(self) -> int:
        """Number of blocks whose outputs the lens reads; 0 if there is no lens."""
        return max(0, len(self.streams) - 1)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": KIND, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CodeConfig":
        """Read the result of `to_dict`. If a key is missing, unknown or has a wrong value, raises
        CodeConfigError, which names the key."""
        try:
            fields = {name: value for name, value in values.items() if name != "kind"}
            # Strict validation accepts lists as tuples only in JSON.
            return _ADAPTER.validate_json(json.dumps(fields))
        except ValidationError as error:
            raise CodeConfigError(first_error(error, " of a model computed by code")) from error


_ADAPTER = TypeAdapter(CodeConfig)
