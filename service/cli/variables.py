"""Variables: checks the variables LOGITD_* in the environment and in .env."""

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

import click
from dotenv import dotenv_values

from logitd.service.settings.common import PREFIX, CommandSettings

DOTENV = ".env"
NOT_SETTINGS = {"LOGITD_API_KEY", "LOGITD_BASE_URL"}
"""Variables read by the Python client and `logitd bench`."""
KUBERNETES = ("LOGITD_SERVICE_", "LOGITD_PORT_")
"""Prefixes of variables that Kubernetes sets in containers if a service is named logitd."""
RUN_CODE = "_RUN_CODE"
"""Suffix of the variables that allow a checkpoint's code to run. A .env file may come with a
stranger's model, so it cannot set them."""
NEAR = 0.7
"""Minimum similarity of a suggested variable, from 0 to 1."""


def check_variables(
    settings: type[CommandSettings], every: Iterator[type[CommandSettings]]
) -> None:
    """Raise UsageError for LOGITD_* variables that belong to no command, and for RUN_CODE variables
    in .env. If a misspelled LOGITD_API_KEYS were ignored, the server would require no key. The
    message suggests a similar variable, preferably one of this command's. Variables of other
    commands are accepted, because several commands may share a .env. `every` yields the settings of
    all commands; it is iterated only if needed."""
    own = _variables(settings)
    known: set[str] | None = None
    problems = []
    for place, values in places():
        for name in sorted(values):
            upper = name.upper()
            if place == DOTENV and upper.startswith(PREFIX) and upper.endswith(RUN_CODE):
                problems.append(
                    f"{name} cannot be set in {DOTENV}, which may have come with the model: give "
                    "--run-code, or set it in the environment"
                )
            if not upper.startswith(PREFIX) or upper in own | NOT_SETTINGS:
                continue
            known = known or set().union(*map(_variables, every))
            if upper not in known and not upper.startswith(KUBERNETES):
                near = _nearest(upper, own) or _nearest(upper, known)
                meant = f"; did you mean {near}?" if near else ""
                problems.append(f"{name} in {place} is not a setting{meant}")
    if problems:
        raise click.UsageError("\n".join(problems))


def places() -> Iterator[tuple[str, Mapping[str, str | None]]]:
    """The places where variables are set, in order of precedence: the name of each place, and its
    variables."""
    yield "the environment", os.environ
    yield DOTENV, dotenv_values(DOTENV) if Path(DOTENV).is_file() else {}


def _variables(settings: type[CommandSettings]) -> set[str]:
    return {variable for field in settings.model_fields for variable in settings.variables(field)}


def _nearest(variable: str, known: set[str]) -> str | None:
    """The known variable with the most similar name. Names are compared without their prefix."""
    names = sorted(name.removeprefix(PREFIX) for name in known)
    near = get_close_matches(variable.removeprefix(PREFIX), names, 1, NEAR)
    return PREFIX + near[0] if near else None
