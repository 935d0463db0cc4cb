"""Inference taps: they record stages and apply interventions.

`Changes` holds the interventions of one sequence, with their values on the model's device.
`PieceTap` applies them to the forward pass of a piece of a prompt, and records stages after the
changes. `RowTaps` applies the changes of several sequences to a decode step with one row per
sequence. A tap is used for one forward pass, `Changes` for a whole sequence.

Features are computed from the stage that their autoencoder reads, after any changes to it.
If features change, the difference times the autoencoder's decoder matrix is added to the stage.

Shapes: T positions of a piece, H heads, S keys.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.device import one_thread
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.kernels.eager.change import AppliedChange
from logitd.model.transformer.autoencoder import Autoencoder
from logitd.model.transformer.config import GPTConfig, ModelConfig
from logitd.model.transformer.stages import HEADS_FIRST, Key, match_stages

OVER_KEYS = frozenset(("attention.scores", "attention.probs"))
"""Stages whose last axis is over keys. They are computed in blocks of positions."""
Readers = Mapping[Key, Sequence[tuple[Key, Autoencoder]]]
"""The autoencoders that read a stage, each with the stage of its features."""
NO_READERS: Readers = MappingProxyType({})


class Changes:
    """The interventions of one sequence, grouped by the stage that they change."""

    def __init__(
        self,
        interventions: Iterable[Intervention],
        prompt_length: int,
        config: ModelConfig,
        like: Tensor,
    ) -> None:
        self._config = config
        self._prompt_length = prompt_length
        self._changes: defaultdict[Key, list[AppliedChange]] = defaultdict(list)
        for intervention in interventions:
            (stage,) = match_stages([intervention.stage], config)
            values_like = like.new_empty(0, dtype=torch.float32) if stage.has_features else like
            self._changes[stage.key].append(AppliedChange(intervention, values_like))

    @property
    def keys(self) -> Collection[Key]:
        """The stages that are changed."""
        return self._changes.keys()

    def __contains__(self, key: Key) -> bool:
        return key in self._changes

    def apply(self, key: Key, value: Tensor, positions: range) -> Tensor:
        """Return the changed value (positions, ...), or `value` itself if nothing changes."""
        meant = [
            (change, rows)
            for change in self._changes.get(key, ())
            if (rows := change.rows(positions, self._prompt_length))
        ]
        if not meant:
            return value
        changed = value.clone()
        # The operations are elementwise, so one thread gives the same bits and saves the
        # synchronization after each change.
        with one_thread():
            for change, rows in meant:
                change.apply(changed, positions, rows)
        if _is_over_keys(key):  # keys that a position does not see stay masked
            before = torch.tensor(positions, device=value.device)[:, None] - torch.arange(
                value.shape[-1], device=value.device
            )  # (T, S)
            seen = (before >= 0) & (before < self._visible(key[0]))
            changed = torch.where(seen[:, None], changed, value)
        return changed

    def _visible(self, layer: int | None) -> int:
        """Number of positions that a position of a layer attends to, including itself."""
        config = self._config
        window = (
            config.window(layer) if isinstance(config, GPTConfig) and layer is not None else None
        )
        return window or config.context_length


class PieceTap:
    """A tap on the forward pass of positions [start, start + T) of one prompt."""

    def __init__(
        self,
        start: int,
        changes: Changes | None,
        record: Collection[Key] = (),
        *,
        rows: Sequence[int] = (),
        length: int = 0,
        readers: Readers = NO_READERS,
    ) -> None:
        """`record` lists the stages to keep, and `rows` the ascending indices of the positions to
        keep. `length` is the length of the prompt, to which axes over keys are padded."""
        self._start = start
        self._changes = changes
        self._rows = list(rows)
        self._length = length
        self._readers = readers
        self._kept: dict[Key, list[Tensor]] = {key: [] for key in record}

    def wants(self, layer: int | None, stage: str) -> bool:
        key = layer, stage
        return self._uses(key) or any(self._uses(each) for each, _ in self._readers.get(key, ()))

    def _uses(self, key: Key) -> bool:
        return key in self._kept or (self._changes is not None and key in self._changes)

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        key = layer, stage
        if not self.wants(layer, stage):
            return value
        shown = _positions_first(key, value[0])  # (T, ...)
        changed = self._changed(key, shown, offset)
        for features, autoencoder in self._readers.get(key, ()):
            if self._uses(features):
                changed = self._through(features, autoencoder, changed, offset)
        if key in self._kept:
            self._keep(key, changed, offset)
        return value if changed is shown else _positions_first(key, changed)[None]

    def _changed(self, key: Key, value: Tensor, offset: int) -> Tensor:
        if self._changes is None:
            return value
        first = self._start + offset
        return self._changes.apply(key, value, range(first, first + len(value)))

    def _through(
        self, features: Key, autoencoder: Autoencoder, value: Tensor, offset: int
    ) -> Tensor:
        """Record and change the features of a stage's values (T, D). Returns the resulting values
        of the stage, or `value` itself if no feature changes."""
        encoded = autoencoder.encode(value)
        changed = self._changed(features, encoded, offset)
        if features in self._kept:
            self._keep(features, changed, offset)
        return value if changed is encoded else autoencoder.moved(value, changed - encoded)

    def recorded(self, layer: int | None, stage: str) -> Tensor:
        """The recorded rows of a stage: (rows, ...)."""
        return torch.cat(self._kept[layer, stage])

    def _keep(self, key: Key, value: Tensor, offset: int) -> None:
        rows = [row - offset for row in self._rows if offset <= row < offset + len(value)]
        kept = value[rows]
        if _is_over_keys(key):
            unseen = float("-inf") if key[1] == "attention.scores" else 0.0
            room = self._length - kept.shape[-1]
            kept = F.pad(kept, (0, max(0, room)), value=unseen)[..., : self._length]
        self._kept[key].append(kept)


class RowTaps:
    """A tap on a decode step with one row per sequence, each with its own changes and position.
    Additional rows are padding."""

    def __init__(self, rows: Sequence[tuple[Changes, int]], readers: Readers = NO_READERS) -> None:
        self._rows = rows
        self._readers = readers

    def wants(self, layer: int | None, stage: str) -> bool:
        return any(self.row(row).wants(layer, stage) for row in range(len(self._rows)))

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        changed = value
        for row in range(len(self._rows)):
            before = value[row : row + 1]
            after = self.row(row)(layer, stage, before)
            if after is not before:
                if changed is value:
                    changed = value.clone()
                changed[row] = after[0]
        return changed

    def row(self, index: int) -> PieceTap:
        """The tap of one row, for stages of shape (1, ...)."""
        changes, position = self._rows[index]
        return PieceTap(position, changes, readers=self._readers)


def _is_over_keys(key: Key) -> bool:
    layer, name = key
    return layer is not None and name in OVER_KEYS


def _positions_first(key: Key, value: Tensor) -> Tensor:
    """Convert (heads, T, ...) to (T, heads, ...) and back. Stages without a heads axis stay as they
    are."""
    layer, name = key
    return value.transpose(0, 1) if layer is not None and name in HEADS_FIRST else value
