"""`logitd train`: runs the trainer and prints its progress."""

import os
import sys
from contextlib import ExitStack

from rich.console import Console

from logitd.model.data.errors import DataError
from logitd.model.data.sources.download import Downloading
from logitd.model.device import DeviceError, keep_freed_memory
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.events import Event, EventHandler, Noticed, Progress, line
from logitd.model.training.stopping.signals import errors_outlive_sigterm
from logitd.model.training.trainer import train
from logitd.model.transformer.config import ConfigError
from logitd.service.cli.busy import busy_notice
from logitd.service.cli.commands.training_view import TrainingView
from logitd.service.cli.program_name import command
from logitd.service.cli.terminal import ProgressLine, say, tell
from logitd.service.settings.train import TrainSettings

ERRORS = DataError, TrainingError, ConfigError, DeviceError


class TerminalReporter:
    """Prints the trainer's events, one line each."""

    def __init__(self) -> None:
        self._lines = ProgressLine(sys.stdout)

    def __call__(self, event: Event) -> None:
        redraws = isinstance(event, Progress | Downloading) and self._lines.in_place
        (self._lines.redraw if redraws else self._lines.say)(line(event))


@errors_outlive_sigterm(TrainingError)
def run(settings: TrainSettings, began: float) -> int:
    """Train, and return the exit code. `began` is the time when the command started, in seconds on
    the monotonic clock."""
    keep_freed_memory()  # each step allocates and frees the same pieces of memory
    if settings.watch and not sys.stdout.isatty():
        tell(
            "train",
            "--watch draws on a terminal, but the output is not one: remove it, and read the lines",
        )
        return 2
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        with ExitStack() as stack:
            reporter: EventHandler = TerminalReporter()
            if settings.watch and is_main:
                reporter = stack.enter_context(TrainingView(Console(highlight=False)))
            if is_main and (notice := busy_notice()):
                reporter(Noticed(notice))
            result = train(settings, reporter, began)
    except ERRORS as error:  # print before a SIGTERM may end the process
        tell("train", str(error))
        return 1
    except KeyboardInterrupt:  # the second one; after the first, the trainer saves
        print("logitd train: stopped without saving", file=sys.stderr)
        return 130
    if result.rank > 0:  # only the main process prints
        return 0
    if result.reason == "interrupted":
        say(f"\nstopped at step {result.step:,}; continue with")
        say(f"           {command('train', '--resume', '--out', result.run)}")
    if result.adapter_of is not None:
        say(f"\nmerge it:  {command('merge', result.adapter_of, result.best, 'DEST')}")
    else:
        say(f"\nserve it:  {command('serve', result.run)}")
    return 0
