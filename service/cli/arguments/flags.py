"""Flags: what a command takes, as plain data, read from its settings model.

Help, suggestions and completion are made of it. Parsing is pydantic-settings' business.
"""

import types
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings, CliPositionalArg

_POSITIONAL = get_args(CliPositionalArg)[-1]
WORDS = {bool: "", int: "int", float: "float", Path: "path"}
"""What a value is called; texts are `text`."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, or an argument without one.

    name         of the field
    words        as it is written, the usual one first; an argument has none
    value        what follows it, `int` or `cpu|cuda`; "" for a switch
    choices      all that may follow it, where that is a list
    default      as it would be written; None where that is nothing, or it is required
    required     whether it has to be given
    variable     of the environment and of .env, read by every command
    several      whether it is an argument that may come more than once
    """

    name: str
    words: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    default: str | None
    required: bool
    description: str
    variable: str
    several: bool = False


def flags_of(settings: type[BaseSettings]) -> tuple[Flag, ...]:
    """In the order of the fields."""
    every = settings.model_fields.items()
    return tuple(_flag(settings, name, field) for name, field in every)


def known_words(settings: type[BaseSettings]) -> tuple[str, ...]:
    """Everything with dashes that a command understands."""
    return (*(word for flag in flags_of(settings) for word in flag.words), "--help")


def split_words(
    arguments: Sequence[str], settings: type[BaseSettings]
) -> tuple[list[str], list[str]]:
    """A command line as its flags with their values, and the words that stand by themselves."""
    takes_value = {word for flag in flags_of(settings) if flag.value for word in flag.words}
    flags: list[str] = []
    words: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word == "--":
            words += rest
        elif not word.startswith("-") or word == "-":
            words.append(word)
        else:
            flags.append(word)
            if word in takes_value:
                flags += islice(rest, 1)
    return flags, words


def _flag(settings: type[BaseSettings], name: str, field: FieldInfo) -> Flag:
    kind = _without_none(field.annotation)
    value, choices = _value(kind)
    positional = _POSITIONAL in field.metadata
    words = () if positional else _words(settings, name, kind)
    prefix = settings.model_config.get("env_prefix", "")
    return Flag(
        name=name,
        words=words,
        value=value,
        choices=choices,
        default=_default(field.default),
        required=field.is_required(),
        description=" ".join(str(field.description).split()),
        variable=f"{prefix}{name}".upper(),
        several=positional and get_origin(kind) is tuple,
    )


def _words(settings: type[BaseSettings], name: str, kind: Any) -> tuple[str, ...]:
    own = f"-{name}" if len(name) == 1 else _kebab(name)
    shortcuts: Any = settings.model_config.get("cli_shortcuts") or {}
    others = shortcuts.get(name.replace("_", "-"), ())
    others = (others,) if isinstance(others, str) else tuple(others)
    negative = (f"--no-{name.replace('_', '-')}",) if kind is bool else ()
    return (*(f"--{other}" for other in others), own, *negative)


def _kebab(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _without_none(annotation: Any) -> Any:
    """A type without Annotated and None around it."""
    if get_origin(annotation) is Annotated:
        return _without_none(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        (kind, *_) = (arg for arg in get_args(annotation) if arg is not type(None))
        return _without_none(kind)
    return annotation


def _value(kind: Any) -> tuple[str, tuple[str, ...]]:
    """What a value of a type is called, and the choices where there is a list of them."""
    if get_origin(kind) is Literal:
        choices = tuple(map(str, get_args(kind)))
        return "|".join(choices), choices
    if get_origin(kind) is tuple:
        item, choices = _value(_without_none(get_args(kind)[0]))
        return f"{item},..." if choices else f"{item},{item}", choices
    if is_dataclass(kind):
        return "json", ()
    return WORDS.get(kind, "text"), ()


def _default(value: Any) -> str | None:
    if value is None or value is PydanticUndefined or value is False or value == ():
        return None
    if value is True:
        return "yes"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, Path) and value.is_relative_to(Path.cwd()):
        return str(value.relative_to(Path.cwd()))
    return str(value)
