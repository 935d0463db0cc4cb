"""TensorBoard: the curves and samples of a run, written beside metrics.jsonl for those who watch
runs there.

A reporter around another: what the trainer tells goes to both. Event files stand in the run's
`tensorboard/`; of a run that is resumed, what was written after the saved state is purged. Needs
the optional package tensorboard, and writes nothing that metrics.jsonl and samples.txt do not hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from logitd.model.extras import installation
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.events import Evaluated, Event, EventHandler, Progress, Sampled, Started

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard:
    """Writes events, and hands each on."""

    def __init__(self, report: EventHandler) -> None:
        self._report = report
        self._writer: SummaryWriter | None = None
        self._sampled: tuple[int, int] = (-1, 0)  # step, samples of it

    def __call__(self, event: Event, /) -> None:
        self._report(event)
        if isinstance(event, Started):
            self._writer = require_tensorboard()(
                log_dir=str(event.run / FOLDER), purge_step=event.step + 1 if event.step else None
            )
        elif self._writer is not None:
            self._write(event, self._writer)

    def _write(self, event: Event, writer: "SummaryWriter") -> None:
        match event:
            case Progress():
                for name, value in (
                    ("loss/train", event.loss),
                    ("loss/train_smoothed", event.smoothed_loss),
                    ("learning_rate/share_of_peak", event.learning_rate),
                    ("gradient_norm", event.gradient_norm),
                    ("tokens_per_second", event.tokens_per_second),
                ):
                    writer.add_scalar(name, value, event.step)
            case Evaluated():
                writer.add_scalar("loss/validation", event.val_loss, event.step)
                writer.add_scalar("bits_per_byte/validation", event.val_bits_per_byte, event.step)
                writer.flush()
            case Sampled():
                step, count = self._sampled
                count = count if step == event.step else 0
                self._sampled = (event.step, count + 1)
                # Indented text is shown as it is.
                text = "\n".join("    " + line for line in (event.prompt + event.text).split("\n"))
                writer.add_text(f"sample/{count + 1}", text, event.step)
            case _:
                pass

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def require_tensorboard() -> "type[SummaryWriter]":
    """The writer, or a sentence about where it can be had."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainingError(
            "--tensorboard needs the package tensorboard, which is not installed: "
            f"{installation('tensorboard')}  Or leave the flag out: metrics.jsonl and "
            "loss.png hold the same numbers"
        ) from error
    return SummaryWriter


@contextmanager
def with_tensorboard(wanted: bool, report: EventHandler) -> Iterator[EventHandler]:
    """The reporter of a run, with TensorBoard's files beside it where they are wanted."""
    if not wanted:
        yield report
        return
    both = TensorBoard(report)
    try:
        yield both
    finally:
        both.close()
