"""Resolve: one computation out of all that a file leaves open.

Answers come from, in this order: the file (`questions.py`), the user, agreement with the owner's
code, or clearly the lowest loss on a text. Without code and text, an ambiguous field stops the
import. Only unambiguous fields fall back to a convention; it is reported, and compared with other
values if there is an objective.

The search tries all values of the ambiguous fields together if there are not too many, else field
by field until nothing improves; then every open field again around the best.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitd.model.convert.by_role.build import build
from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.objective import (
    Effort,
    LogitsObjective,
    Objective,
    TextObjective,
    logits_of,
    open_gpt,
)
from logitd.model.convert.by_role.questions import (
    FIELDS,
    Finding,
    Findings,
    canonical,
    without_unused,
)
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError
from logitd.model.transformer.config import ConfigError

ORDERS = ("qkv_layout", "gate_order")
"""Fields of row orders. With a wrong one no value of another field looks better than the rest, so
these are tried together with the ambiguous fields."""
SEARCH_SECONDS = 30.0
"""Approximate limit for all values together; above it the search goes field by field."""
CLEAR_NATS, CLEAR_ERRORS = 0.005, 2.0
"""Nats per token, and standard errors of the tokenwise difference, by which a loss must be lower to
decide. Errors alone do not suffice: on a model that learned little, a wrong activation had
a loss lower by 0.004 nats, however many tokens were tried. Right variants of models that learned
were better by 0.02 to 0.8."""
SAME_LOGITS = 0.01
"""Largest difference of logits at which variants that a text cannot tell apart count as equal."""


@dataclass(frozen=True)
class Alternative:
    """Another value of one field, its penalty, and whether it is clearly worse than the best."""

    field: str
    value: Any
    penalty: float
    clear: bool


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A computation with the reason for each field.

    penalty        the best variant's loss (nats per token) or largest difference of logits
    alternatives   the other values that were tried, for the table
    verified       one sentence: how well the result is known to agree with the source
    """

    computation: Computation
    origins: Mapping[str, str]
    verified: str
    penalty: float | None = None
    alternatives: Sequence[Alternative] = ()


class OpenQuestions(ConvertError):
    """Fields that nothing resolves; the message lists them with the flags that answer them."""

    def __init__(self, message: str, fields: Sequence[str]) -> None:
        super().__init__(message)
        self.fields = tuple(fields)


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def answer(findings: Findings, answers: Mapping[str, Any], place: str = "") -> dict[str, Finding]:
    """The findings with the user's answers, which override the file. `place` is a map file; without
    it, answers are flags."""
    given = {
        field: Finding((value,), f"{field} in {place}" if place else flag(field))
        for field, value in answers.items()
    }
    return without_unused({**findings, **given})


def resolve(
    tensors: MappedTensors,
    findings: Findings,
    objective: Objective | None = None,
) -> Resolution:
    """One computation. Raises OpenQuestions, and ConvertError if no variant agrees."""
    if findings["causal"].values == (False,):
        raise ConvertError(
            f"{tensors.where}: causal is false ({findings['causal'].origin}): a model whose "
            "positions see later ones is not a GPT and cannot generate"
        )
    if isinstance(objective, LogitsObjective):
        return _by_logits(tensors, findings, objective)
    if objective is not None:
        return _ByText(tensors, findings, objective).resolution()
    if ambiguous := [name for name in FIELDS if findings[name].ambiguous]:
        lines = "\n".join(f"  {question(name, findings[name])}" for name in ambiguous)
        raise OpenQuestions(
            f"{tensors.where}: names and shapes do not determine everything that this model "
            f"computes. Still unknown:\n{lines}\n"
            "Answer with these flags, or let --check TEXT (a text like those it was trained on) or "
            "--code FILE.py:NAME (the owner's own class) find the answers",
            ambiguous,
        )
    return Resolution(
        computation=first(findings),
        origins=_origins(findings),
        verified="not compared with the source: no text and no code was given",
    )


def question(name: str, finding: Finding) -> str:
    """One open field as a line: its flag with the values, and the reason why it is open."""
    if isinstance(finding.values[0], bool):
        return f"{flag(name)} or {flag(f'no_{name}')}   ({finding.origin})"
    values = "|".join(map(str, finding.values[:6])) + ("|..." if len(finding.values) > 6 else "")
    return f"{flag(name)} {values}   ({finding.origin})"


def first(findings: Findings) -> Computation:
    """The computation of the first value of each field."""
    return canonical(Computation(**{name: findings[name].values[0] for name in FIELDS}))


def _origins(findings: Findings, **resolved: str) -> dict[str, str]:
    assumed = {
        name: finding.origin if finding.resolved else f"assumed: {finding.origin}"
        for name, finding in findings.items()
    }
    return {name: resolved.get(name, assumed[name]) for name in FIELDS}


