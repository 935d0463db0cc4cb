"""Settle: one computation out of all that a file leaves open.

In this order: what the file says (`questions.py`), what the user says, what agrees with the owner's
code, what has clearly the lowest loss on a text. Without code and text, what is still asked stops
the import. Nothing is taken because it is usual, but for the fields whose convention is assumed and
said to be (`Finding.asked` is False), and these are tried as well where there is a judge.

How variants are searched: all values of the asked fields together, while there are not too many;
else field by field until nothing gets better. Then every open field once more around the best.
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
from logitd.model.convert.by_role.judge import (
    Judge,
    LogitsJudge,
    Look,
    TextJudge,
    logits_of,
    open_gpt,
)
from logitd.model.convert.by_role.questions import (
    FIELDS,
    UNUSED_LAYOUT,
    UNUSED_THETA,
    Finding,
    Findings,
    canonical,
)
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError
from logitd.model.transformer.config import ConfigError

ORDERS = ("qkv_layout", "gate_order")
"""Rows taken in a wrong order leave nothing of a model, so that no field looks better than another:
these are tried together with the asked ones."""
SEARCH_SECONDS = 30.0
"""About how long all values together may take; with more of them the search goes field by field."""
CLEAR_NATS, CLEAR_ERRORS = 0.005, 2.0
"""A loss is clearly lower by so many nats per token, and so many standard errors of the difference,
token by token. Errors alone do not do: on a model that learned little a wrong activation had a loss
lower by 0.004 nats, however many tokens were looked at. Right variants of models that learned were
better by 0.02 to 0.8."""
SAME_LOGITS = 0.01
"""Variants that a text cannot tell apart are taken for one another where logits differ by less."""


@dataclass(frozen=True)
class Alternative:
    """Another value of one field, and how much worse it is than the value taken."""

    field: str
    value: Any
    penalty: float
    clear: bool


@dataclass(frozen=True, kw_only=True)
class Settled:
    """A computation with the reason for each field.

    penalty        the best variant's loss (nats per token) or largest difference of logits
    alternatives   what else was tried, for the table
    verified       one sentence: how well this is known to be what the source computes
    """

    computation: Computation
    origins: Mapping[str, str]
    verified: str
    penalty: float | None = None
    alternatives: Sequence[Alternative] = ()


class OpenQuestions(ConvertError):
    """Fields that nothing settles; the message lists them with the flags that answer them."""

    def __init__(self, message: str, fields: Sequence[str]) -> None:
        super().__init__(message)
        self.fields = tuple(fields)


def flag(field: str) -> str:
    """The command line flag of a field."""
    return "--" + field.replace("_", "-")


def answer(findings: Findings, answers: Mapping[str, Any]) -> dict[str, Finding]:
    """Findings with the user's answers in place of what the file leaves open or says."""
    answered = dict(findings)
    for field, value in answers.items():
        answered[field] = Finding((value,), f"{flag(field)}")
    if "rotary" not in answered["positions"].values:
        answered |= {"rotary_layout": UNUSED_LAYOUT, "rope_theta": UNUSED_THETA}
    return answered


def settle(
    tensors: MappedTensors,
    findings: Findings,
    *,
    logits: LogitsJudge | None = None,
    code: str = "",
    text: TextJudge | None = None,
    text_name: str = "",
) -> Settled:
    """One computation. Raises OpenQuestions, and ConvertError where no variant agrees."""
    if findings["causal"].values == (False,):
        raise ConvertError(
            f"{tensors.where}: causal is false ({findings['causal'].origin}): a model whose "
            "positions see what follows them is not a GPT and cannot generate"
        )
    if logits is not None:
        return _by_logits(tensors, findings, logits, code)
    if text is not None:
        return _by_text(tensors, findings, text, text_name)
    if asked := [name for name in FIELDS if findings[name].asked]:
        lines = "\n".join(f"  {question(name, findings[name])}" for name in asked)
        raise OpenQuestions(
            f"{tensors.where}: names and shapes do not say all that this model computes. Open "
            f"{'is' if len(asked) == 1 else 'are'}:\n{lines}\n"
            "Answer with these flags, or let --check TEXT (a text like those it was trained on) or "
            "--code FILE.py:NAME (the owner's own class) find the answers",
            asked,
        )
    return Settled(
        computation=first(findings),
        origins=_origins(findings),
        verified="not compared with the source: no text and no code was given",
    )


