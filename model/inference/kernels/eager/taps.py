"""Taps of inference: what records stages and carries out interventions.

`Changes` are the interventions of one sequence, with their values where the model computes.
`PieceTap` shows a forward over a piece of one prompt to them and keeps what is recorded after they
are done; `RowTaps` does the same for a decode step, a row of each of several sequences. All but
`Changes` live for one forward.

Shapes: T positions of a piece, H heads, S keys.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.inference.interventions import Intervention
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import match_stages
from logitd.model.transformer.tap import HEADS_FIRST

Key = tuple[int | None, str]
"""A stage of a model: its block, and its name there."""
OVER_KEYS = frozenset(("attention.scores", "attention.probs"))
"""Stages whose last axis is the keys, computed a block of positions at a time."""


class _Change:
    """One intervention, with its values on the model's device and in its dtype."""

    def __init__(self, intervention: Intervention, like: Tensor) -> None:
        self.intervention = intervention
        values = intervention.values
        self._values = None if values is None else torch.from_numpy(values).to(like)
        self._heads = None if intervention.heads is None else list(intervention.heads)

    def apply(self, value: Tensor, positions: range, prompt_length: int) -> Tensor:
        """The changed value (positions, ...), or `value` itself where none of the positions is
        meant."""
        intervention = self.intervention
        rows = [
            row
            for row, position in enumerate(positions)
            if intervention.covers(position, prompt_length)
        ]
        if not rows:
            return value
        chosen = value[rows] if self._heads is None else value[rows][:, self._heads]
        width = chosen.shape[-1]  # of stages over keys, more or fewer than values have
        changed = chosen.clone()
        match intervention.operation:
            case "zero":
                changed.zero_()
            case "scale":
                changed *= intervention.factor
            case "add":
                values = self._rows(positions, rows)
                changed[..., : values.shape[-1]] += intervention.factor * values[..., :width]
            case "set":
                values = self._rows(positions, rows)
                changed[..., : values.shape[-1]] = values[..., :width]
        result = value.clone()
        if self._heads is None:
            result[rows] = changed
        else:
            result[torch.tensor(rows)[:, None], self._heads] = changed
        return result

    def _rows(self, positions: range, rows: list[int]) -> Tensor:
        """The values for these rows: (1, ...) or (rows, ...)."""
        values = self._values
        assert values is not None
        if len(values) > 1:
            meant = self.intervention.positions
            assert not isinstance(meant, str)
            values = values[[meant.index(positions[row]) for row in rows]]
        return values


class Changes:
    """The interventions of one sequence, by the stages that they change."""

    def __init__(
        self,
        interventions: Iterable[Intervention],
        prompt_length: int,
        config: GPTConfig,
        like: Tensor,
    ) -> None:
        self._prompt_length = prompt_length
        self._changes: defaultdict[Key, list[_Change]] = defaultdict(list)
        for intervention in interventions:
            (stage,) = match_stages([intervention.stage], config)
            self._changes[stage.layer, stage.kind.name].append(_Change(intervention, like))

    def __contains__(self, key: Key) -> bool:
        return key in self._changes

    def apply(self, key: Key, value: Tensor, positions: range) -> Tensor:
        """The changed value (positions, ...), or `value` itself where nothing is changed."""
        changed = value
        for change in self._changes.get(key, ()):
            changed = change.apply(changed, positions, self._prompt_length)
        if changed is not value and key[1] in OVER_KEYS:  # what is not seen stays unseen
            keys = torch.arange(value.shape[-1], device=value.device)
            seen = keys <= torch.tensor(positions, device=value.device)[:, None]  # (T, S)
            changed = torch.where(seen[:, None], changed, value)
        return changed


class PieceTap:
    """The stages of a forward over positions [start, start + T) of one prompt."""

    def __init__(
        self,
        start: int,
        changes: Changes | None,
        record: Collection[Key] = (),
        *,
        rows: Sequence[int] = (),
        length: int = 0,
    ) -> None:
        """`record` names what is kept, of the `rows` (ascending indices of the piece's positions);
        `length` is the prompt's, for stages over its keys."""
        self._start = start
        self._changes = changes
        self._rows = list(rows)
        self._length = length
        self._kept: dict[Key, list[Tensor]] = {key: [] for key in record}

    def wants(self, layer: int | None, stage: str) -> bool:
        key = layer, stage
        return key in self._kept or (self._changes is not None and key in self._changes)

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        key = layer, stage
        if not self.wants(layer, stage):
            return value
        shown = _positions_first(stage, value[0])  # (T, ...)
        changed = shown
        if self._changes is not None:
            first = self._start + offset
            changed = self._changes.apply(key, shown, range(first, first + len(shown)))
        if key in self._kept:
            self._keep(key, changed, offset)
        return value if changed is shown else _positions_first(stage, changed)[None]

    def recorded(self, layer: int | None, stage: str) -> Tensor:
        """What was kept of a stage: (rows, ...)."""
        return torch.cat(self._kept[layer, stage])

    def _keep(self, key: Key, value: Tensor, offset: int) -> None:
        rows = [row - offset for row in self._rows if offset <= row < offset + len(value)]
        kept = value[rows]
        if key[1] in OVER_KEYS:
            unseen = float("-inf") if key[1] == "attention.scores" else 0.0
            room = self._length - kept.shape[-1]
            kept = F.pad(kept, (0, max(0, room)), value=unseen)[..., : self._length]
        self._kept[key].append(kept)


class RowTaps:
    """The stages of a decode step: a row of each of several sequences, at a position each. Rows
    behind them are padding."""

    def __init__(self, rows: Sequence[tuple[Changes, int]]) -> None:
        self._rows = rows

    def wants(self, layer: int | None, stage: str) -> bool:
        return any((layer, stage) in changes for changes, _ in self._rows)

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
        """The tap of one row, to be shown a value (1, ...)."""
        changes, position = self._rows[index]
        return PieceTap(position, changes)


def _positions_first(stage: str, value: Tensor) -> Tensor:
    """(heads, T, ...) and (T, heads, ...) into each other; what heads do not compute as it is."""
    return value.transpose(0, 1) if stage in HEADS_FIRST else value
