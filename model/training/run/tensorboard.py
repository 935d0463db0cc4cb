"""TensorBoard: also writes the curves and samples of a run as TensorBoard events.

The event files are in the folder `tensorboard` of the run. When the run is resumed, events after
the saved state are purged. This needs the optional package tensorboard. metrics.jsonl and
samples.txt have the same data.
"""

from typing import TYPE_CHECKING

from logitd.model.extras import installation
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.events import Evaluated, Event, EventHandler, Progress, Sampled, Started

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard:
    """An event handler that passes each event to `report`. From `Started` on, it also writes the
    events for TensorBoard."""

    def __init__(self, report: EventHandler) -> None:
        self._report = report
        self._writer: SummaryWriter | None = None
        self._sampled: tuple[int, int] = (-1, 0)  # step, number of its samples

    def __call__(self, event: Event, /) -> None:
        self._report(event)
        if isinstance(event, Started):
            self._writer = require_tensorboard()(
                log_dir=str(event.run / FOLDER), purge_step=event.step + 1 if event.step else None
            )
        if self._writer is None:
            return
        match event:
            case Progress(step, _, figures):
                for tag, value in (
                    ("loss/train", figures.loss),
                    ("learning_rate/share_of_peak", figures.learning_rate),
                    ("gradient_norm", figures.gradient_norm),
                    ("tokens_per_second", figures.tokens_per_second),
                ):
                    self._writer.add_scalar(tag, value, step)
            case Evaluated(step, loss, bits):
                self._writer.add_scalar("loss/validation", loss, step)
                self._writer.add_scalar("bits_per_byte/validation", bits, step)
                self._writer.flush()
            case Sampled(step, prompt, text):
                count = self._sampled[1] + 1 if self._sampled[0] == step else 1
                self._sampled = step, count
                indented = "    " + (prompt + text).replace("\n", "\n    ")  # shown verbatim
                self._writer.add_text(f"sample/{count}", indented, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def require_tensorboard() -> "type[SummaryWriter]":
    """Import the writer. Raises TrainingError with installation instructions if it is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainingError(
            "--tensorboard needs the package tensorboard, which is not installed. Remove the flag "
            "(metrics.jsonl and loss.png have the same numbers), or run: "
            f"{installation('tensorboard')}"
        ) from error
    return SummaryWriter
