"""The command line: `logitd` and its commands.

A command's flags are parsed by its settings model. Only then is its module in `commands/` imported,
so --help and invalid flags are answered immediately, without torch. The module's `run` returns the
exit code. Exceptions listed in its `ERRORS` are printed as messages, with exit code 1.
"""

import errno
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from logitd.model.openmp import spin_variables
from logitd.model.version import VERSION
from logitd.service.cli.interrupts import (
    INTERRUPTED,
    cleans_up_when_terminated,
    quits_when_interrupted,
)
from logitd.service.cli.settings_command import CONTEXT, SettingsCommand
from logitd.service.cli.terminal import say, tell

if TYPE_CHECKING:
    from logitd.service.settings.common import CommandSettings

COMPLETE = "_LOGITD_COMPLETE"
"""Environment variable that shell completion scripts set to request completions."""
MODULES = {"import": "import_model"}
"""Module names of commands. Only a command whose own name is a Python keyword needs an entry."""
COMMANDS = (
    SettingsCommand(
        "serve",
        "serve:ServeSettings",
        "Serve one or several checkpoints over HTTP.",
        """
        logitd serve                                  the bundled checkpoint
        logitd serve runs/mine --port 9000            the best checkpoint of a run
        logitd serve checkpoints/mine --quantize int4
        logitd serve small=runs/a large=runs/b        two, chosen by name in requests
        """,
    ),
    SettingsCommand(
        "train",
        "train:TrainSettings",
        "Train a GPT on text; without --data, on text that comes with Python.",
        """
        logitd train --minutes 2 --out runs/mine      on text that comes with Python
        logitd train --data my-texts/ --preset tiny --out runs/mine
        logitd train --resume --out runs/mine         after Ctrl-C
        logitd train --from checkpoints/python-small --data my-texts/ --out runs/tuned
        """,
    ),
    SettingsCommand(
        "eval",
        "train:EvalSettings",
        "Measure the loss of a checkpoint on a text: per token, as perplexity, in bits per byte.",
        "logitd eval runs/mine --data my-texts/",
    ),
    SettingsCommand(
        "merge",
        "train:MergeSettings",
        "Merge an adapter with the checkpoint that it was trained on.",
        "logitd merge checkpoints/python-small runs/adapted checkpoints/merged",
    ),
    SettingsCommand(
        "generate",
        "tools:GenerateSettings",
        "Generate text from a checkpoint in the terminal, without a server.",
        "logitd generate 'def read(' --checkpoint runs/mine --seed 7",
    ),
    SettingsCommand(
        "extract",
        "tools:ExtractSettings",
        "Compute every token of a text: logprobs or a lens into Parquet, stages into safetensors.",
        "logitd extract checkpoints/python-small --data my-texts/ --out scored --logprobs",
    ),
    SettingsCommand(
        "sae",
        "sae:SaeSettings",
        "Train a sparse autoencoder, whose features a server shows, steers and ablates.",
        "logitd sae train runs/mine --stage blocks.3.output --data my-texts/ --out saes/mine",
    ),
    SettingsCommand(
        "inspect",
        "tools:InspectSettings",
        "Show a checkpoint and the shapes of its forward pass, or the course of training runs.",
        "logitd inspect runs/mine runs/other",
    ),
    SettingsCommand(
        "import",
        "imports:ImportSettings",
        "Import a model trained elsewhere, by any code, as a checkpoint.",
        """
        logitd import out/ckpt.pt checkpoints/mine --tokenizer gpt2
        logitd import model.pt checkpoints/mine --check text.txt
        """,
    ),
    SettingsCommand(
        "export",
        "tools:ExportSettings",
        "Export a checkpoint for other programs: Hugging Face transformers or llama.cpp.",
        "logitd export runs/mine mine.gguf --to gguf",
    ),
    SettingsCommand(
        "bench",
        "tools:BenchSettings",
        "Measure how fast a checkpoint runs, in process and over HTTP, as a share of the limit.",
        "logitd bench --batches 1,16",
    ),
    SettingsCommand(
        "health",
        "tools:HealthSettings",
        "Ask whether a server answers requests: exit code 0 if it does, 1 if not.",
        """
        logitd health --port 9000
        logitd health https://gpt.example
        """,
    ),
)