def question(name: str, finding: Finding) -> str:
    """One open field as a line: its flag with the values, and why it is open."""
    if isinstance(finding.values[0], bool):
        return f"{flag(name)} or {flag(f'no_{name}')}   ({finding.origin})"
    values = "|".join(map(str, finding.values[:6])) + ("|..." if len(finding.values) > 6 else "")
    return f"{flag(name)} {values}   ({finding.origin})"


def first(findings: Findings) -> Computation:
    """The computation of the first value of each field."""
    return canonical(Computation(**{name: findings[name].values[0] for name in FIELDS}))


def _origins(findings: Findings, **settled: str) -> dict[str, str]:
    return {
        name: settled.get(name)
        or (
            findings[name].origin if findings[name].settled else f"assumed: {findings[name].origin}"
        )
        for name in FIELDS
    }


class _Search:
    """Scores of variants, each computed once."""

    def __init__(self, tensors: MappedTensors, findings: Findings, judge: Judge) -> None:
        self._tensors, self._judge = tensors, judge
        self._findings = findings
        self.distinct = judge.distinct
        self._scores: dict[tuple[Computation, Look], Tensor | None] = {}
        self._reason: Exception | None = None

    def score(self, how: Computation, *, look: Look) -> Tensor | None:
        """Penalties of a variant, None where it is not a model."""
        how = canonical(how)
        key = how, look
        if key not in self._scores:
            self._scores[key] = self._judged(how, look)
        return self._scores[key]

    def _judged(self, how: Computation, look: Look) -> Tensor | None:
        try:
            return self._judge(build(self._tensors, how), causal=how.causal, look=look)
        except (ConfigError, ConvertError) as error:
            self._reason = error
            return None

    def mean(self, how: Computation, *, look: Look) -> float:
        scores = self.score(how, look=look)
        mean = math.inf if scores is None else float(scores.mean())
        return mean if math.isfinite(mean) else math.inf

    def open_fields(self, *, asked: bool | None = None) -> list[str]:
        return [
            name
            for name in FIELDS
            if not self._findings[name].settled
            and (asked is None or self._findings[name].asked is asked)
        ]

    def best(self) -> Computation:
        """The variant with the lowest penalty, by quick looks. Raises ConvertError if there is
        none that can be built."""
        start = first(self._findings)
        self._judged(start, "quick")  # the first one also pays for what torch does once
        began = time.monotonic()
        self.mean(start, look="quick")
        seconds = max(1e-3, time.monotonic() - began)
        asked = self.open_fields(asked=True)
        asked += [name for name in self.open_fields(asked=False) if name in ORDERS]
        starts = self._products(start, asked)
        if len(starts) * seconds <= SEARCH_SECONDS:
            ranked = sorted(starts, key=lambda how: self.mean(how, look="quick"))[:2]
        else:
            # What is best otherwise depends on these most.
            first_of = [name for name in asked if name in (*ORDERS, "norm_position")]
            ranked = [self._descend(how, asked) for how in self._products(start, first_of)]
        tried = [self._descend(how, self.open_fields()) for how in ranked]
        best = min(tried, key=lambda how: self.mean(how, look="quick"))
        if self.mean(best, look="quick") == math.inf:
            raise self._reason or ConvertError(
                f"{self._tensors.where}: no variant of it gives numbers"
            )
        return canonical(best)

    def _products(self, start: Computation, names: Sequence[str]) -> list[Computation]:
        """Every choice of values of some fields, those that compute the same once."""
        values = [self._findings[name].values for name in names]
        return list(
            dict.fromkeys(
                canonical(replace(start, **dict(zip(names, chosen, strict=True))))
                for chosen in itertools.product(*values)
            )
        )

    def _descend(self, how: Computation, names: Sequence[str]) -> Computation:
        """Field by field the best value, until none gets better."""
        best, penalty = how, self.mean(how, look="quick")
        improved = True
        while improved:
            improved = False
            for name in names:
                for value in self._findings[name].values:
                    other = replace(best, **{name: value})
                    if (p := self.mean(other, look="quick")) < penalty:
                        best, penalty, improved = other, p, True
        return best

    def neighbours(self, how: Computation, name: str) -> list[Computation]:
        """The variants with another value of one field, which are not the same after all."""
        others = [canonical(replace(how, **{name: value})) for value in self._findings[name].values]
        return [other for other in dict.fromkeys(others) if other != canonical(how)]