class _Search:
    def __init__(self, tensors: MappedTensors, findings: Findings, objective: Objective) -> None:
        self._tensors, self._findings, self._objective = tensors, findings, objective
        self._scores: dict[tuple[Computation, Effort], Tensor | None] = {}
        self._reason: Exception | None = None
        self.open = [name for name in FIELDS if not findings[name].resolved]
        self.ambiguous = [name for name in self.open if findings[name].ambiguous]

    def score(self, how: Computation, effort: Effort) -> Tensor | None:
        """Penalties of a variant; None if it cannot be built."""
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
        """By how many nats a variant is worse than another, and whether that is clear."""
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
        """The variant with the lowest penalty, by quick looks. Raises ConvertError if none can be
        built."""
        start = first(self._findings)
        self._compute(start, "quick")  # the first call includes torch's own start
        began = time.monotonic()
        self.mean(start)
        seconds = max(1e-3, time.monotonic() - began)
        together = self.ambiguous + [
            name for name in self.open if name in ORDERS and name not in self.ambiguous
        ]
        starts = self._products(start, together)
        if len(starts) * seconds <= SEARCH_SECONDS:
            ranked = sorted(starts, key=self.mean)[:2]
        else:
            # The best values of the other fields depend on these most.
            deciding = [name for name in together if name in (*ORDERS, "norm_position")]
            ranked = [self._descend(how, together) for how in self._products(start, deciding)]
        best = min((self._descend(how, self.open) for how in ranked), key=self.mean)
        if self.mean(best) == math.inf:
            raise self._reason or ConvertError(
                f"{self._tensors.where}: no variant computes numbers"
            )
        return canonical(best)

    def _products(self, start: Computation, names: Sequence[str]) -> list[Computation]:
        values = [self._findings[name].values for name in names]
        choices = (dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values))
        return list(dict.fromkeys(canonical(replace(start, **choice)) for choice in choices))

    def _descend(self, how: Computation, names: Sequence[str]) -> Computation:
        """The best value of each field in turn, until nothing improves."""
        best, improved = how, True
        while improved:
            improved = False
            for name in names:
                for value in self._findings[name].values:
                    other = replace(best, **{name: value})
                    if self.mean(other) < self.mean(best):
                        best, improved = other, True
        return best

    def neighbours(self, how: Computation, name: str) -> list[Computation]:
        """The variants with another value of one field, except those that compute the same."""
        others = [canonical(replace(how, **{name: value})) for value in self._findings[name].values]
        return [other for other in dict.fromkeys(others) if other != canonical(how)]


def _by_logits(
    tensors: MappedTensors, findings: Findings, objective: LogitsObjective
) -> Resolution:
    search = _Search(tensors, findings, objective)
    best = search.best()
    difference = search.mean(best)
    if difference > objective.tolerance:
        fields = ", ".join(f"{flag(name)} {getattr(best, name)}" for name in search.open)
        raise ConvertError(
            f"{tensors.where}: no variant that this project computes has the logits of "
            f"{objective.name}: the nearest one, with {fields or 'no field open'}, differs by "
            f"{difference:.3g}; {objective.tolerance:.1g} is the limit. The owner's code computes "
            "something that a GPTConfig does not express, or the file is not its weights"
        )
    alternatives = [
        Alternative(name, getattr(other, name), penalty, penalty > objective.tolerance)
        for name in search.open
        for other in search.neighbours(best, name)
        if math.isfinite(penalty := search.mean(other))
    ]
    return Resolution(
        computation=best,
        origins=_origins(findings, **dict.fromkeys(search.open, f"agrees with {objective.name}")),
        verified=(f"logits of {objective.name} on random ids, largest difference {difference:.1e}"),
        penalty=difference,
        alternatives=alternatives,
    )


