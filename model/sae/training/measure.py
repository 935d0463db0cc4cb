"""Measure: the quality of an autoencoder on held-out windows, and the facts about its features.

The loss recovered compares three losses of the model: unchanged, with the stage replaced by its
reconstruction, and with the stage set to zero.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from logitd.model.extraction.plan import Unit
from logitd.model.inference.engine.requests import ScoreRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.sae.files import FeatureFacts
from logitd.model.sae.training.activations import WINDOWS_AT_ONCE, Activations
from logitd.model.sae.training.fit import Length
from logitd.model.transformer.autoencoder import Autoencoder

FACTS_TOKENS = 2**18
"""Number of tokens after which the measurement of density and examples ends. It ends earlier if
the text has fewer tokens, because each window counts once."""
EXAMPLES, BEFORE, AFTER = 10, 16, 7
"""Number of examples per feature, and of tokens before and after the strongest token of each
example."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Measures of an autoencoder's quality.

    explained_variance  share of the variance of held-out values that the reconstruction explains
    active              mean number of nonzero features at a token (L0)
    dead                share of the features that are zero at all tokens used to measure the facts
    loss, loss_reconstructed, loss_zero
                        nats per token of the held-out windows
    loss_recovered      (loss_zero - loss_reconstructed) / (loss_zero - loss)
    """

    explained_variance: float
    active: float
    dead: float
    loss: float
    loss_reconstructed: float
    loss_zero: float

    @property
    def loss_recovered(self) -> float:
        gap = self.loss_zero - self.loss
        return (self.loss_zero - self.loss_reconstructed) / gap if gap else math.nan

    def to_dict(self) -> dict[str, float | None]:
        """All figures, for JSON. Non-finite figures become null."""
        figures = {**asdict(self), "loss_recovered": self.loss_recovered}
        return {name: x if math.isfinite(x) else None for name, x in figures.items()}


def stored_bytes(features: int, width: int) -> int:
    """Bytes of the arrays of a written autoencoder: its weights, and the facts about its
    features."""
    facts = 4 + 8 * EXAMPLES * (BEFORE + 1 + AFTER)
    return features * (4 * (2 * width + 1) + facts) + 4 * width


@torch.inference_mode()
def measure(
    autoencoder: Autoencoder, activations: Activations, windows: Iterator[Unit], length: Length
) -> tuple[Figures, FeatureFacts]:
    """Measure the quality on the held-out windows, and the facts on `windows`. The facts are
    complete after FACTS_TOKENS tokens, or earlier if `length` is reached."""
    facts = _facts(autoencoder, activations, windows, length)
    units = activations.held_out
    values = [torch.from_numpy(rows) for rows in activations.of_windows(units)]
    rebuilt, active = [], 0
    for rows in values:  # features of one window at a time are in memory
        features = autoencoder.encode(rows)
        active += int((features > 0).sum())
        rebuilt.append(autoencoder.decode(features))
    everything = torch.cat(values).double()
    squares = (everything - everything.mean(dim=0)).square().sum()
    error = sum((a.double() - b).square().sum() for a, b in zip(values, rebuilt, strict=True))
    stage = activations.stage
    replaced = [
        Intervention(
            stage=stage,
            operation="set",
            positions=tuple(range(len(rows))),
            values=rows.numpy(),
        )
        for rows in rebuilt
    ]
    zero = Intervention(stage=stage, operation="zero")
    figures = Figures(
        explained_variance=float(1 - error / squares),
        active=active / len(everything),
        dead=float((facts.density == 0).mean()),
        loss=_loss(activations, [()] * len(units)),
        loss_reconstructed=_loss(activations, [(change,) for change in replaced]),
        loss_zero=_loss(activations, [(zero,)] * len(units)),
    )
    return figures, facts


def _loss(activations: Activations, changes: Sequence[tuple[Intervention, ...]]) -> float:
    """Nats per token on the held-out windows. The entry of `changes` at a window's index is applied
    when that window is computed."""

    def request(request_id: str, unit: Unit) -> ScoreRequest:
        return ScoreRequest(
            request_id=request_id,
            token_ids=unit.token_ids,
            arrays=True,
            interventions=changes[int(request_id)],
        )

    chunks = activations.computer.chunks(activations.held_out, request)
    logprobs = [chunk.scores.logprobs for of_unit in chunks for chunk in of_unit]
    return float(-np.concatenate(logprobs).mean(dtype=np.float64))


def _facts(
    autoencoder: Autoencoder, activations: Activations, windows: Iterator[Unit], length: Length
) -> FeatureFacts:
    examples, once = _Examples(autoencoder.features), _each_once(windows)
    while examples.tokens < FACTS_TOKENS and (
        not examples.tokens or length.share(examples.tokens) < 1
    ):
        if not (group := list(islice(once, WINDOWS_AT_ONCE))):
            break
        for unit, rows in zip(group, activations.of_windows(group), strict=True):
            examples.add(unit.token_ids, autoencoder.encode(torch.from_numpy(rows)).numpy())
    return examples.facts()


def _each_once(windows: Iterable[Unit]) -> Iterator[Unit]:
    """Yield each of the windows, which repeat pass after pass, the first time that it occurs. End
    when all have occurred."""
    seen: set[tuple[int, int]] = set()
    repeated = 0  # windows since the last new one
    for unit in windows:
        if unit.place not in seen:
            seen.add(unit.place)
            repeated = 0
            yield unit
        elif (repeated := repeated + 1) > len(seen):  # a whole pass without a new window
            return


class _Examples:
    """The places at which each feature is strongest, at most one place per window."""

    def __init__(self, features: int) -> None:
        shape = (features, EXAMPLES, BEFORE + 1 + AFTER)
        self._strengths = np.zeros(shape[:2], dtype=np.float32)
        self._ids = np.full(shape, -1, dtype=np.int32)
        self._activations = np.zeros(shape, dtype=np.float32)
        self._active = np.zeros(features, dtype=np.int64)
        self.tokens = 0

    def add(self, token_ids: Sequence[int], features: Any) -> None:
        """Add a window with its features (tokens, F)."""
        self.tokens += len(features)
        self._active += (features > 0).sum(axis=0)
        strongest, weakest = features.max(axis=0), self._strengths.argmin(axis=1)
        chosen = np.flatnonzero(strongest > self._strengths.min(axis=1))
        ids = np.pad(np.array(token_ids, np.int32), (BEFORE, AFTER), constant_values=-1)
        padded = np.pad(features, ((BEFORE, AFTER), (0, 0)))
        around = features[:, chosen].argmax(axis=0)[:, None] + np.arange(BEFORE + 1 + AFTER)
        places = chosen, weakest[chosen]
        self._strengths[places] = strongest[chosen]
        self._ids[places] = ids[around]
        self._activations[places] = padded[around, chosen[:, None]]

    def facts(self) -> FeatureFacts:
        order = np.argsort(-self._strengths, axis=1, kind="stable")[..., None]
        return FeatureFacts(
            density=(self._active / self.tokens).astype(np.float32),
            ids=np.take_along_axis(self._ids, order, axis=1),
            activations=np.take_along_axis(self._activations, order, axis=1),
        )
