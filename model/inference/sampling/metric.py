"""Metric: a number computed from a row of logits, by which the cells of a sweep are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from logitd.model.inference.sampling.distribution import log_softmax

Metric = Literal["logit", "probability", "loss", "kl"]
TOKENS: Mapping[Metric, Sequence[str]] = {
    "logit": ("token", "minus"),
    "probability": ("token", "minus"),
    "loss": ("token",),
    "kl": (),
}
"""For each metric, the request fields of the tokens that it uses."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric with its tokens.

    metric     logit        logit of `token`, minus the logit of `minus` if given
               probability  the same with probabilities
               loss         minus the logprob of `token`, in nats
               kl           Kullback-Leibler divergence in nats: the sum of p log(p / q), with p
                            from `unchanged` and q from the row
    unchanged  logprobs (V,); None: the logprobs of the row itself
    """

    metric: Metric
    token: int | None = None
    minus: int | None = None
    unchanged: Any = None

    @property
    def columns(self) -> tuple[int, ...] | None:
        """The ids whose logits are needed; None: all."""
        if self.metric != "logit":
            return None
        return tuple(each for each in (self.token, self.minus) if each is not None)

    def of(self, logits: Any) -> float:
        """The metric of a row of logits (V,), or of only the logits of `columns`."""
        if self.metric == "logit":
            value, *minus = map(float, logits)
            return value - sum(minus)
        logprobs = log_softmax(logits)
        if self.metric == "kl":
            before = logprobs if self.unchanged is None else self.unchanged
            return float((np.exp(before) * (before - logprobs)).sum())
        if self.metric == "loss":
            return -float(logprobs[self.token])
        minus_prob = 0.0 if self.minus is None else float(np.exp(logprobs[self.minus]))
        return float(np.exp(logprobs[self.token])) - minus_prob
