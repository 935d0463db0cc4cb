"""Settings parsed from command lines, and the settings model of each command."""

from typing import Any

import click

from logitd.service.cli.main import COMMANDS, logitd
from logitd.service.settings.common import CommandSettings

SETTINGS: dict[str, type[CommandSettings]] = {str(each.name): each.settings for each in COMMANDS}


def parsed(command: str, *words: str) -> Any:
    """The settings of a command line. Raises ClickException if it is refused."""
    settings = logitd.main([command, *words], "logitd", standalone_mode=False)
    assert isinstance(settings, SETTINGS[command])
    return settings


def parameters_of(command: str) -> list[click.Parameter]:
    """Flags and arguments, --help included."""
    found = logitd.commands[command]
    return found.get_params(context(found))


def context(command: click.Command) -> click.Context:
    return click.Context(command, **command.context_settings)


def words_of(command: str) -> list[str]:
    """Every spelling of every flag of a command."""
    flags = (param for param in parameters_of(command) if isinstance(param, click.Option))
    return [word for flag in flags for word in (*flag.opts, *flag.secondary_opts)]
