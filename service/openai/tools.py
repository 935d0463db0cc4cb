"""Tools: an answer that must be the call of a function, as JSON that fits its schema.

The text of a call, which the model writes under a constraint:

one function   its arguments
several        `{"name": "f", "arguments": {...}}`, in this layout

`tool_choice` decides if a function is called. The model reads about its tools in the messages only.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from logitd.model.operations.operation import new_id
from logitd.service.openai.chat_schemas import FunctionDefinition, ToolCall

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
LITERAL = ("const", "enum", "default", "examples")
"""Keywords of a schema that hold values, not schemas."""


def call_schema(functions: Sequence[FunctionDefinition]) -> dict[str, Any]:
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
    """Calls as an assistant writes them that chooses among several functions."""
    return "\n".join(f"{_prefix(call.function.name)}{call.function.arguments}}}" for call in calls)


class GrowingCall:
    """The call that a text grows to, piece by piece."""

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        self._names = [function.name for function in functions]
        self._wrapped = len(functions) > 1
        self._name: str | None = None
        self._text = ""  # not returned yet

    def push(self, text: str, *, reason: str | None) -> dict[str, Any] | None:
        """Add the new text, with the finish reason if it has ended. Returns the new part of the
        call: id, type and name at first, then growing arguments; None if there is none."""
        self._text += text
        opening: dict[str, Any] = {}
        named: dict[str, Any] = {}
        if self._name is None:
            self._name = self._known()
            if self._name is None:
                return None
            opening = {"id": new_id("call"), "type": "function"}
            named = {"name": self._name}
        arguments, self._text = self._text, ""
        if self._wrapped and reason != "length":
            # The last bracket may close the call; then it is not part of the arguments.
            arguments, held = arguments[:-1], arguments[-1:]
            self._text = "" if reason == "stop" else held
        if not opening and not arguments:
            return None
        return {**opening, "function": {**named, "arguments": arguments}}

    def _known(self) -> str | None:
        """The name of the function, once the text has it; then the name is cut off the text."""
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
    """A schema moved to `place`, with its references to its own root adjusted."""
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
