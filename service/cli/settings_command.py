"""SettingsCommand: a click command whose flags are the fields of a settings model.

click parses, writes the help, completes words and suggests flags. The settings model reads the
variables and validates every value. It is imported when it is first needed, because the list of
commands needs none: so is `flags.py`, which makes parameters of its fields.
"""

import importlib
import textwrap
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from logitd.service.settings.common import CommandSettings

WIDTH = 100
"""Columns of a help text, at most."""
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}


class SettingsCommand(click.Command):
    """A command that returns its settings when it is invoked."""

    def __init__(
        self, name: str, settings: "type[CommandSettings] | str", summary: str, examples: str = ""
    ) -> None:
        """`settings` is the model, or `module:Class` below `service/settings/`. `examples` are
        command lines that can be pasted."""
        super().__init__(
            name,
            help=summary,
            short_help=summary,
            context_settings=CONTEXT,
            options_metavar="[FLAGS]",
        )
        self._source = settings
        self._examples = textwrap.dedent(examples).strip()

    @cached_property
    def settings(self) -> "type[CommandSettings]":
        """The settings model."""
        if not isinstance(self._source, str):
            return self._source
        module, _, name = self._source.partition(":")
        found: type[CommandSettings] = getattr(
            importlib.import_module(f"logitd.service.settings.{module}"), name
        )
        return found

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self.params:
            from logitd.service.cli.flags import parameters

            self.params = parameters(self.settings)
        return super().get_params(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept `--checkpoint PATH` for a positional checkpoint, as earlier versions wrote it."""
        names = {param.name for param in self.get_params(ctx) if isinstance(param, click.Argument)}
        end = args.index("--") if "--" in args else len(args)
        flags, rest = args[:end], args[end:]
        if "checkpoint" in names and flags[-1:] != ["--checkpoint"]:
            flags = [word.removeprefix("--checkpoint=") for word in flags if word != "--checkpoint"]
        return super().parse_args(ctx, flags + rest)

    def invoke(self, ctx: click.Context) -> "CommandSettings":
        from logitd.service.cli.flags import read_settings

        return read_settings(ctx, self.settings)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Arguments are listed in the groups of `format_options`."""
        if self._examples:
            with formatter.section("Examples"):
                formatter.write(textwrap.indent(self._examples, "  ") + "\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        title = "flags"
        for param in self.get_params(ctx):
            title = self.settings.groups.get(param.name or "", title)
            if (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title.capitalize()):
                formatter.write_dl(records, col_max=6)  # descriptions below their flags
