"""Tools: the constraint that makes an answer a function call, and the parser of that call.

Under the constraint, the model's text depends on the number of functions:

one function       the arguments, as JSON that fits the function's schema
several functions  `{"name": "f", "arguments": {...}}`, in this layout

`tool_choice` decides whether a function is called. The model knows about the tools only from the
messages.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from logitd.model.inference.constraints.json_schema import BY_NAME
from logitd.model.operations.operation import new_id
from logitd.service.openai.chat_schemas import FunctionDefinition, ToolCall

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
LITERAL = ("const", "enum", "default", "examples")
"""JSON Schema keywords that contain values, not schemas."""


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
    """Calls in the form in which a model writes them when it chooses among several functions."""
    return "\n".join(f"{_prefix(call.function.name)}{call.function.arguments}}}" for call in calls)


class GrowingCall:
    """Reads a call from the pieces of a text."""

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        self._names = [function.name for function in functions]
        self._wrapped = len(functions) > 1
        self._name: str | None = None
        self._text = ""  # not returned yet

    def push(self, text: str, *, reason: str | None) -> dict[str, Any] | None:
        """Add new text, and the finish reason if the text has ended. Returns the new part of the
        call, if any: first the id, type and name, then pieces of the arguments."""
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
            # The last bracket may close the call instead of the arguments, so hold it back.
            arguments, held = arguments[:-1], arguments[-1:]
            self._text = "" if reason == "stop" else held
        if not opening and not arguments:
            return None
        return {**opening, "function": {**named, "arguments": arguments}}

    def _known(self) -> str | None:
        """The called function's name; None if it is not known yet. If there are several functions,
        the text names the function first; once the name is known, everything before the arguments
        is removed from the text."""
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
    """Move a schema to `place`, adjusting the references that point to its root."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved_value(key, value, place) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key in BY_NAME and isinstance(value, dict):  # its keys are names, not keywords
        return {name: _moved(schema, place) for name, schema in value.items()}
    return value if key in LITERAL else _moved(value, place)
