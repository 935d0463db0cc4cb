"""Search: tries variants of a computation and compares their penalties.

It tries all combinations of the ambiguous fields if there is enough time; otherwise it changes one
field at a time until no change lowers the penalty. Then it changes every open field, one at a time,
starting from the best variants. `by_text.py` and `resolve.py` decide what the penalties prove.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from logitd.model.convert.by_role.build import build
from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.finding import FIELDS, Findings, canonical
from logitd.model.convert.by_role.objective import Effort, Objective
from logitd.model.convert.by_role.resolution import first
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError
from logitd.model.transformer.config import ConfigError

ORDERS = ("qkv_layout", "gate_order")
"""Fields that describe the order of rows. If one of them is wrong, all values of the other fields
look equally bad, so these fields are tried together with the ambiguous fields."""
TOGETHER = (("positions", "rotary_layout", "rotary_direction"), ("score_scale", "qk_norm"))
"""Groups of fields that the search sets together. With a wrong layout or direction, rotary
positions are often worse than none, and without rotary positions all layouts and directions are
equal. Norms of queries and keys change how large scores are, and so does their scale."""
SEARCH_SECONDS = 30.0
"""Approximate time limit, in seconds, for trying all combinations. If they would take longer, the
search changes one field at a time."""
CLEAR_NATS, CLEAR_ERRORS = 0.005, 2.0
"""A variant is clearly worse if its loss is higher by more than the first number, in nats per
token, and by more than the second, in standard errors of the mean difference. The standard error
alone does not suffice: for a model that had learned little, a wrong activation had a loss lower by
0.004 nats per token, however many tokens were measured. For trained models, the right variants had
losses lower by 0.02 to 0.8 nats per token."""


class Search:
    def __init__(
        self,
        tensors: MappedTensors,
        findings: Findings,
        objective: Objective,
        seconds: float = SEARCH_SECONDS,
    ) -> None:
        self._tensors, self._findings, self._objective = tensors, findings, objective
        self._seconds = seconds
        self._scores: dict[tuple[Computation, Effort], Tensor | None] = {}
        self._reason: Exception | None = None
        self.open = [name for name in FIELDS if not findings[name].resolved]
        self.ambiguous = [name for name in self.open if findings[name].ambiguous]

    def score(self, how: Computation, effort: Effort) -> Tensor | None:
        """The penalties of a variant, which are cached; None if the variant cannot be built."""
        key = canonical(how), effort
        if key not in self._scores:
            self._scores[key] = self._compute(*key)
        return self._scores[key]

    def _compute(self, how: Computation, effort: Effort) -> Tensor | None:
        try:
            return self._objective(build(self._tensors, how), causal=how.causal, effort=effort)
        except (ConfigError, ConvertError) as error:
            self._reason = error
            return None

    def mean(self, how: Computation, effort: Effort = "quick") -> float:
        scores = self.score(how, effort)
        mean = math.inf if scores is None else float(scores.mean())
        return mean if math.isfinite(mean) else math.inf

    def compare(
        self, other: Computation, best: Computation, effort: Effort = "full"
    ) -> tuple[float, bool]:
        """The difference of mean penalties, `other` minus `best`, and True if `other` is clearly
        worse."""
        penalties, base = self.score(other, effort), self.score(best, effort)
        if penalties is None or not torch.isfinite(penalties).all():
            return math.inf, True
        if base is None or not torch.isfinite(base).all():
            return -math.inf, False  # a variant that cannot be computed is not better
        difference = penalties - base
        mean = float(difference.mean())
        count = max(1, min(len(difference), self._objective.distinct))
        error = float(difference.std()) / math.sqrt(count)
        return mean, mean > max(CLEAR_NATS, CLEAR_ERRORS * error)

    def best(self) -> Computation:
        """The variant with the lowest penalty in quick measurements. Raises ConvertError if no
        variant can be built."""
        start = first(self._findings)
        self._compute(start, "quick")  # the first call includes torch's start
        began = time.monotonic()
        self.mean(start)
        seconds = max(1e-3, time.monotonic() - began)
        together = self.ambiguous + [
            name for name in self.open if name in ORDERS and name not in self.ambiguous
        ]
        starts = self._products(start, together)
        if len(starts) * seconds <= self._seconds:
            ranked = sorted(starts, key=self.mean)[:2]
        else:
            # These fields have the largest effect on the best values of the others.
            deciding = [name for name in together if name in (*ORDERS, "norm_position")]
            ranked = [self._descend(how, together) for how in self._products(start, deciding)]
        best = min((self._descend(how, self.open) for how in ranked), key=self.mean)
        if self.mean(best) == math.inf:
            raise self._reason or ConvertError(
                f"{self._tensors.where}: no variant computes finite numbers"
            )
        return canonical(best)

    def _products(self, start: Computation, names: Sequence[str]) -> list[Computation]:
        values = [self._findings[name].values for name in names]
        choices = (dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values))
        return list(dict.fromkeys(canonical(replace(start, **choice)) for choice in choices))

    def _descend(self, how: Computation, names: Sequence[str]) -> Computation:
        """Set each of these fields in turn to its best value until no change lowers the penalty."""
        best, improved = how, True
        while improved:
            improved = False
            for name in names:
                together = next((group for group in TOGETHER if name in group), (name,))
                for other in self._products(best, together):
                    if self.mean(other) < self.mean(best):
                        best, improved = other, True
        return best

    def neighbors(self, how: Computation, name: str) -> list[Computation]:
        """The variants with other values of the field `name`, if they compute something different
        from `how`."""
        others = [canonical(replace(how, **{name: value})) for value in self._findings[name].values]
        return [other for other in dict.fromkeys(others) if other != canonical(how)]
