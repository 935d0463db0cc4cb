"""Resolve: chooses one of the computations that are possible for a file.

The values of fields come from the user, from the file (`questions.py`), from agreement with the
owner's code, or from a clearly lower loss on a text. Without code and text, an ambiguous field
stops the import. Only unambiguous fields fall back to a convention. Conventions are reported, and
compared with other values if there is an objective.

The search tries all combinations of the ambiguous fields, if there are not too many; else it
changes one field at a time until nothing improves. Then it tries every open field again at the best
variant.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from logitd.model.convert.by_role.build import build, head_shape
from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.objective import (
    MARGIN_ERRORS,
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
"""Fields about the order of rows. If one of them is wrong, all values of the other fields look
equally bad, so these are tried together with the ambiguous fields."""
SEARCH_SECONDS = 30.0
"""Approximate time limit for trying all combinations. Above it, the search changes one field at a
time."""
CLEAR_NATS, CLEAR_ERRORS = 0.005, 2.0
"""Smallest difference of losses that decides, in nats per token and in standard errors of the
difference per token. The standard error alone does not suffice: on a model that had learned little,
a wrong activation was better by 0.004 nats on any number of tokens. On trained models the right
variants were better by 0.02 to 0.8 nats."""
ANSWERS = (
    "Give the owner's class with --code, or the open fields as flags, if you know them; "
    "--code FILE:NAME --run-code serves a class that nothing here computes"
)
UNUSUAL: Mapping[str, Any] = {
    "residual": "parallel",
    "activation": "relu2",
    "qk_norm": "unit",
    "embedding_scale": "sqrt_d_model",
}
"""Values that few models have, but that won on texts when the right variant was not among the
candidates."""
FEWEST_CHANNELS = 8
"""Smallest usual width of a head."""
SAME_LOGITS = 0.01
"""Largest difference of logits at which variants with the same loss count as equal."""


@dataclass(frozen=True)
class Alternative:
    """Another value of one field and its penalty. `clear`: it is clearly worse than the chosen
    value."""

    field: str
    value: Any
    penalty: float
    clear: bool


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A computation with the reason for each field.

    penalty        loss (nats per token) or largest difference of logits of the chosen variant
    alternatives   other values that were tried, for the table
    verified       sentence about the agreement with the source
    warning        sentence about unusual values that a text chose; "" if there are fewer than two
    """

    computation: Computation
    origins: Mapping[str, str]
    verified: str
    penalty: float | None = None
    alternatives: Sequence[Alternative] = ()
    warning: str = ""


class OpenQuestions(ConvertError):
    """Some fields cannot be resolved. The message lists them with the flags that set them."""

    def __init__(self, message: str, fields: Sequence[str]) -> None:
        super().__init__(message)
        self.fields = tuple(fields)


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def answer(findings: Findings, answers: Mapping[str, Any], place: str = "") -> dict[str, Finding]:
    """Replace findings by the user's answers, which override the file. `place` is the name of the
    map file with the answers; "" if they are flags."""
    given = {
        field: Finding((value,), f"{field} in {place}" if place else flag(field))
        for field, value in answers.items()
    }
    return without_unused({**findings, **given})


