"""Collected settings: finds the settings of a model in the contents of a file.

They may be in nested sections, in lists of names and values, and in JSON texts. Sections about an
optimizer, vocabularies and logs are left out. `state_file.py` reads the files, and
`unknown_settings.py` finds the settings that are not understood.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from logitd.model.convert.by_role.names import SETTINGS, snake_case
from logitd.model.convert.by_role.stated import is_number
from logitd.model.convert.foreign import Unread
from logitd.model.convert.unknown_settings import PER_LAYER
from logitd.model.owner_code.process.build import CONFIG_NAMES

DEEPEST = 8
"""Sections nested more deeply are not read."""
MODEL_SECTIONS = ("model", "model_config", "model_args", "gpt", "model_params")
OPTIMIZER = re.compile(r"opt|optim|optims|optimizers?|sched|schedulers?|adamw?|scaler")
"""Words in the names of dictionaries with tensors of the optimizer."""
_OPTIMIZER_SETTINGS = re.compile(OPTIMIZER.pattern.removeprefix("opt|"))
"""Words in the names of sections that describe the optimizer, whose `eps` is not a norm's. `opt`
also abbreviates options."""
_OF_OTHERS = frozenset(("param_groups", "base_lrs", "growth_interval", "fit_loop", "added_tokens"))
"""Keys in the states of torch's optimizers, schedulers and scaler, of Lightning's loops, and of a
tokenizer."""
_TRAINING = re.compile(
    r"ema|swa|average|rng|random|metrics?|hist(ory|ories)?|loss(es)?|wandb|stats?|statistics|logs?|"
    r"callbacks?|data(set|sets|loader|module)?|tokeni[sz]ers?|train(ing|er)?_state"
)
"""Words in the names of sections with measurements, states or data of a training instead of
settings."""
_VOCABULARY = re.compile(r"(special|extra|added)_?tokens?|specials|vocab(ulary)?|tokeni[sz]er")
"""Names of dictionaries whose values may be ids of tokens."""
_CONFIGURATION = re.compile(
    r"config(uration)?s?|cfg|conf|args|arguments|(h|hyper)?params|(hyper)?parameters|settings|"
    r"opts?|options|hp|kwargs"
)
"""Words in the names of values that hold the settings of a program."""
_ASSIGNMENT = re.compile(r"\w[\"']?\s*(=|:\s)\s*[\w\"'.+-]")
"""A setting in the text of a configuration, such as `n_head=4` or `n_head: 4`."""
_LOGGED = re.compile(r"(global_)?(step|iter(ation)?|epoch)|iter_num|(.*_)?loss")
"""Names of numbers in the entries of a log."""
_OF_ATTENTION = re.compile(r"(sliding|attention|attn|rope|rotary|softmax)_|.*soft_?cap")
"""Beginnings of the names of settings that belong to the model in any section."""
_SHAPE = frozenset(name for field in ("n_layer", "n_head") for name in SETTINGS[field])
"""Settings in a section that also describes the model."""


def collect_settings(
    contents: Mapping[Any, Any], *, of_model_alone: bool = False
) -> dict[str, Any]:
    """Collect the numbers, flags, strings and lists about layers in all nested sections (`_opened`)
    except vocabularies and the optimizer's. In sections about the model or with its shape, and in
    their parts, also all other lists. Values that cannot be read are collected as `Unread`. If
    sections disagree, the section about the model takes precedence; the values of equal sections
    become a list, which no reader of a single value understands. With `of_model_alone`, sections
    with measurements and data of a training are skipped, except their parts about the model."""
    stated: dict[str, list[Any]] = {}
    strong: set[str] = set()

    def add(name: str, value: Any, of_model: bool) -> None:
        if of_model and name not in strong:
            strong.add(name)
            stated[name] = []
        if of_model or name not in strong:
            values_of = stated.setdefault(name, [])
            values_of += [] if value in values_of else [value]

    def collect(
        values: Mapping[Any, Any],
        depth: int,
        of_model: bool = False,
        of_training: bool = False,
        shaped: bool = False,
    ) -> None:
        shaped = shaped or of_model or not _SHAPE.isdisjoint(map(str, values))
        for key, held in values.items():
            name = str(key)
            own, lowered = name.lower() in MODEL_SECTIONS, name.lower()
            sections, value = _opened(name, held)
            training = of_training or (of_model_alone and mentions(_TRAINING, name))
            if sections and depth == DEEPEST:
                sections, value = [], Unread(f"values below {DEEPEST} levels of sections")
            for section in sections:
                inner = training and not own and _SHAPE.isdisjoint(map(str, section))
                collect(section, depth + 1, of_model or own, inner, shaped)
            if isinstance(value, bool | int | float | str):
                skipped = of_training
            elif isinstance(value, Unread) or (
                isinstance(value, list)
                and (shaped or PER_LAYER.fullmatch(lowered) or _is_configuration(name, value))
            ):
                skipped = training
            else:
                continue
            if not skipped or _OF_ATTENTION.match(lowered):
                add(name, value, of_model)

    collect(contents, 0)
    return {name: found[0] if len(found) == 1 else found for name, found in stated.items()}


def collect_values(contents: Mapping[Any, Any], depth: int = 0) -> dict[str, Any]:
    """Collect the values of all nested sections (`_opened`) except state dicts, vocabularies and
    the optimizer's. A section is a value, too, unless its name says that it is the configuration of
    the model. If sections disagree, the section about the model takes precedence, or else the
    outermost section."""
    of_model, collected, inner = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for key, value in contents.items():
        name = str(key)
        if isinstance(value, Mapping) and (_is_state(value) or _is_of_others(name, value)):
            continue
        sections, rest = _opened(name, value)
        if len(sections) == 1 and depth < DEEPEST:
            found = collect_values(sections[0], depth + 1)
            if name.lower() in MODEL_SECTIONS:
                of_model = found | of_model
            inner = found | inner
        if sections and name.lower() in (*MODEL_SECTIONS, *CONFIG_NAMES):
            continue
        collected[name] = rest if isinstance(rest, Unread) else value
    return {} if _is_state(contents) else inner | collected | of_model


def _opened(name: str, value: Any) -> tuple[list[Mapping[Any, Any]], Any]:
    """The sections in a value: the dictionaries in it, in its lists, and in a JSON text, and lists
    of names and values. Vocabularies, tensors, entries of a log and states of the trainer are
    omitted. The second result is the rest of the value; None if nothing remains."""
    if isinstance(value, str | bytes):
        value = _stated_by_text(name, value)
    if isinstance(value, Mapping):
        return [] if _is_table(value) or _is_of_others(name, value) else [value], None
    if not isinstance(value, list | tuple):
        return [], value
    if pairs := _pairs(name, value):
        return _opened(name, pairs)
    sections, rest = list[Mapping[Any, Any]](), list[Any]()
    for part in value:
        if isinstance(part, Mapping | list | tuple):
            inner, part = _opened(name, part)
            sections += [section for section in inner if not _is_logged(section)]
            rest += [] if part is None else [part]
        elif not isinstance(part, Tensor):
            rest.append(part)
    return sections, rest if rest or not value else None


def _stated_by_text(name: str, text: str | bytes) -> Any:
    """The value of a JSON text of an object or a list; an `Unread` for another text of a
    configuration; other texts unchanged."""
    if text.lstrip()[:1] in ("{", "[", b"{", b"[") and (value := parsed(text)):
        return value
    if isinstance(text, str) and mentions(_CONFIGURATION, name) and _ASSIGNMENT.search(text):
        return Unread(f"a text that is not JSON ({text!r:.60})")
    return text


def _pairs(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """A list of names and values as a dictionary; empty if it is another list. Pairs of texts may
    belong to a vocabulary."""
    if not all(isinstance(part, list | tuple) and len(part) == 2 for part in values):
        return {}
    if not all(isinstance(part[0], str) for part in values):
        return {}
    pairs = dict(values)
    texts = all(isinstance(value, str) for value in pairs.values())
    known = len(pairs) == len(values) and (not texts or mentions(_CONFIGURATION, name))
    return pairs if known else {}


def _is_configuration(name: str, values: list[Any]) -> bool:
    """True if the name of a list says that it is a configuration, or if it holds an `Unread`."""
    return mentions(_CONFIGURATION, name) or Unread.is_in(values)


def _is_logged(values: Mapping[Any, Any]) -> bool:
    """True for an entry of a log."""
    return _SHAPE.isdisjoint(map(str, values)) and any(
        _LOGGED.fullmatch(str(key).lower()) and is_number(value) for key, value in values.items()
    )


def _is_of_others(name: str, values: Mapping[Any, Any]) -> bool:
    """True for a section about the optimizer, and under any name for the state of an optimizer, a
    scheduler, a tokenizer or the like."""
    ids = _VOCABULARY.fullmatch(snake_case(name)) and set(map(type, values.values())) == {int}
    return bool(
        ids or mentions(_OPTIMIZER_SETTINGS, name) or not _OF_OTHERS.isdisjoint(map(str, values))
    )


def _is_state(values: Mapping[Any, Any]) -> bool:
    return len(values) > 0 and all(isinstance(value, Tensor) for value in values.values())


def mentions(pattern: re.Pattern[str], name: str) -> bool:
    """True if the name of a section or a word of it matches a pattern."""
    lowered = snake_case(name)
    return any(pattern.fullmatch(word) for word in (lowered, *re.split(r"[\W_]+", lowered)))


def _is_table(values: Mapping[Any, Any]) -> bool:
    """True for a vocabulary: consecutive numbers, numbered texts, or many values of one type."""
    if len(values) > 200 and len(set(map(type, values.values()))) == 1:
        return True
    if all(str(key).isdigit() and isinstance(value, str) for key, value in values.items()):
        return True
    numbers = {value for value in values.values() if type(value) is int}
    consecutive = len(numbers) == len(values) > 3 and max(numbers) - min(numbers) < len(numbers)
    return consecutive and (min(numbers) == 0 or len(numbers) > 12)


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text; other texts unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
