"""The command line: `logitd serve`, `train`, `eval`, `merge`, `generate`, `extract`, `inspect`,
`import`, `export` and `bench`.

Parses with the command's settings model, then imports the module that does the work and runs it:
so --help and a wrong flag answer at once, without torch.
"""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsError

from model.version import VERSION
from service.settings.extract import ExtractSettings
from service.settings.imports import ImportSettings
from service.settings.serve import ServeSettings
from service.settings.tools import (
    BenchSettings,
    ExportSettings,
    GenerateSettings,
    InspectSettings,
)
from service.settings.train import EvalSettings, MergeSettings, TrainSettings
from service.start import INTERRUPTED, quits_when_interrupted

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
}

FIRST_ARGUMENT: Mapping[str, str] = {"serve": "--checkpoint"}
"""Flags that a first argument without a dash stands for."""

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
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version", "version"):
        print(f"logitd {VERSION}")
        return 0
    if name not in COMMANDS:
        print(f"logitd: there is no command {name!r}\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        settings = parse(name, rest)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            field = str(problem["loc"][0]) if problem["loc"] else name
            print(
                f"logitd {name}: --{field.replace('_', '-')}: {problem['msg']} "
                f"(given: {problem['input']!r})",
                file=sys.stderr,
            )
        return 2
    except SettingsError as error:  # an environment variable or a key of .env that cannot be read
        print(f"logitd {name}: {error}", file=sys.stderr)
        return 2
    if name not in ("train", "eval"):
        wait_briefly()
    code: int = import_command(name).run(settings)
    return code


def parse(name: str, arguments: Sequence[str]) -> BaseSettings:
    """The settings of a command. Raises ValidationError, SettingsError and SystemExit."""
    given = list(arguments)
    if given and name in FIRST_ARGUMENT and not given[0].startswith("-"):
        given.insert(0, FIRST_ARGUMENT[name])
    return CliApp.run(COMMANDS[name], cli_args=given)


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
            return importlib.import_module(f"service.commands.{MODULES.get(name, name)}")
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


def _help() -> str:
    lines = [f"  {name:<10} {(model.__doc__ or '').strip().splitlines()[0]}"
             for name, model in COMMANDS.items()]  # fmt: skip
    return "\n".join(
        [
            "logitd: train a GPT, serve every number it computes.",
            "",
            "usage: logitd COMMAND [FLAGS]",
            "",
            *lines,
            "",
            "logitd COMMAND --help lists a command's flags. Each flag FLAG can also be set as",
            "LOGITD_FLAG in the environment or in a file .env.",
        ]
    )


if __name__ == "__main__":
    main()