def resolve(
    tensors: MappedTensors,
    findings: Findings,
    *objectives: Objective,
) -> Resolution:
    """Choose a computation. If there are several objectives, all of one text, the one with the
    lowest loss counts. Raises OpenQuestions, and ConvertError if no variant agrees."""
    if findings["causal"].values == (False,):
        raise ConvertError(
            f"{tensors.where}: causal is false ({findings['causal'].origin}): a model whose "
            "positions attend to later ones is not a GPT and cannot generate"
        )
    texts = [each for each in objectives if isinstance(each, TextObjective)]
    for objective in objectives:
        if isinstance(objective, LogitsObjective):
            return _by_logits(tensors, findings, objective)
    if texts:
        seconds = SEARCH_SECONDS / len(texts)
        searches = [_ByText(tensors, findings, text, seconds) for text in texts]
        return min(searches, key=_ByText.quick_loss).resolution()
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
    """A line about an open field: its flag with the possible values, and the reason why it is
    open."""
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
        """The penalties of a variant (cached); None if it cannot be built."""
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
        """The mean difference by which a variant is worse than the best, and True if that is
        clear."""
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
        """The variant with the lowest penalty by quick measurements. Raises ConvertError if none
        can be built."""
        start = first(self._findings)
        self._compute(start, "quick")  # the first call includes torch's own start
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
                f"{self._tensors.where}: no variant computes numbers"
            )
        return canonical(best)

    def _products(self, start: Computation, names: Sequence[str]) -> list[Computation]:
        values = [self._findings[name].values for name in names]
        choices = (dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values))
        return list(dict.fromkeys(canonical(replace(start, **choice)) for choice in choices))

    def _descend(self, how: Computation, names: Sequence[str]) -> Computation:
        """Replace each field in turn by its best value, until nothing improves."""
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
        """The variants that differ in one field and compute something else."""
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
    def __init__(
        self, tensors: MappedTensors, findings: Findings, text: TextObjective, seconds: float
    ) -> None:
        self._tensors, self._findings = tensors, findings
        self._text = _at_its_speed(tensors, findings, text)
        self._search = _Search(tensors, findings, self._text, seconds)

    @cached_property
    def _found(self) -> Computation:
        return self._search.best()

    def quick_loss(self) -> float:
        return self._search.mean(self._found)

    def resolution(self) -> Resolution:
        """Choose by the text. Raises OpenQuestions if the text does not decide; ConvertError if no
        variant predicts it, or if the model is not causal."""
        search, name_of_text = self._search, self._text.name
        best = self._polish(self._conventional(self._found))
        loss, chance = search.mean(best, "full"), self._text.unigram_nats()
        self._require_prediction(loss, chance)
        self._require_causal(best, loss)
        objection = self._objection(best, loss)
        if objection and search.ambiguous:
            raise ConvertError(f"{self._tensors.where}: {objection}. {ANSWERS}")
        alternatives = {name: self._alternatives(best, name, loss) for name in search.open}
        origins, unclear = dict[str, str](), dict[str, str]()
        for name in search.ambiguous:
            near = [other for other in alternatives[name] if not other.clear]
            origins[name], differ = self._decision(best, name, near)
            if self._findings[name].resolved:
                continue
            if not self._findings[name].values[1:]:
                unclear[name] = question(name, self._findings[name])
            elif differ:
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
            origins=_origins(self._findings, **self._won(best), **origins),
            verified=f"not verified: {objection}"
            if objection
            else compared_with_chance(loss, self._text),
            penalty=loss,
            alternatives=[other for others in alternatives.values() for other in others],
            warning=self._warning(best),
        )

    def _won(self, best: Computation) -> dict[str, str]:
        """The reason for unambiguous fields that differ from their convention."""
        return {
            name: f"the lowest loss on {self._text.name}, against the convention"
            for name in self._search.open
            if name not in self._search.ambiguous
            and getattr(best, name) != self._findings[name].values[0]
        }

    def _objection(self, best: Computation, loss: float) -> str:
        """The reason why the loss is no evidence for the variant; "" if it is. Pairs are the bar,
        as a model that learned little may predict no better than triples; triples are, if the text
        chose unusual values and the file states no loss."""
        text, penalties = self._text, self._search.score(best, "full")
        error = 0.0
        if penalties is not None and len(penalties) > 1:
            error = float(penalties.std()) / math.sqrt(min(len(penalties), text.distinct))
        if text.stated is not None and loss > text.stated.limit:
            return (
                f"the best variant has {loss:.3f} nats per token on {text.name}, but the file "
                f"states {text.stated.name} {text.stated.nats:.3f}: none that this project "
                "computes is the source's, or the text is not like its training data"
            )
        unusual = self._unusual(best)
        bar = text.triples if unusual and text.stated is None else text.pairs
        if loss + MARGIN_ERRORS * error < bar:
            return ""
        chosen = f", with {', '.join(unusual)}," if unusual else ""
        return (
            f"the best variant{chosen} has {loss:.3f} nats per token on {text.name} (standard "
            f"error {error:.3f}). Counted {'triples' if bar == text.triples else 'pairs'} of its "
            f"tokens reach {bar:.3f}, and so do wrong variants: the loss decides nothing"
        )

    def _unusual(self, best: Computation) -> list[str]:
        """The unusual values that the text chose."""
        unusual = [
            f"{name} {getattr(best, name)}"
            for name in self._search.open
            if getattr(best, name) == UNUSUAL.get(name)
        ]
        if "n_head" in self._search.open:
            size = head_shape(self._tensors, best.n_head).head_dim
            unusual += [f"n_head {best.n_head} ({size} channels each)"] * (size < FEWEST_CHANNELS)
        return unusual

    def _warning(self, best: Computation) -> str:
        unusual = self._unusual(best)
        if len(unusual) < 2:
            return ""
        return (
            f"{self._text.name} chose {', '.join(unusual)}, which few models have together. "
            "Compare with --code before you rely on it"
        )

    def _conventional(self, best: Computation) -> Computation:
        """Set every unambiguous field to its convention, unless that is clearly worse."""
        for name in self._search.open:
            usual = canonical(replace(best, **{name: self._findings[name].values[0]}))
            if name in self._search.ambiguous or usual == best:
                continue
            if not self._search.compare(usual, best)[1]:
                best = usual
        return best

    def _polish(self, best: Computation) -> Computation:
        """Move to better neighbours until there is none. A change of an ambiguous field may be
        better by any amount, other changes must be clearly better."""
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
                f"{self._tensors.where}: the model predicts {self._text.name} only if every "
                f"position attends to the whole text ({loss:.3f} nats per token; with a causal "
                f"mask {masked:.3f}): it has no causal mask, so it is not a GPT and cannot generate"
            )

    def _alternatives(self, best: Computation, name: str, loss: float) -> list[Alternative]:
        """The other values of a field with their losses. Close values of an ambiguous field are
        compared on more of the text."""
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
        """The reason for the chosen value of an ambiguous field, and True if the choice is open:
        the values in `near` are as good on the text, but have other logits."""
        if not near:
            return f"clearly the lowest loss on {self._text.name}", False
        apart = max(self._distance(best, replace(best, **{name: each.value})) for each in near)
        reason = (
            f"{self._text.name} cannot tell it from {_values(near)}: logits differ by at most "
            f"{apart:.1g}"
        )
        return reason, apart > SAME_LOGITS

    def _distance(self, one: Computation, other: Computation) -> float:
        ids = self._text.windows[:4, :-1].clamp(min=0)
        first, second = (
            logits_of(open_gpt(build(self._tensors, how)), ids, causal=how.causal)
            for how in (one, other)
        )
        return float((first - second).abs().max())


def _values(alternatives: Sequence[Alternative]) -> str:
    return ", ".join(str(other.value) for other in alternatives)


def _at_its_speed(tensors: MappedTensors, findings: Findings, text: TextObjective) -> TextObjective:
    """The objective, limited to the tokens that this model can predict in the time limits."""
    try:
        built = build(tensors, first(findings))
    except (ConfigError, ConvertError):  # another variant may be valid
        return text
    for _ in range(2):  # the first call includes torch's own start
        began = time.monotonic()
        penalties = text(built, causal=True, effort="quick")
        seconds = time.monotonic() - began
    return text.at_speed(max(1e-6, seconds / len(penalties)))


def compared_with_chance(loss: float, text: TextObjective) -> str:
    """A sentence with a loss and those of the text's own frequencies, which a model must beat."""
    stated = text.stated
    agrees = "" if stated is None else f"; the file states {stated.name} {stated.nats:.4f}"
    return (
        f"{loss:.4f} nats per token on {text.name} (its tokens' frequencies: "
        f"{text.unigram_nats():.4f}; counted pairs {text.pairs:.4f}, triples "
        f"{text.triples:.4f}{agrees})"
    )
