"""Mistakes: what may have been meant by a command, a flag or a variable that does not exist."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dotenv import dotenv_values
from pydantic_settings import BaseSettings

from service.command_line.flags import flags_of

PREFIX = "LOGITD_"
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
    own = _variables(commands[command])
    known = OTHERS.union(*map(_variables, commands.values()))
    file = dotenv_values(".env") if Path(".env").is_file() else {}
    for where, names in (("the environment", os.environ), (".env", file)):
        for name in sorted(names):
            upper = name.upper()
            if upper.startswith(PREFIX) and upper not in known and not upper.startswith(KUBERNETES):
                meant = _nearest(upper, own) or _nearest(upper, sorted(known))
                yield f"{name} in {where} is not a setting{meant}"


def _nearest(variable: str, known: Iterable[str]) -> str:
    """As `did_you_mean`, by what comes behind the prefix that all have."""
    meant = did_you_mean(
        variable.removeprefix(PREFIX), (name.removeprefix(PREFIX) for name in known)
    )
    return meant.replace("mean ", f"mean {PREFIX}")


def _variables(settings: type[BaseSettings]) -> list[str]:
    """What a command reads from the environment."""
    return [flag.variable for flag in flags_of(settings)]
