"""TrainingView: draws a run on the terminal while it trains (`logitd train --watch`).

It redraws the loss curve, the newest figures, the time left and the newest samples in place. Other
events of the trainer are printed above it. In a resumed run, the earlier part of the curve comes
from the run's log.
"""

import time
from types import TracebackType

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from logitd.model.checkpoint.card_and_curve import read_curve
from logitd.model.training.events import (
    Evaluated,
    Event,
    Progress,
    Sampled,
    Saved,
    Started,
    duration,
    line,
)
from logitd.service.cli.terminal import visible

Points = dict[int, float]
"""Losses, each with its step."""

REDRAW = 0.25
"""Minimum time in seconds between two drawings."""
ROWS, SAMPLE_LINES = 10, 3
"""Height of the curve, and maximum height of a sample, in lines."""
AXIS = 9
"""Width of the curve's axis, in columns."""
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a Braille pattern, by row and column."""


class TrainingView:
    """A handler of a trainer's events, used in a `with` block. After the block, the last drawing
    stays on the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._training: Points = {}
        self._validation: Points = {}
        self._progress: Progress | None = None
        self._evaluated: Evaluated | None = None
        self._samples: list[Sampled] = []
        self._drawn = 0.0

    def __enter__(self) -> "TrainingView":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._draw()
        self._live.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case Progress(step, figures=figures):
                self._progress = event
                self._training[step] = figures.loss
            case Evaluated(step, loss):
                self._evaluated = event
                self._validation[step] = loss
            case Sampled(step):
                same = [each for each in self._samples if each.step == step]
                self._samples = [*same, event]
            case Saved():
                pass  # a line for each checkpoint would push everything else off the screen
            case _:
                if isinstance(event, Started):
                    curve = read_curve(event.run / "latest", None)
                    self._training |= {point.step: point.loss for point in curve.training}
                    self._validation |= {point.step: point.loss for point in curve.validation}
                self._console.print(Text(visible(line(event))))
        if time.monotonic() - self._drawn >= REDRAW:
            self._draw()

    def _draw(self) -> None:
        self._live.update(self.drawing(), refresh=True)
        self._drawn = time.monotonic()

    def drawing(self) -> RenderableType:
        """The curve, the figures and the samples. What does not exist yet is left out."""
        parts: list[RenderableType] = []
        width = self._console.width - AXIS
        if len(self._training) > 1 and width > 0:
            parts += [curve_text(self._training, self._validation, width)]
        if self._progress is not None:
            parts += [_figures(self._progress, self._evaluated)]
        for sample in self._samples:
            lines = visible(sample.prompt + sample.text).splitlines()[:SAMPLE_LINES]
            parts += [Text(f"step {sample.step:,}: ", "bold").append("\n".join(lines), "not bold")]
        return Group(*parts)


def _figures(progress: Progress, evaluated: Evaluated | None) -> Table:
    figures = progress.figures
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    validation = ""
    if evaluated is not None:
        validation = (
            f"  val loss {evaluated.val_loss:.4f}, {evaluated.val_bits_per_byte:.4f} bits per byte"
        )
    left = f"  {duration(progress.seconds_left)} left" if progress.share < 1 else ""
    table.add_row(
        f"step {progress.step:,}  {progress.share:4.0%}{left}",
        ProgressBar(total=1.0, completed=progress.share),
    )
    rates = f"lr x {figures.learning_rate:.2f}  {figures.tokens_per_second:,.0f} tok/s"
    loss = f"loss {figures.loss:.3f}{validation}"
    whole = Table.grid()
    whole.add_row(table)
    whole.add_row(f"{loss}  {rates}")
    return whole


def curve_text(training: Points, validation: Points, width: int) -> Text:
    """The training and validation losses by step, drawn as Braille dots: ROWS lines of `width`
    characters, after an axis of AXIS columns. The training loss is a line; the validation losses
    are dots in another color."""
    steps = sorted(training)
    first, last = steps[0], steps[-1]
    # The untrained model would flatten the curve.
    evaluated = {step: loss for step, loss in validation.items() if first <= step <= last and step}
    losses = [*training.values(), *evaluated.values()]
    low, high = min(losses), max(losses)
    places = np.linspace(first, last, 2 * width)
    interpolated = np.interp(places, steps, [training[step] for step in steps])
    dots = [(x, loss, "cyan") for x, loss in enumerate(interpolated.tolist())]
    for step, loss in evaluated.items():
        dots += [(int(np.searchsorted(places, step)), loss, "yellow")]
    cells = [[0] * width for _ in range(ROWS)]
    colors = [[""] * width for _ in range(ROWS)]
    for x, loss, color in dots:
        y = round((4 * ROWS - 1) * (high - loss) / ((high - low) or 1.0))
        cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
        colors[y // 4][x // 2] = color
    text = Text()
    for index, (row, shades) in enumerate(zip(cells, colors, strict=True)):
        value = high - (high - low) * index / (ROWS - 1)
        text.append(f"{value:{AXIS - 2}.3f}  ", "dim")
        for cell, color in zip(row, shades, strict=True):
            text.append(chr(BRAILLE + cell), color)
        text.append("\n" if index < ROWS - 1 else "")
    return text