class Commands(click.Group):
    """The commands, in the order in which the help lists them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


logitd = Commands(
    "logitd",
    commands=COMMANDS,
    help="logitd: train a GPT, serve every number it computes.",
    epilog="logitd help COMMAND lists a command's flags. Each flag --NAME can also be set as "
    "LOGITD_NAME in the environment or in a file .env, or for one command alone as "
    "LOGITD_COMMAND_NAME.",
    context_settings=CONTEXT,
    options_metavar="",
    subcommand_metavar="COMMAND [FLAGS]",
)
click.version_option(VERSION, "-V", "--version", message="logitd %(version)s")(logitd)


def _commands(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in logitd.commands if name.startswith(incomplete)]


@logitd.command("help", context_settings=CONTEXT)
@click.argument("command", required=False, metavar="COMMAND", shell_complete=_commands)
@click.pass_context
def show_help(ctx: click.Context, command: str | None) -> None:
    """Show the flags of a command."""
    shown = root = ctx.find_root()
    if command is not None:
        _, found, _ = logitd.resolve_command(root, [command])
        shown = click.Context(found or logitd, root, command, **CONTEXT)
    click.echo(shown.get_help())


@logitd.command("completion", short_help="Print the completion for a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands and flags in bash, zsh or fish.

    To install it: source <(logitd completion bash)
    """
    shell_class = get_completion_class(shell)
    assert shell_class is not None
    click.echo(shell_class(logitd, {}, "logitd", COMPLETE).source())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    for stream in (sys.stdout, sys.stderr):  # a text may have characters that a terminal lacks
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with cleans_up_when_terminated():
            code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:  # in a command that does not handle it
        code = INTERRUPTED
    except BrokenPipeError:  # `logitd generate ... | head`: the reader has closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command. Returns the exit code, which is 2 for an invalid command line."""
    began = time.monotonic()
    words = list(arguments) or ["--help"]
    if words[0] == "version":
        words[0] = "--version"
    try:
        with quits_when_interrupted():
            settings = _settings(words)
    except click.ClickException as error:
        _with_suggestions(error).show()
        return error.exit_code
    if isinstance(settings, int):
        return settings
    os.environ.update(spin_variables(os.environ))
    clock: tuple[float, ...] = ()
    if settings.command == "train":  # --minutes counts from here
        clock = (began,)
        if os.environ.get("RANK", "0") == "0":  # the first of several processes
            say("loading PyTorch")
    command = import_command(settings.command)
    try:
        code: int = command.run(settings, *clock)
    except command.ERRORS as error:
        problem = f"{error}{_suggestion(settings)}"
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno != errno.ENAMETOOLONG:
            raise
        problem = f"{error.strerror}: {error.filename}"
    else:
        return code
    tell(settings.command, problem)
    return 1


def _with_suggestions(error: click.ClickException) -> click.ClickException:
    """Sort an error's suggestions by similarity; click sorts them alphabetically."""
    if not isinstance(error, click.NoSuchOption | click.NoSuchCommand) or not error.possibilities:
        return error
    meant = " or ".join(error.possibilities)
    return click.UsageError(f"{error.message.removesuffix('.')}; did you mean {meant}?", error.ctx)


def _suggestion(settings: "CommandSettings") -> str:
    """A clause with similar paths if the command's checkpoint does not exist."""
    for path in (getattr(settings, "checkpoint", None), *getattr(settings, "paths", ())):
        if isinstance(path, Path) and not os.path.exists(path):
            servable = importlib.import_module("logitd.service.cli.commands.servable")
            with suppress(OSError):  # an unreadable folder
                if found := servable.similar(path):
                    return f"; did you mean {' or '.join(map(str, found))}?"
    return ""


def _settings(words: list[str]) -> "CommandSettings | int":
    """The settings in a command line. A command without settings, such as `help`, is run, and its
    exit code is returned. Raises ClickException."""
    settings = logitd.main(words, "logitd", complete_var=COMPLETE, standalone_mode=False) or 0
    if not isinstance(settings, int):
        from logitd.service.cli.variables import check_variables

        check_variables(type(settings), (each.settings for each in COMMANDS))
    return settings


def import_command(name: str) -> ModuleType:
    """Import the module of a command, which takes seconds if it imports torch.

    Garbage collection is off during the import, which saves an eighth of the time. The imported
    modules are excluded from later collections, because they stay until the process ends.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with quits_when_interrupted():
            return importlib.import_module(f"logitd.service.cli.commands.{MODULES.get(name, name)}")
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
