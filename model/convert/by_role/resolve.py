"""Resolve: chooses one of the computations that are possible for a file.

The values of fields come from the user, from the file (`questions.py`), from agreement with the
owner's code, or from a clearly lower loss on a text (`by_text.py`). If there is neither code nor
text, an ambiguous field stops the import. Only unambiguous fields fall back to a conventional
value. The report names these values. If there is code or a text, they are also compared with other
values.
"""

import math
from collections.abc import Mapping
from typing import Any

from logitd.model.convert.by_role.by_text import ByText
from logitd.model.convert.by_role.evidence import OF_SETTINGS
from logitd.model.convert.by_role.finding import FIELDS, Finding, Findings
from logitd.model.convert.by_role.objective import LogitsObjective, Objective, TextObjective
from logitd.model.convert.by_role.resolution import (
    Alternative,
    OpenQuestions,
    Resolution,
    first,
    flag,
    origins_of,
    question,
)
from logitd.model.convert.by_role.search import SEARCH_SECONDS, Search
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError

USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 2**-23)
"""Values of a norm's eps to try if the owner's code does not use the one in the settings."""


def answered(answers: Mapping[str, Any], place: str = "") -> dict[str, Finding]:
    """The user's answers as findings. `place` is the name of the map file with the answers; "" if
    the answers are flags."""
    return {
        field: Finding((value,), f"{field} in {place}" if place else flag(field))
        for field, value in answers.items()
    }


def resolve(tensors: MappedTensors, findings: Findings, *objectives: Objective) -> Resolution:
    """Choose a computation. If a text has several objectives, the objective with the lowest loss
    decides. Raises OpenQuestions if a field stays open, and ConvertError if no variant agrees with
    the source."""
    if findings["causal"].values == (False,):
        raise ConvertError(
            f"{tensors.where}: causal is false ({findings['causal'].origin}): a model whose "
            "positions attend to later positions is not a GPT and cannot generate text"
        )
    texts = [each for each in objectives if isinstance(each, TextObjective)]
    for objective in objectives:
        if isinstance(objective, LogitsObjective):
            return _by_logits(tensors, findings, objective)
    if texts:
        seconds = SEARCH_SECONDS / len(texts)
        searches = [ByText(tensors, findings, text, seconds) for text in texts]
        return min(searches, key=ByText.quick_loss).resolution()
    if ambiguous := [name for name in FIELDS if findings[name].ambiguous]:
        lines = "\n".join(f"  {question(name, findings[name])}" for name in ambiguous)
        raise OpenQuestions(
            f"{tensors.where}: names and shapes do not determine everything that this model "
            f"computes. Still unknown:\n{lines}\n"
            "Answer with these flags, or let --check TEXT (a text like the training data) or "
            "--code FILE.py:NAME (the owner's class) find the answers",
            ambiguous,
        )
    return Resolution(
        computation=first(findings),
        origins=origins_of(findings),
        verified="not compared with the source: neither text nor code was given",
    )


def _by_logits(
    tensors: MappedTensors, findings: Findings, objective: LogitsObjective
) -> Resolution:
    search = Search(tensors, findings, objective)
    best = search.best()
    eps = findings["norm_eps"]
    if search.mean(best) > objective.tolerance and eps.origin.endswith(OF_SETTINGS):
        values = tuple(dict.fromkeys((*eps.values, *USUAL_EPS)))  # the code may not read them
        findings = {**findings, "norm_eps": Finding(values, eps.origin)}
        search = Search(tensors, findings, objective)
        best = search.best()
    difference = search.mean(best)
    if difference > objective.tolerance:
        fields = ", ".join(f"{flag(name)} {getattr(best, name)}" for name in search.open)
        raise ConvertError(
            f"{tensors.where}: no variant that logitd can compute matches the logits of "
            f"{objective.name}: the closest variant{f', with {fields},' if fields else ''} differs "
            f"by {difference:.3g}, but the limit is {objective.tolerance:.1g}. Set the flags whose "
            "values you know; if that changes nothing, the owner's code computes something that a "
            "GPTConfig cannot express, or the weights do not belong to this code"
        )
    late = search.mean(best, "full")
    if late > objective.late_tolerance:
        raise ConvertError(
            f"{tensors.where}: the first {objective.token_ids.shape[1]} positions match the logits "
            f"of {objective.name}, but the last of {objective.length} differ by {late:.3g}; the "
            f"limit is {objective.late_tolerance:.1g}. Something depends on distance or length in "
            "the owner's code, such as a sliding window, which the tensors do not show. "
            "Set --context-length if the code's context is shorter; otherwise, serve the owner's "
            "class with --run-code"
        )
    if (edge := search.mean(best, "thorough")) > objective.tolerance:
        raise ConvertError(
            f"{tensors.where}: the logits of {objective.name} match for random ids, but differ by "
            f"{edge:.3g} for ids that may be special: the first and last ids of the vocabulary, "
            "its special tokens, and numbers in the settings and the code. The limit is "
            f"{objective.tolerance:.1g}. The owner's code probably treats one of them, such as "
            "padding or the end of text, differently. If no text contains this id, remove the "
            "special case from a copy of the code; otherwise, serve the owner's class with "
            "--run-code"
        )
    alternatives = [
        Alternative(name, getattr(other, name), penalty, penalty > objective.tolerance)
        for name in search.open
        for other in search.neighbors(best, name)
        if math.isfinite(penalty := search.mean(other))
    ]
    return Resolution(
        computation=best,
        origins=origins_of(findings, **dict.fromkeys(search.open, f"agrees with {objective.name}")),
        verified=(
            f"logits of {objective.name} on random ids, largest difference {difference:.1e}, and "
            f"{late:.1e} at the end of {objective.length} positions"
        ),
        penalty=difference,
        alternatives=alternatives,
        warning=objective.assumed,
    )
