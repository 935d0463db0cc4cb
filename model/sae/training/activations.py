"""Activations for training: an endless stream of a stage's values on a text, in random order.

The text is cut into windows of the model's context, or of LONGEST tokens if the context is longer
(`model/extraction/plan.py`). Some windows are held out. The others pass first through a buffer that
shuffles windows, then through an extraction engine, and last through a buffer that shuffles
positions. When the end of the text is reached, it is read again from the start. So the memory used
does not depend on the size of the text. The order is a function of the seed.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.data.sources.document import Text
from logitd.model.extraction.compute import ShardComputer
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.plan import DataReader, Unit, choose_windows, units_of
from logitd.model.extraction.quantities import Stages

HELD_OUT = 32
"""Maximum number of windows that are held out."""
SHUFFLED_WINDOWS = 2048
SHUFFLED_POSITIONS = 2**15
SHUFFLED_BYTES = 2**28
"""Size, in bytes, at which the buffer that shuffles positions is full. It is filled with at least
two batches, even if they are larger."""
WINDOWS_AT_ONCE = 32
LONGEST = 1024
"""Maximum number of tokens of a window. Many windows are in memory at once, and the measurement has
all features of a window at once."""
SHORTEST = 8
"""Minimum number of tokens of a held-out window."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Activations:
    """The values of a stage at each token of a text."""

    computer: ShardComputer
    stage: str
    checkpoint: CheckpointInfo
    text: Text
    held_out: tuple[Unit, ...]

    @classmethod
    def of(
        cls, computer: ShardComputer, stage: str, checkpoint: CheckpointInfo, text: Text
    ) -> "Activations":
        """Choose the held-out windows, spread over the beginning of the text. Raises
        ExtractionError if there are too few."""
        first = [
            unit
            for unit in islice(_windows(checkpoint, text), SHUFFLED_WINDOWS)
            if len(unit.token_ids) >= SHORTEST
        ]
        if len(first) < 2:
            raise ExtractionError(
                f"{text.name} has {len(first)} windows of at least {SHORTEST} tokens; training "
                "and the held-out text need at least one each: use more text"
            )
        step = max(2, len(first) // HELD_OUT)
        return cls(computer, stage, checkpoint, text, tuple(first[step - 1 :: step][:HELD_OUT]))

    def windows(self, seed: int) -> Iterator[Unit]:
        """Yield shuffled windows for training, endlessly."""
        held_out, rng = {unit.place for unit in self.held_out}, random.Random(seed)
        while True:
            units = _windows(self.checkpoint, self.text)
            kept = (unit for unit in units if unit.place not in held_out)
            yield from _shuffled(kept, SHUFFLED_WINDOWS, rng)

    def of_windows(self, units: Sequence[Unit]) -> list[npt.NDArray[np.float32]]:
        """The values (tokens, D) of each window."""
        chunks = self.computer.chunks(units, Stages((self.stage,)).request)
        return [np.concatenate([chunk.rows for chunk in of_unit]) for of_unit in chunks]

    def batches(self, windows: Iterator[Unit], size: int, seed: int) -> Iterator[Tensor]:
        """Yield values (size, D) from random windows and positions, endlessly."""
        generator = torch.Generator().manual_seed(seed)
        buffer = torch.empty(0)
        while True:
            while len(buffer) < 2 * size or (
                len(buffer) < SHUFFLED_POSITIONS and 4 * buffer.numel() < SHUFFLED_BYTES
            ):
                units = list(islice(windows, WINDOWS_AT_ONCE))
                added = torch.from_numpy(np.concatenate(self.of_windows(units)))
                buffer = torch.cat([buffer, added]) if len(buffer) else added
            buffer = buffer[torch.randperm(len(buffer), generator=generator)]
            mixed = len(buffer) // 2 // size * size
            yield from buffer[:mixed].split(size)
            buffer = buffer[mixed:]


def _windows(checkpoint: CheckpointInfo, text: Text) -> Iterator[Unit]:
    longest = min(LONGEST, checkpoint.shape.context_length)
    windows = choose_windows(longest, None, predicts=False)
    reader = DataReader(text.documents)
    return units_of(reader, checkpoint.tokenizer, windows, special_ids=checkpoint.special_ids)


def _shuffled(items: Iterable[Item], size: int, rng: random.Random) -> Iterator[Item]:
    """Shuffle items through a buffer that holds `size` of them."""
    held: list[Item] = []
    for item in items:
        held.append(item)
        if len(held) > size:
            index = rng.randrange(size)
            held[index], held[-1] = held[-1], held[index]
            yield held.pop()
    rng.shuffle(held)
    yield from held
