"""Tools: an answer that has to be the call of a function, as JSON by its schema.

The text of a call, which the model writes under a constraint:

one function   its arguments
several        `{"name": "f", "arguments": {...}}`, in this layout

Whether to call one at all is not decided here: `tool_choice` says it. What is shown to the model of
its tools is what the messages say.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from logitd.model.operations.operation import new_id
from logitd.service.openai.schemas import FunctionDefinition, ToolCall

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
LITERAL = ("const", "enum", "default", "examples")
"""What they hold are values, not schemas."""


def call_schema(functions: Sequence[FunctionDefinition]) -> dict[str, Any]:
    """The JSON schema of the text of a call."""
    if len(functions) == 1:
        return _parameters(functions[0])
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    "arguments": {"$ref": f"#/$defs/{function.name}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in functions
        ],
        "$defs": {
            function.name: _moved(_parameters(function), f"#/$defs/{function.name}")
            for function in functions
        },
    }


def text_of_calls(calls: Sequence[ToolCall]) -> str:
    """These calls as an assistant writes them that may choose among several functions."""
    return "\n".join(f"{_prefix(call.function.name)}{call.function.arguments}}}" for call in calls)


@dataclass(frozen=True, slots=True)
class NewOfCall:
    """What is new of a call: its name and id at first, then the growing arguments."""

    id: str | None
    name: str | None
    arguments: str


class GrowingCall:
    """The call that a text comes to, piece by piece."""

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        self._names = [function.name for function in functions]
        self._wrapped = len(functions) > 1
        self._name: str | None = None
        self._text = ""  # not handed out yet

    def push(self, text: str, *, reason: str | None) -> NewOfCall | None:
        """Take in what is new of the text; None where it adds nothing. `reason` is why it ended,
        where it has."""
        self._text += text
        call_id, name = None, None
        if self._name is None:
            if (name := self._known()) is None:
                return None
            self._name, call_id = name, new_id("call")
        arguments, self._text = self._text, ""
        if self._wrapped and reason != "length":
            # The bracket that closes the call, which may be the last, is not of its arguments.
            arguments, held = arguments[:-1], arguments[-1:]
            self._text = "" if reason == "stop" else held
        if call_id is None and not arguments:
            return None
        return NewOfCall(call_id, name, arguments)

    def _known(self) -> str | None:
        """The name of the function, once the text has it; what says it is then taken off."""
        if not self._wrapped:
            return self._names[0]
        for name in self._names:
            if self._text.startswith(_prefix(name)):
                self._text = self._text.removeprefix(_prefix(name))
                return name
        return None


def _prefix(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    return dict(NO_ARGUMENTS) if function.parameters is None else function.parameters


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own root lead to `place`, where it stands now."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: value if key in LITERAL else _moved(value, place) for key, value in schema.items()
    }
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