def _by_logits(
    tensors: MappedTensors, findings: Findings, judge: LogitsJudge, code: str
) -> Settled:
    """The variant that gives the owner's logits."""
    search = _Search(tensors, findings, judge)
    best = search.best()
    difference = search.mean(best, look="quick")
    if difference > judge.tolerance:
        raise ConvertError(
            f"{tensors.where}: no variant that this project computes gives the logits of {code}: "
            f"the nearest one differs by {difference:.3g}, at most {judge.tolerance:.1g} is "
            f"agreement. It has {_described(best, search.open_fields())}. The owner's code "
            "computes something that a GPTConfig does not say, or the file is not its weights"
        )
    alternatives = [
        Alternative(name, getattr(other, name), penalty, penalty > judge.tolerance)
        for name in search.open_fields()
        for other in search.neighbours(best, name)
        if math.isfinite(penalty := search.mean(other, look="quick"))
    ]
    sentence = f"logits of {code} on random ids, largest difference {difference:.1e}"
    settled = dict.fromkeys(search.open_fields(), f"agrees with {code}")
    return Settled(
        computation=best,
        origins=_origins(findings, **settled),
        verified=sentence,
        penalty=difference,
        alternatives=alternatives,
    )


def _described(how: Computation, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {getattr(how, name)}" for name in names) or "nothing left open"


def _by_text(
    tensors: MappedTensors, findings: Findings, judge: TextJudge, text_name: str
) -> Settled:
    """The variant with clearly the lowest loss on a text."""
    judge = _at_its_speed(tensors, findings, judge)
    search = _Search(tensors, findings, judge)
    best = _conventional(search, search.best(), findings)
    best = _polish(search, best)
    loss, chance = search.mean(best, look="full"), judge.unigram_nats()
    if loss > chance and search.open_fields(asked=True):
        raise ConvertError(
            f"{tensors.where}: no variant predicts {text_name} better than its tokens' own "
            f"frequencies do ({loss:.3f} against {chance:.3f} nats per token), so the text decides "
            "nothing: give one like those that the model was trained on, with its vocabulary "
            "(--tokenizer), or --code"
        )
    if not best.causal:
        masked = search.mean(replace(best, causal=True), look="full")
        raise ConvertError(
            f"{tensors.where}: it predicts {text_name} only where every position sees the whole "
            f"text ({loss:.3f} nats per token; with a causal mask "
            f"{masked:.3f}): it has no causal mask, "
            "so it is not a GPT and cannot generate"
        )
    alternatives, origins, unclear = [], dict[str, str](), list[str]()
    for name in search.open_fields():
        rivals = []
        for other in search.neighbours(best, name):
            worse, clear = _worse(search, other, best)
            if not clear and findings[name].asked and worse > 1e-4:
                worse, clear = _worse(search, other, best, "thorough")
            if math.isfinite(worse):
                rivals.append(Alternative(name, getattr(other, name), loss + worse, clear))
        alternatives += rivals
        if not findings[name].asked:
            continue
        near = [rival for rival in rivals if not rival.clear]
        origins[name] = f"clearly the lowest loss on {text_name}"
        if near:
            apart = max(_apart(tensors, best, name, rival.value, judge) for rival in near)
            values = ", ".join(str(rival.value) for rival in near)
            if apart > SAME_LOGITS:
                unclear.append(
                    f"{question(name, findings[name])}: {getattr(best, name)} has {loss:.4f} nats, "
                    f"{values} {min(rival.penalty for rival in near):.4f}"
                )
            origins[name] = (
                f"{text_name} cannot tell it from {values}: logits differ by at most {apart:.1g}"
            )
    if unclear:
        lines = "\n".join(f"  {line}" for line in unclear)
        raise OpenQuestions(
            f"{tensors.where}: {text_name} does not tell these apart:\n{lines}\n"
            "Answer with these flags, or give more text, or --code",
            [line.split()[0].removeprefix("--").replace("-", "_") for line in unclear],
        )
    return Settled(
        computation=best,
        origins=_origins(findings, **origins),
        verified=compared_with_chance(loss, chance, text_name),
        penalty=loss,
        alternatives=alternatives,
    )


def _at_its_speed(tensors: MappedTensors, findings: Findings, judge: TextJudge) -> TextJudge:
    """The judge with looks that take seconds for a model of this size, not minutes."""
    try:
        built = build(tensors, first(findings))
        for _ in range(2):  # the first one also pays for what torch does once
            began = time.monotonic()
            penalties = judge(built, causal=True, look="quick")
            seconds = time.monotonic() - began
    except (ConfigError, ConvertError):  # another variant may be one
        return judge
    return judge.at_speed(max(1e-6, seconds / len(penalties)))


def compared_with_chance(loss: float, chance: float, text_name: str) -> str:
    """A loss beside that of the text's own frequencies, which a model has to beat."""
    return f"{loss:.4f} nats per token on {text_name} (its tokens' frequencies: {chance:.4f})"


def _conventional(search: _Search, best: Computation, findings: Findings) -> Computation:
    """The best variant with every field that was not asked back at its convention, unless that is
    clearly worse."""
    for name in search.open_fields(asked=False):
        usual = canonical(replace(best, **{name: findings[name].values[0]}))
        if usual != best and not _worse(search, usual, best)[1]:
            best = usual
    return best


def _polish(search: _Search, best: Computation) -> Computation:
    """Move to a neighbour while one is better: asked fields by any amount, others clearly."""
    moved = True
    while moved:
        moved = False
        for name in search.open_fields():
            asked = name in search.open_fields(asked=True)
            for other in search.neighbours(best, name):
                worse, clear = _worse(search, best, other)
                if worse > 0 and (asked or clear) and not (asked and not clear and worse < 1e-6):
                    best, moved = other, True
    return best


def _worse(
    search: _Search, other: Computation, best: Computation, look: Look = "full"
) -> tuple[float, bool]:
    """By how many nats a variant is worse, and whether that is clear."""
    penalties, base = search.score(other, look=look), search.score(best, look=look)
    if penalties is None or not torch.isfinite(penalties).all():
        return math.inf, True
    if base is None or not torch.isfinite(base).all():
        return -math.inf, False  # what is not a model is not better
    difference = penalties - base
    mean = float(difference.mean())
    error = float(difference.std()) / math.sqrt(max(1, min(len(difference), search.distinct)))
    return mean, mean > max(CLEAR_NATS, CLEAR_ERRORS * error)


def _apart(
    tensors: MappedTensors, best: Computation, name: str, value: Any, judge: TextJudge
) -> float:
    """The largest difference of logits between two values of a field, on the text."""
    ids = judge.windows[:4, :-1]

    def logits(how: Computation) -> Tensor:
        return logits_of(open_gpt(build(tensors, how)), ids, causal=how.causal)

    return float((logits(best) - logits(replace(best, **{name: value}))).abs().max())
