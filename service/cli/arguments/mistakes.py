"""Mistakes: what may have been meant by a command, a flag or a variable that does not exist, and
which variable it is whose value a command does not take."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dotenv import dotenv_values
from pydantic_settings import BaseSettings

from logitd.service.cli.arguments.flags import flags_of
from logitd.service.settings.common import PREFIX, own_prefix

NEAR = 0.7
"""Twice the letters that two words have in common in order, as a share of the letters of both."""
OTHERS = {"LOGITD_API_KEY", "LOGITD_BASE_URL"}
"""Variables of the Python client and of `logitd bench`, which are not settings."""
KUBERNETES = ("LOGITD_SERVICE_", "LOGITD_PORT_")
"""What Kubernetes sets in every container where a service is called logitd."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the nearest known word, if any is near."""
    near = difflib.get_close_matches(word, list(known), 1, NEAR)
    return f"; did you mean {near[0]}?" if near else ""


def unknown_variables(commands: Mapping[str, type[BaseSettings]], command: str) -> Iterator[str]:
    """A sentence for each variable of ours, in the environment or in .env, that no command has,
    with the nearest one of the command that is run, else of all.

    One of another command is left alone: a .env serves several. Names without the prefix are other
    programs'. Raises OSError and UnicodeDecodeError where .env cannot be read.
    """
    own = _variables(command, commands[command])
    known = OTHERS.union(*(_variables(name, each) for name, each in commands.items()))
    for where, values in _places():
        for name in sorted(values):
            upper = name.upper()
            if upper.startswith(PREFIX) and upper not in known and not upper.startswith(KUBERNETES):
                prefix = next(filter(upper.startswith, map(own_prefix, commands)), PREFIX)
                meant = _nearest(upper, own, prefix) or _nearest(upper, sorted(known), prefix)
                yield f"{name} in {where} is not a setting{meant}"


def _nearest(variable: str, known: Iterable[str], prefix: str) -> str:
    """As `did_you_mean`, by what comes behind a prefix that they have in common."""
    behind = (name.removeprefix(prefix) for name in known if name.startswith(prefix))
    meant = did_you_mean(variable.removeprefix(prefix), behind)
    return meant.replace("mean ", f"mean {prefix}")


def variable_of(
    commands: Mapping[str, type[BaseSettings]], command: str, field: str, arguments: Sequence[str]
) -> tuple[str, str] | None:
    """The variable that gave a command the value of a field, and the place that has it: None where
    a flag did."""
    flag = next(flag for flag in flags_of(commands[command]) if flag.name == field)
    if any(word.partition("=")[0] in flag.words for word in arguments):
        return None
    for variable in (own_prefix(command) + field.upper(), flag.variable):
        for where, values in _places():
            if variable in map(str.upper, values):
                return variable, where
    return None


def way_out(
    commands: Mapping[str, type[BaseSettings]], command: str, field: str, value: object
) -> str:
    """The end of a sentence about a choice that this command does not have: where others have it,
    how to set it for them and not for this one."""
    others = [
        name
        for name, settings in commands.items()
        if any(flag.name == field and value in flag.choices for flag in flags_of(settings))
    ]
    if not others:
        return ""
    listed = " and ".join([*filter(None, [", ".join(others[:-1])]), others[-1]])
    own, another = (f"{own_prefix(name)}{field.upper()}" for name in (command, others[0]))
    return (
        f"; {listed} {'have' if len(others) > 1 else 'has'} it: {another} sets it for {others[0]} "
        f"alone, and {own}, which comes first, another for {command}"
    )


def _places() -> Iterator[tuple[str, Mapping[str, str | None]]]:
    """Where variables are, the one that comes first first."""
    yield "the environment", os.environ
    yield ".env", dotenv_values(".env") if Path(".env").is_file() else {}


def _variables(command: str, settings: type[BaseSettings]) -> list[str]:
    """What a command reads from the environment, of all and of its own."""
    flags = flags_of(settings)
    own = own_prefix(command)
    return [*(flag.variable for flag in flags), *(own + flag.name.upper() for flag in flags)]
