"""The command line: `logitd serve`, `train`, `eval`, `merge`, `generate`, `extract`, `inspect`,
`import`, `export`, `bench` and `health`.

Parses with the command's settings model, then imports the module that does the work and runs it:
so --help and a wrong flag answer at once, without torch.
"""

import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, SettingsError

from logitd.model.version import VERSION
from logitd.service.cli.arguments.completion import SHELLS
from logitd.service.cli.arguments.flags import flags_of, known_words, split_words
from logitd.service.cli.arguments.help import help_of, overview, usage
from logitd.service.cli.arguments.mistakes import (
    did_you_mean,
    unknown_variables,
    variable_of,
    way_out,
)
from logitd.service.cli.interrupts import INTERRUPTED, quits_when_interrupted
from logitd.service.settings.common import PREFIX
from logitd.service.settings.extract import ExtractSettings
from logitd.service.settings.imports import ImportSettings
from logitd.service.settings.serve import ServeSettings
from logitd.service.settings.tools import (
    BenchSettings,
    ExportSettings,
    GenerateSettings,
    HealthSettings,
    InspectSettings,
)
from logitd.service.settings.train import EvalSettings, MergeSettings, TrainSettings

COMMANDS: Mapping[str, type[BaseSettings]] = {
    "serve": ServeSettings,
    "train": TrainSettings,
    "eval": EvalSettings,
    "merge": MergeSettings,
    "generate": GenerateSettings,
    "extract": ExtractSettings,
    "inspect": InspectSettings,
    "import": ImportSettings,
    "export": ExportSettings,
    "bench": BenchSettings,
    "health": HealthSettings,
}

ONCE_A_FLAG = ("serve", "bench")
"""Commands that got their checkpoint by --checkpoint before it was an argument, and still may."""

UNREADABLE = "error parsing CLI: "
"""With which pydantic-settings begins what argparse says."""

MODULES: Mapping[str, str] = {"import": "import_model"}
"""Commands whose name no module can have."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:  # a command that has more to say catches it itself
        code = INTERRUPTED
    except BrokenPipeError:  # as of `logitd generate ... | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command; the exit code, 2 for a wrong command line."""
    name, *rest = arguments or ["--help"]
    if name in ("-V", "--version", "version"):
        print(f"logitd {VERSION}")
        return 0
    if name in ("-h", "--help", "help"):
        if not rest or _asks_for_help(rest):
            print(overview(COMMANDS))
            return 0
        name, rest = rest[0], ["--help"]
    if name == "completion":
        return _completion(rest)
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS)
        print(f"logitd: there is no command {name!r}{meant}", file=sys.stderr)
        print(f"the commands are {', '.join(COMMANDS)}; logitd --help says more", file=sys.stderr)
        return 2
    if _asks_for_help(rest):
        print(help_of(name, COMMANDS[name]))
        return 0
    try:
        problems = list(unknown_variables(COMMANDS, name))
    except (OSError, UnicodeDecodeError) as error:
        print(f"logitd {name}: .env cannot be read: {error}", file=sys.stderr)
        return 2
    try:
        settings = parse(name, rest)
    except ValidationError as error:
        problems += [_sentence(name, rest, each) for each in error.errors(include_url=False)]
    except SettingsError as error:  # a flag, a variable or a key of .env that cannot be read
        problems.append(_explained(name, str(error)))
    if problems:
        for problem in problems:
            print(f"logitd {name}: {problem}", file=sys.stderr)
        return 2
    if name not in ("train", "eval"):
        wait_briefly()
    try:
        code: int = import_command(name).run(settings)
    except PermissionError as error:  # where a command has nothing better to say of it
        print(f"logitd {name}: {error.strerror}: {error.filename}", file=sys.stderr)
        return 1
    return code


def parse(name: str, arguments: Sequence[str]) -> BaseSettings:
    """The settings of a command. Raises ValidationError, SettingsError and SystemExit."""
    settings, given = COMMANDS[name], list(arguments)
    if name in ONCE_A_FLAG:
        given = _without_checkpoint_flag(given)
    several = next((flag.name for flag in flags_of(settings) if flag.several), None)
    found: dict[str, Any] = {}
    if several is not None:  # argparse takes them from one place alone, and joins them by commas
        given, words = split_words(given, settings)
        found = {several: words} if words else {}
    return CliApp.run(settings, cli_args=given, cli_exit_on_error=False, **found)


def _asks_for_help(arguments: Sequence[str]) -> bool:
    """What comes after -- is an argument, whatever it looks like."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return any(word in ("-h", "--help") for word in arguments[:end])


def _sentence(name: str, arguments: Sequence[str], problem: ErrorDetails) -> str:
    """What is wrong with the value of a setting, and where it was given."""
    field = str(problem["loc"][0]) if problem["loc"] else name
    said = f"{problem['msg']} (given: {problem['input']!r})"
    given = None
    if field in COMMANDS[name].model_fields:
        given = variable_of(COMMANDS, name, field, arguments)
    if given is None:
        return f"--{field.replace('_', '-')}: {said}"
    variable, where = given
    of_all = variable == f"{PREFIX}{field}".upper()
    meant = way_out(COMMANDS, name, field, problem["input"]) if of_all else ""
    return f"{variable} in {where}: {said}{meant}"


def _explained(name: str, message: str) -> str:
    """What argparse says of a command line, with what may have been meant and the usage."""
    said = message.removeprefix(UNREADABLE)
    if said == message:
        return message
    flag = re.match(r"unrecognized arguments: (--[^\s=]+)", said)
    meant = did_you_mean(flag[1], known_words(COMMANDS[name])) if flag else ""
    return f"error: {said}{meant}\n{usage(name, COMMANDS[name])}; logitd help {name} says more"


def _completion(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        print(f"usage: logitd completion {'|'.join(SHELLS)}", file=sys.stderr)
        return 2
    print(SHELLS[arguments[0]](COMMANDS))
    return 0


def _without_checkpoint_flag(arguments: Sequence[str]) -> list[str]:
    """`--checkpoint PATH` as PATH."""
    given = []
    for word in arguments:
        if word.startswith("--checkpoint="):
            given.append(word.partition("=")[2])
        elif word != "--checkpoint":
            given.append(word)
    return given


def import_command(name: str) -> ModuleType:
    """The module of a command, the one import by name: torch takes seconds, and only a command that
    computes needs it.

    What modules consist of stays until the process ends. To look through it for garbage again and
    again makes an import an eighth longer, and each full collection afterwards: so none is made
    meanwhile, and later ones leave it out.
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


def wait_briefly() -> None:
    """Let torch's threads sleep soon after their work is done, unless the environment says
    otherwise. By default they spin for milliseconds, on the cores of the native decoder's threads
    and of everybody else. OpenMP reads this when torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


if __name__ == "__main__":
    main()
