"""Events of a run, one small dataclass for each kind.

`train` calls an `EventHandler` with each event, in order, in the thread that trains. `line` formats
an event as text.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitd.model.data.sources.download import Downloaded, Downloading
from logitd.model.device import Placement, describe
from logitd.model.plural import pluralize
from logitd.model.training.run.step_log import Figures


@dataclass(frozen=True)
class Prepared:
    """The text was tokenized. `data` is its description in checkpoints."""

    data: Mapping[str, Any]
    vocab_size: int


@dataclass(frozen=True)
class Started:
    """Training begins at `step`: 0, or the step at which a resumed run continues."""

    run: Path
    parameters: int
    step: int
    steps: int | None  # None: the clock ends the run
    placement: Placement
    processes: int
    sharded: bool
    export: str  # with --exportable: a sentence about the formats of `logitd export`


@dataclass(frozen=True)
class Progress:
    """Progress of the run, every `log_every` steps."""

    step: int
    share: float  # completed share of the run, 0 to 1
    figures: Figures
    seconds_left: float


@dataclass(frozen=True)
class Evaluated:
    step: int
    val_loss: float
    val_bits_per_byte: float
    is_best: bool


@dataclass(frozen=True)
class Sampled:
    step: int
    prompt: str
    text: str  # without the prompt


@dataclass(frozen=True)
class Saved:
    step: int
    path: Path


@dataclass(frozen=True)
class Noticed:
    message: str


Event = (
    Downloading | Downloaded | Prepared | Started | Progress | Evaluated | Sampled | Saved | Noticed
)


EventHandler = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """Do nothing: the default handler."""


def line(event: Event) -> str:
    """Format an event as a line of plain text. Started may take two lines, and Sampled several."""
    match event:
        case Downloading(url, done, total):
            share = "" if total is None else f" of {total / 1e6:,.1f} MB, {done / total:.0%}"
            return f"downloading {url}: {done / 1e6:,.1f}{share or ' MB'}"
        case Downloaded(url, size, path, from_cache):
            action = "already downloaded to" if from_cache else "downloaded to"
            return f"{url}: {size:,} bytes, {action} {path}"
        case Prepared(data, vocab_size):
            return (
                f"text: {data['name']}, {data['bytes']:,} bytes, {data['train_tokens']:,} + "
                f"{data['val_tokens']:,} tokens of a vocabulary of {vocab_size:,}"
            )
        case Started():
            length = "until the time is up" if event.steps is None else f"to step {event.steps:,}"
            processes = f" in each of {event.processes} processes" if event.processes > 1 else ""
            processes += " that share the model" if event.sharded else ""
            placement = event.placement
            return (
                f"training {event.parameters:,} parameters from step {event.step:,} {length} on "
                f"{describe(placement.device)}, {placement.dtype_name}, "
                f"{pluralize(placement.threads, 'thread')}{processes}, in {event.run}"
                + (f"\n{event.export}" if event.export else "")
            )
        case Progress(step, share, figures, seconds_left):
            return (
                f"step {step:>6,}  {share:4.0%}  loss {figures.loss:.3f}  "
                f"lr x {figures.learning_rate:.2f}  grad {figures.gradient_norm:.2f}  "
                f"{figures.tokens_per_second:,.0f} tok/s  "
                f"mfu {figures.matrix_share:.0%}  {duration(seconds_left)} left"
            )
        case Evaluated(step, loss, bits, is_best):
            mark = "  (best)" if is_best else ""
            return f"step {step:>6,}  val loss {loss:.4f}  {bits:.4f} bits per byte{mark}"
        case Sampled(step, prompt, text):
            return f"step {step:>6,}  sample: {prompt}{text}"
        case Saved(step, path):
            return f"step {step:>6,}  saved {path}"
        case Noticed(message):
            return message


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
