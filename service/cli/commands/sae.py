"""`logitd sae train`: trains a sparse autoencoder on the values of a stage, and prints measures of
its quality."""

import json
import sys
from dataclasses import asdict

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.data.errors import DataError
from logitd.model.data.sources.download import Downloaded, Downloading
from logitd.model.data.sources.read_options import ReadOptions
from logitd.model.device import DeviceError
from logitd.model.extraction.errors import ExtractionError
from logitd.model.files import FileError
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.kernels.select import KernelError
from logitd.model.inference.options import ComputeOptions
from logitd.model.sae.files import AutoencoderError
from logitd.model.sae.training.fit import Fitting
from logitd.model.sae.training.run import Trained, TrainingRequest, train_autoencoder
from logitd.model.training.events import duration, line
from logitd.service.cli.busy import busy_notice
from logitd.service.cli.program_name import command
from logitd.service.cli.terminal import ProgressLine, say
from logitd.service.settings.sae import SaeSettings

ERRORS = (
    AutoencoderError,
    CheckpointError,
    DataError,
    DeviceError,
    ExtractionError,
    FileError,
    InvalidRequest,
    KernelError,
)


def run(settings: SaeSettings) -> int:
    progress = ProgressLine(sys.stderr, "logitd sae: ")
    if notice := busy_notice():
        progress.say(notice)
    result = train_autoencoder(
        settings.checkpoint,
        settings.data,
        settings.out,
        TrainingRequest(
            stage=settings.stage,
            features=settings.features,
            k=settings.k,
            minutes=settings.minutes,
            tokens=settings.tokens,
            seed=settings.seed,
        ),
        options=ComputeOptions.of(settings),
        reading=ReadOptions.of(settings),
        log=progress.say,
        tell=lambda event: progress.show(_line(event)),
    )
    progress.end()
    if settings.as_json:
        figures = result.figures.to_dict()
        facts = {**asdict(result), "path": str(result.path), "figures": figures}
        say(json.dumps(facts, allow_nan=False))
        return 0
    for name, value in _rows(result):
        say(f"{name:<20}{value}")
    served = command("serve", settings.checkpoint, "--sae", f"{result.path.name}={result.path}")
    say(f"\nserve it:  {served}")
    return 0


def _line(event: Fitting | Downloading | Downloaded) -> str:
    if not isinstance(event, Fitting):
        return line(event)
    return (
        f"{event.share:4.0%}  {event.tokens:,} tokens  explained {event.explained:.1%}  dead "
        f"{event.dead:.1%}  {event.tokens_per_second:,.0f} tok/s  "
        f"{duration(event.seconds_left)} left"
    )


def _rows(result: Trained) -> list[tuple[str, str]]:
    figures = result.figures
    return [
        ("autoencoder", f"{result.path}, {result.features:,} features of {result.stage}"),
        ("trained", f"on {result.tokens:,} tokens, {result.seconds:.0f} s with measuring"),
        ("explained variance", f"{figures.explained_variance:.1%}"),
        ("active features", f"{figures.active:.1f} per token (k {result.k})"),
        ("dead features", f"{figures.dead:.1%}"),
        (
            "loss recovered",
            f"{figures.loss_recovered:.1%} ({figures.loss:.4f} nats per token, rebuilt "
            f"{figures.loss_reconstructed:.4f}, zeroed {figures.loss_zero:.4f})",
        ),
    ]
