"""Flags: makes click parameters from the fields of a settings model, and settings from the parsed
values.

click parses the command line; the settings model reads environment variables and checks all values.
"""

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import BeforeValidator, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import CliPositionalArg, SettingsError

from logitd.service.cli.variables import DOTENV, places
from logitd.service.settings.common import CommandSettings, split_list

_POSITIONAL = get_args(CliPositionalArg)[-1]
_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH"}


class Word(click.Choice[str]):
    """One of several words, or a comma-separated list of them. click does not check the words; the
    settings model does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value


class Json(click.ParamType[Any]):
    """A value in JSON."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)


def parameters(settings: type[CommandSettings]) -> list[click.Parameter]:
    """A flag or an argument for each field, in order."""
    fields = settings.model_fields.items()
    return [_parameter(settings, name, field) for name, field in fields]


def read_settings(ctx: click.Context, settings: type[CommandSettings]) -> CommandSettings:
    """The settings from a parsed command line, the environment and .env. Raises UsageError, which
    names the invalid flag or variable."""
    given: dict[str, Any] = {}
    for param in ctx.command.get_params(ctx):
        name = str(param.name)
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE and name in ctx.params:
            value = ctx.params[name]
            if isinstance(param, click.Option) and _splits(settings.model_fields[name]):
                value = [item for words in value for item in split_list(words)]
            given[name] = value
    try:
        if Path(DOTENV).is_fifo():  # pydantic would wait for a writer
            raise OSError(f"{DOTENV} is a pipe (FIFO); expected a regular file")
        return settings(**given)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        text = "\n".join(_sentence(ctx, settings, problem) for problem in problems)
        raise click.UsageError(text, ctx) from error
    except SettingsError as error:
        hint = """write a variable's list as JSON, such as '["a", "b"]'"""
        raise click.UsageError(f"{error}: {hint}", ctx) from error
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f".env cannot be read: {error}", ctx) from error


def _parameter(settings: type[CommandSettings], name: str, field: FieldInfo) -> click.Parameter:
    positional = _POSITIONAL in field.metadata
    kinds = list(_kinds(field.annotation))
    several = _is_list(field)
    items = list(_kinds(get_args(kinds[0])[0])) if several else kinds
    choices = [
        str(word) for kind in items if get_origin(kind) is Literal for word in get_args(kind)
    ]
    if choices and kinds[0] is bool:
        choices = ["yes", "no", *choices]
    kind: click.ParamType[Any] = click.Path(readable=False)  # lets shells complete file names
    metavar = _METAVARS.get(items[0], "TEXT")
    if choices:
        kind, metavar = Word(choices), "|".join(choices)
    elif is_dataclass(items[0]) and not (positional or several):
        kind, metavar = Json(), "JSON"
    if positional:
        metavar = name.upper() if field.is_required() else f"[{name.upper()}]"
        metavar += "..." * several
        return click.Argument(
            [name], nargs=-1 if several else 1, required=False, type=kind, metavar=metavar,
            help=_help(settings, name, field, positional),
        )  # fmt: skip
    words = [*filter(None, [settings.flag_names.get(name)]), name.replace("_", "-")]
    flags = [f"-{word}" if len(word) == 1 else f"--{word}" for word in words]
    text = _help(settings, name, field, positional)
    if kinds[0] is bool and not choices:
        switches = [f"{flag}/--no-{word}" for flag, word in zip(flags, words, strict=True)]
        return click.Option([name, *switches], default=None, help=text)
    return click.Option([name, *flags], multiple=several, type=kind, metavar=metavar, help=text)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that a field's value may have, without Annotated, unions and None."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for kind in get_args(annotation):
            yield from _kinds(kind)
    elif annotation is not NoneType:
        yield annotation


def _splits(field: FieldInfo) -> bool:
    """True if the values of a flag are split at their commas: a `CommaList`, and a list of words or
    numbers. Other texts and paths may contain commas, so their flags are repeated."""
    if not _is_list(field):
        return False
    items = _kinds(get_args(next(_kinds(field.annotation)))[0])
    return BeforeValidator(split_list) in field.metadata or all(
        item in (int, float) or get_origin(item) is Literal for item in items
    )


def _is_list(field: FieldInfo) -> bool:
    return get_origin(next(_kinds(field.annotation))) is tuple


def _help(settings: type[CommandSettings], name: str, field: FieldInfo, positional: bool) -> str:
    """The help text of a field: its description, default and environment variable."""
    notes = [str(field.description)]
    if field.is_required():
        notes.append("(required)")
    elif (default := _written(field.default)) is not None:
        notes.append(f"(default: {default})")
    if not positional:
        if _is_list(field) and not _splits(field):
            notes.append("(can be repeated)")
        notes.append(f"[env: {settings.variables(name)[1]}]")
    return " ".join(notes)


def _written(default: Any) -> str | None:
    """How the help writes a default value; None if the help does not mention it."""
    if default is None or default is False or default is PydanticUndefined:
        return None
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or None
    if isinstance(default, Path) and default.is_relative_to(Path.cwd()):
        default = default.relative_to(Path.cwd())
    return "yes" if default is True else str(default)


def _sentence(ctx: click.Context, settings: type[CommandSettings], problem: ErrorDetails) -> str:
    """The message for an invalid value. It begins with the flag or variable that set the value."""
    field = str(problem["loc"][0]) if problem["loc"] else ""
    message = problem["msg"].removeprefix("Value error, ")
    param = next((param for param in ctx.command.params if param.name == field), None)
    if param is None:
        return message
    flag = field.upper() if isinstance(param, click.Argument) else param.opts[0]
    if problem["type"] == "missing":
        return f"{flag} is required"
    annotation = settings.model_fields[field].annotation
    if SecretStr not in (annotation, *get_args(annotation)):
        message = f"{message} (given: {problem['input']!r})"
    if ctx.get_parameter_source(field) is ParameterSource.COMMANDLINE:
        return f"{flag}: {message}"
    own, shared = settings.variables(field)
    for variable in (own, shared):
        for place, values in places():
            if variable in map(str.upper, values):
                hint = f"; {own} sets it for {settings.command} alone" if variable == shared else ""
                return f"{variable} in {place}: {message}{hint}"
    return f"{flag}: {message}"
