"""SettingsCommand: a click command whose flags are the fields of a settings model.

click parses the command line, writes the help, completes words and suggests flags. The settings
model reads environment variables and validates all values. The model and `flags.py` are imported at
first use, because the list of commands does not need them.
"""

import importlib
import os
import shlex
import textwrap
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from logitd.service.settings.common import CommandSettings

WIDTH = 100
"""Maximum width of a help text, in columns."""
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}


class SettingsCommand(click.Command):
    """A click command that returns its settings when it is invoked."""

    def __init__(
        self, name: str, settings: "type[CommandSettings] | str", summary: str, examples: str = ""
    ) -> None:
        """`settings` is a model, or the name `module:Class` of a model in `service/settings/`.
        `examples` are command lines for the help."""
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
        """Accept `--checkpoint PATH`, the older form of the positional checkpoint."""
        names = {param.name for param in self.get_params(ctx) if isinstance(param, click.Argument)}
        end = args.index("--") if "--" in args else len(args)
        flags, rest = args[:end], args[end:]
        if "checkpoint" in names and flags[-1:] != ["--checkpoint"]:
            flags = [word.removeprefix("--checkpoint=") for word in flags if word != "--checkpoint"]
        for flag, _, word in zip(flags, flags[1:], flags[2:], strict=False):
            if flag == "--data" and not word.startswith("-") and os.path.isfile(word):
                raise click.UsageError(_one_value(f"Got unexpected extra argument ({word})"), ctx)
        try:
            return super().parse_args(ctx, flags + rest)
        except click.UsageError as error:
            if "extra argument" not in error.message:
                raise
            if "--data" in flags:
                raise click.UsageError(_one_value(error.message), ctx) from error
            if (advice := self._advice(ctx, args)) is None:
                raise
            raise click.UsageError(f"{error.message}. {advice}", ctx) from error

    def _advice(self, ctx: click.Context, args: list[str]) -> str | None:
        """The command line with all words of the prompt quoted as one argument, and with a folder
        before them as the checkpoint, as other commands take it. None if `--` is among `args`, or
        if the prompt is not the command's only positional argument."""
        arguments = [each.name for each in self.get_params(ctx) if isinstance(each, click.Argument)]
        if arguments != ["prompt"] or "--" in args:
            return None
        given, extra, _ = self.make_parser(ctx).parse_args(list(args))
        words, flags = [given["prompt"], *extra], list(args)
        for word in words:
            flags.remove(word)
        advice = "Quote the prompt"
        if os.path.isdir(words[0]) and "checkpoint" in self.settings.model_fields:
            advice = "Name the checkpoint with --checkpoint"
            flags += ["--checkpoint", words.pop(0)]
        return f"{advice}: {shlex.join([*ctx.command_path.split(), ' '.join(words), *flags])}"

    def invoke(self, ctx: click.Context) -> "CommandSettings":
        from logitd.service.cli.flags import read_settings

        return read_settings(ctx, self.settings)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples. click would list the arguments here, but `format_options` lists them
        in their groups."""
        if self._examples:
            with formatter.section("Examples"):
                formatter.write(textwrap.indent(self._examples, "  ") + "\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = self.settings.groups
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in titles.values()}
        title = last = [*groups][-1]
        for param in self.get_params(ctx):
            own = param.name in self.settings.model_fields
            title = titles.get(str(param.name), title) if own else last  # `last` is for --help
            if (record := param.get_help_record(ctx)) is not None:
                groups[title].append(record)
        for title, records in groups.items():
            with formatter.section(title.capitalize()):
                formatter.write_dl(records, col_max=6)  # puts descriptions below their flags


def _one_value(problem: str) -> str:
    return (
        f"{problem}. --data takes one value: quote a pattern, as in --data '*.txt', so that the "
        "shell does not expand it, or repeat --data"
    )