class _ByText:
    def __init__(self, tensors: MappedTensors, findings: Findings, text: TextObjective) -> None:
        self._tensors, self._findings = tensors, findings
        self._text = _at_its_speed(tensors, findings, text)
        self._search = _Search(tensors, findings, self._text)

    def resolution(self) -> Resolution:
        """Raises OpenQuestions if the text does not decide, and ConvertError if no variant predicts
        it or the model is not causal."""
        search, name_of_text = self._search, self._text.name
        best = self._polish(self._conventional(search.best()))
        loss, chance = search.mean(best, "full"), self._text.unigram_nats()
        self._require_prediction(loss, chance)
        self._require_causal(best, loss)
        alternatives = {name: self._alternatives(best, name, loss) for name in search.open}
        origins, unclear = dict[str, str](), dict[str, str]()
        for name in search.ambiguous:
            near = [other for other in alternatives[name] if not other.clear]
            origins[name], differ = self._decision(best, name, near)
            if differ:
                least = min(other.penalty for other in near)
                unclear[name] = (
                    f"{question(name, self._findings[name])}: {getattr(best, name)} has "
                    f"{loss:.4f} nats, {_values(near)} {least:.4f}"
                )
        if unclear:
            lines = "\n".join(f"  {line}" for line in unclear.values())
            raise OpenQuestions(
                f"{self._tensors.where}: {name_of_text} does not tell these apart:\n{lines}\n"
                "Answer with these flags, or give more text, or --code",
                list(unclear),
            )
        return Resolution(
            computation=best,
            origins=_origins(self._findings, **origins),
            verified=compared_with_chance(loss, chance, name_of_text),
            penalty=loss,
            alternatives=[other for others in alternatives.values() for other in others],
        )

    def _conventional(self, best: Computation) -> Computation:
        """The best variant with every unambiguous field at its convention, unless that is clearly
        worse."""
        for name in self._search.open:
            usual = canonical(replace(best, **{name: self._findings[name].values[0]}))
            if name in self._search.ambiguous or usual == best:
                continue
            if not self._search.compare(usual, best)[1]:
                best = usual
        return best

    def _polish(self, best: Computation) -> Computation:
        """Move to a neighbour while one is better: ambiguous fields by any amount, others
        clearly."""
        moved = True
        while moved:
            moved = False
            for name in self._search.open:
                for other in self._search.neighbours(best, name):
                    worse, clear = self._search.compare(best, other)
                    enough = clear or (name in self._search.ambiguous and worse >= 1e-6)
                    if worse > 0 and enough:
                        best, moved = other, True
        return best

    def _require_prediction(self, loss: float, chance: float) -> None:
        if loss > chance and self._search.ambiguous:
            raise ConvertError(
                f"{self._tensors.where}: no variant predicts {self._text.name} better than its "
                f"tokens' own frequencies do ({loss:.3f} against {chance:.3f} nats per token), so "
                "the text decides nothing: give one like those that the model was trained on, with "
                "its vocabulary (--tokenizer), or --code"
            )

    def _require_causal(self, best: Computation, loss: float) -> None:
        if not best.causal:
            masked = self._search.mean(replace(best, causal=True), "full")
            raise ConvertError(
                f"{self._tensors.where}: it predicts {self._text.name} only if every position sees "
                f"the whole text ({loss:.3f} nats per token; with a causal mask {masked:.3f}): it "
                "has no causal mask, so it is not a GPT and cannot generate"
            )

    def _alternatives(self, best: Computation, name: str, loss: float) -> list[Alternative]:
        """The other values of a field; close ones of an ambiguous field are compared on more of the
        text."""
        alternatives = []
        for other in self._search.neighbours(best, name):
            worse, clear = self._search.compare(other, best)
            if not clear and name in self._search.ambiguous and worse > 1e-4:
                worse, clear = self._search.compare(other, best, "thorough")
            if math.isfinite(worse):
                alternatives.append(Alternative(name, getattr(other, name), loss + worse, clear))
        return alternatives

    def _decision(
        self, best: Computation, name: str, near: Sequence[Alternative]
    ) -> tuple[str, bool]:
        """The reason for the value of an ambiguous field, and True if `near`, values that are as
        good on the text, have other logits."""
        if not near:
            return f"clearly the lowest loss on {self._text.name}", False
        apart = max(self._distance(best, replace(best, **{name: each.value})) for each in near)
        reason = (
            f"{self._text.name} cannot tell it from {_values(near)}: logits differ by at most "
            f"{apart:.1g}"
        )
        return reason, apart > SAME_LOGITS

    def _distance(self, one: Computation, other: Computation) -> float:
        ids = self._text.windows[:4, :-1]
        first, second = (
            logits_of(open_gpt(build(self._tensors, how)), ids, causal=how.causal)
            for how in (one, other)
        )
        return float((first - second).abs().max())


def _values(alternatives: Sequence[Alternative]) -> str:
    return ", ".join(str(other.value) for other in alternatives)


def _at_its_speed(tensors: MappedTensors, findings: Findings, text: TextObjective) -> TextObjective:
    """The objective with as many tokens as a model of this size predicts in seconds."""
    try:
        built = build(tensors, first(findings))
    except (ConfigError, ConvertError):  # another variant may be a model
        return text
    for _ in range(2):  # the first call includes torch's own start
        began = time.monotonic()
        penalties = text(built, causal=True, effort="quick")
        seconds = time.monotonic() - began
    return text.at_speed(max(1e-6, seconds / len(penalties)))


def compared_with_chance(loss: float, chance: float, text_name: str) -> str:
    """A loss next to that of the text's own frequencies, which a model has to beat."""
    return f"{loss:.4f} nats per token on {text_name} (its tokens' frequencies: {chance:.4f})"
