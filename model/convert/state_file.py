"""State files: reads the tensors, settings and other contents of weight files saved by any code.

It finds the state dict in a .pt, .pth, .bin, .ckpt or .safetensors file, even if the state dict is
nested. It finds the configuration in the same file or in a JSON file next to it. Pickles are read
as data only (`pt_file.py`). `by_role/` interprets the tensors.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from logitd.model.convert.by_role.names import FIRST_WRAPPER, SETTINGS, snake_case
from logitd.model.convert.by_role.stated_loss import StatedLoss, stated_loss
from logitd.model.convert.containers import container_of, read_json_weights, read_npz
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.pt_file import read_pt, without_tensors
from logitd.model.convert.source_file import source_json
from logitd.model.convert.unknown_settings import PER_LAYER, unknown_settings
from logitd.model.owner_code.process.build import CONFIG_NAMES
from logitd.model.owner_code.process.weights import without_wrappers
from logitd.model.plural import pluralize

LOOKED_FOR = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npz")
"""In a folder, files with these suffixes count as weight files."""
SUFFIXES = (*LOOKED_FOR, ".pkl", ".pickle", ".json", ".tar", ".model")
"""Suffixes of files that can be imported if the user gives the path of the file."""

_BESIDE_WEIGHTS = re.compile(
    r"(training_args|optim(izer)?|sched(uler)?|scaler|rng_state|random_states|.*tokenizer).*"
)
"""Names of files that have the suffix of a weight file but contain no weights, such as the
optimizer state that Hugging Face's Trainer saves."""

STATES = (
    "model", "model_state", "model_state_dict", "state_dict", "net", "network", "weights", "module",
    "params", "parameters", "generator", "gpt", "transformer",
)  # fmt: skip
"""Usual keys of the state dict in a checkpoint, the most likely first."""
SETTINGS_FILES = ("config.json", "model_config.json", "args.json", "hparams.json", "params.json")
UNREAD_SETTINGS = tuple(
    f"{Path(name).stem}.{suffix}" for name in SETTINGS_FILES for suffix in ("yaml", "yml")
)
"""Names of files that may hold settings, but are not read."""
DEEPEST = 8
"""Sections nested more deeply are not read."""
MOST_SHOWN = 6
"""Number of tensors outside the state dict that a sentence names."""
MODEL_SECTIONS = ("model", "model_config", "model_args", "gpt", "model_params")
_OPTIMIZER = re.compile(r"opt|optim|optims|optimizers?|sched|schedulers?|adamw?|scaler")
"""Words in the names of sections that describe the optimizer, whose `eps` is not a norm's."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""Keys under which torch's optimizers store tensors with the shapes of weights."""
_TRAINING = re.compile(
    r"train(ing|er)?|ema|swa|average|rng|metrics?|hist(ory|ories)?|loss(es)?|wandb|stats?|"
    r"statistics|data(set|sets|loader|module)?"
)
"""Words in the names of sections that describe the training instead of the model."""
_PARTS = re.compile(r"blocks?|layers?|attn|attentions?|mixers?|stages?|modules?")
"""Words in the names of lists that have a section for each part of a model."""
_OF_ATTENTION = re.compile(r"(sliding|attention|attn|rope|rotary|softmax)_")
"""Beginnings of the names of settings that belong to the model in any section."""
_SHAPE = frozenset(name for field in ("n_layer", "n_head") for name in SETTINGS[field])
"""Settings in a section that also describes the model."""


@dataclass(frozen=True)
class StateFile:
    """The contents of a weight file.

    where      the file, and the key of the state dict in it, for messages
    tensors    tensors by name; prefixes that wrappers add are removed
    state      key of the state dict; None if the file itself is the state dict
    settings   numbers, flags and strings of the configuration, by name
    values     the settings, and the configuration's values of all other types, by name: parameters
               of the owner's class may have any type
    contents   everything in the file except tensors; may include a vocabulary
    unknown    settings that are not understood and may change logits
    loss       the loss that the file states; None if it states none
    left_out   sentences about tensors that are not read
    """

    path: Path
    where: str
    tensors: Mapping[str, Tensor]
    state: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    contents: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, Any] = field(default_factory=dict)
    loss: StatedLoss | None = None
    left_out: Sequence[str] = ()


def read_state_file(path: Path, *, state: str | None = None) -> StateFile:
    """Read a weight file. `state` is the key of the state dict, with nested keys joined by dots;
    None searches for the state dict. Raises ConvertError."""
    whole = loaded = read_tensors(path)
    key, contents, left_out = "", dict[str, Any](), list[str]()
    if container_of(path) != "safetensors":
        key, loaded = _state_dict(path, whole, state)
        contents = without_tensors(whole)
        if state is None:
            _check_nothing_outside(path, whole, key, loaded)
        left_out = tensors_left_out(path, whole, key)
    where = f"{path} ({key})" if key else str(path)
    document = _document_beside(path)
    beside, inside = collect_settings(document), collect_settings(whole)
    return StateFile(
        path,
        where,
        named_tensors(where, loaded),
        state=key or None,
        settings=beside | inside,
        values=collect_values(document) | beside | collect_values(whole) | inside,
        contents=contents,
        unknown=unknown_settings(
            beside | collect_settings(whole, of_model_alone=True), by_role=True
        )
        | _unread_beside(path),
        loss=stated_loss(whole),
        left_out=left_out,
    )


def find_state_file(folder: Path) -> Path:
    """Find the only weight file in a folder, or else in its subfolders. Raises ConvertError if
    there is none, or more than one."""
    levels = [sorted(filter(holds_weights, folder.glob(deep))) for deep in ("*", "*/*", "*/*/*")]
    for arrays in (False, True):  # NumPy's files are usually data
        for level in levels:
            candidates = [path for path in level if (path.suffix == ".npz") == arrays]
            if len(candidates) == 1:
                return candidates[0]
            if candidates:
                raise ConvertError(
                    f"{folder} has {len(candidates)} weight files: "
                    f"{', '.join(str(p.relative_to(folder)) for p in candidates[:8])}; import one "
                    "of them by its path"
                )
    held = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ConvertError(f"{folder} has no weight file ({', '.join(LOOKED_FOR)}); it holds {held}")


def holds_weights(path: Path) -> bool:
    """True if a path is a file whose name suggests that it contains weights."""
    named = path.suffix in LOOKED_FOR and _BESIDE_WEIGHTS.fullmatch(path.name.lower()) is None
    return named and path.is_file()


def read_tensors(path: Path) -> Mapping[Any, Any]:
    """Read the dictionary in a weight file. Raises ConvertError."""
    match container_of(path):
        case "npz":
            return read_npz(path)
        case "json":
            return read_json_weights(path)
        case "torch" | "llama2.c":
            return read_pt(path)
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ConvertError(f"{path} is not a complete safetensors file: {error}") from error


def _state_dict(
    path: Path, loaded: Mapping[Any, Any], wanted: str | None
) -> tuple[str, Mapping[str, Tensor]]:
    """The key of the state dict, and the state dict. The key is "" if the file itself is the state
    dict."""
    candidates = dict(_state_dicts(loaded))
    if wanted is not None:
        if wanted not in candidates:
            raise ConvertError(
                f"{path} has no state dict under {wanted!r}; its state dicts are "
                f"{', '.join(map(repr, candidates)) or 'none'}"
            )
        return wanted, candidates[wanted]
    if not candidates:
        held = ", ".join(
            f"{key} ({type(value).__name__})" for key, value in list(loaded.items())[:8]
        )
        raise ConvertError(f"{path} has no state dict (tensors by name); it contains {held}")
    ranked = sorted(candidates, key=_rank)
    if len(ranked) > 1 and _rank(ranked[0]) == _rank(ranked[1]):
        raise ConvertError(
            f"{path} holds {len(candidates)} state dicts: {', '.join(ranked)}; name one in a --map "
            "file (state = ...)"
        )
    return ranked[0], candidates[ranked[0]]


def _rank(key: str) -> int:
    last = key.rpartition(".")[2].lower()
    return STATES.index(last) if last in STATES else len(STATES)


def _state_dicts(
    value: Mapping[Any, Any], path: str = "", depth: int = 0
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    tensors = {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, Tensor)}
    if len(tensors) >= 4 and sum(tensor.dim() > 1 for tensor in tensors.values()) >= 3:
        yield path, tensors
    elif depth < 4:
        for key, inner in value.items():
            if isinstance(key, str) and isinstance(inner, Mapping):
                yield from _state_dicts(inner, f"{path}.{key}" if path else key, depth + 1)


def _check_nothing_outside(
    path: Path, whole: Mapping[Any, Any], key: str, state: Mapping[str, Tensor]
) -> None:
    """Raise ConvertError if the file has weights outside the state dict, such as a head that was
    saved separately: tensors with the shape of one in the state dict, or the transposed shape.
    Other state dicts, such as averages, and an optimizer's state do not count."""
    shapes = {tuple(sorted(tensor.shape)) for tensor in state.values()}
    found = [
        f"{name} {list(tensor.shape)}"
        for name, tensor in _loose_tensors(whole, {name for name, _ in _state_dicts(whole)}, key)
        if tensor.is_floating_point() and tensor.numel() > 1
        if tuple(sorted(tensor.shape)) in shapes
    ]
    if found:
        raise ConvertError(
            f"{path} has weights outside its state dict{f' {key}' if key else ''}: "
            f"{', '.join(found[:4])}. Save all weights in one state dict; or, to leave these out, "
            f"write state = {json.dumps(key)} in a --map file"
        )


def tensors_left_out(path: Path, whole: Mapping[Any, Any], key: str) -> list[str]:
    """A sentence that names the tensors outside the state dict `key`, except those of an optimizer;
    none if there are none. Raises ConvertError if some belong to an adapter."""
    states = dict(_state_dicts(whole))
    outside = {
        name: state
        for name, state in states.items()
        if name != key and not any(_mentions(_OPTIMIZER, part) for part in name.split("."))
    }
    loose = {
        name: tensor
        for name, tensor in _loose_tensors(whole, states, key)
        if tensor.is_floating_point() and tensor.numel() > 1
    }
    inner = (name for state in outside.values() for name in state)
    if adapter := next((name for name in (*loose, *inner) if "lora_" in name.lower()), None):
        raise ConvertError(
            f"{path} contains an adapter ({adapter}) in addition to the state dict. Adapters are "
            "not imported: merge it into the weights, or remove it from a copy of the file"
        )
    shown = [f"{name} ({pluralize(len(state), 'tensor')})" for name, state in outside.items()]
    shown += [f"{name} {list(tensor.shape)}" for name, tensor in loose.items()]
    more = f" and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
    return [f"left out of {path}: {', '.join(shown[:MOST_SHOWN])}{more}"] if shown else []


def _loose_tensors(
    values: Mapping[Any, Any], states: Collection[str], chosen: str, path: str = "", depth: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """The tensors outside all state dicts, whose keys are `states`. Dictionaries in the chosen
    state dict are searched, too."""
    for key, value in values.items():
        inner = f"{path}.{key}" if path else str(key)
        if not isinstance(key, str) or _mentions(_OPTIMIZER, key) or key in _MOMENTS:
            continue
        if isinstance(value, Tensor) and path not in states:
            yield inner, value
        elif isinstance(value, Mapping) and depth < 4 and (inner == chosen or inner not in states):
            yield from _loose_tensors(value, states, chosen, inner, depth + 1)


def named_tensors(where: str, state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict by name. The parts that wrappers add are removed from the names.
    Raises ConvertError if the state dict contains anything other than tensors."""
    unwrapped: dict[str, Tensor] = {}
    for full, tensor in state.items():
        if not isinstance(full, str) or not isinstance(tensor, Tensor):
            raise ConvertError(
                f"{where} contains {full!r} of type {type(tensor).__name__}; expected only tensors"
            )
        name = without_wrappers(full)
        while name.startswith(f"{FIRST_WRAPPER}."):
            name = name.removeprefix(f"{FIRST_WRAPPER}.")
        if name in unwrapped:
            raise ConvertError(f"{where} holds {name} twice, with and without a prefix")
        unwrapped[name] = tensor
    return unwrapped


def collect_settings(
    contents: Mapping[Any, Any], *, of_model_alone: bool = False
) -> dict[str, Any]:
    """Collect the numbers, flags, strings and lists about layers in all nested dictionaries except
    vocabularies and the optimizer's, and all lists in sections about the model or with its shape,
    and their parts. If sections
    disagree, the section about the model takes precedence; the values of equal sections become a
    list, which no reader of a single value understands. With `of_model_alone`, sections about
    training are skipped, except their parts about the model."""
    stated: dict[str, list[Any]] = {}
    strong: set[str] = set()

    def collect(
        values: Mapping[Any, Any],
        depth: int,
        of_model: bool = False,
        of_training: bool = False,
        shaped: bool = False,
    ) -> None:
        shaped = shaped or of_model or not _SHAPE.isdisjoint(map(str, values))
        for key, value in values.items():
            name = str(key)
            listed = isinstance(value, list) and (shaped or PER_LAYER.fullmatch(name.lower()))
            if isinstance(value, bool | int | float | str) or listed:
                if of_training and _OF_ATTENTION.match(name.lower()) is None:
                    continue
                if of_model and name not in strong:
                    strong.add(name)
                    stated[name] = []
                if of_model or name not in strong:
                    values_of = stated.setdefault(name, [])
                    values_of += [] if value in values_of else [value]
            elif isinstance(value, Mapping) and depth < DEEPEST:
                if _is_table(value) or _mentions(_OPTIMIZER, name):
                    continue
                own = name.lower() in MODEL_SECTIONS
                training = of_model_alone and not own and _SHAPE.isdisjoint(map(str, value))
                training = training and (of_training or _mentions(_TRAINING, name))
                collect(value, depth + 1, of_model or own, training, shaped)
            elif isinstance(value, list) and _mentions(_PARTS, name) and depth < DEEPEST:
                for part in value:
                    if isinstance(part, Mapping) and not of_training:
                        collect(part, depth + 1, of_model, shaped=shaped)

    collect(contents, 0)
    return {name: found[0] if len(found) == 1 else found for name, found in stated.items()}


def collect_values(contents: Mapping[Any, Any], depth: int = 0) -> dict[str, Any]:
    """Collect the values of all nested dictionaries except state dicts, vocabularies and the
    optimizer's. A dictionary is a value, too, unless its name says that it is the configuration of
    the model. If dictionaries disagree, the section about the model takes precedence, or else the
    outermost dictionary."""
    of_model, collected, inner = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for key, value in contents.items():
        name = str(key)
        if isinstance(value, Mapping):
            if _is_state(value) or _mentions(_OPTIMIZER, name):
                continue
            if depth < DEEPEST and not _is_table(value):
                found = collect_values(value, depth + 1)
                if name.lower() in MODEL_SECTIONS:
                    of_model = found | of_model
                inner = found | inner
            if name.lower() in (*MODEL_SECTIONS, *CONFIG_NAMES):
                continue
        collected[name] = value
    return {} if _is_state(contents) else inner | collected | of_model


def _is_state(values: Mapping[Any, Any]) -> bool:
    return len(values) > 0 and all(isinstance(value, Tensor) for value in values.values())


def _mentions(pattern: re.Pattern[str], name: str) -> bool:
    """True if a word of the name of a section matches a pattern."""
    return any(pattern.fullmatch(word) for word in re.split(r"[\W_]+", snake_case(name)))


def _is_table(values: Mapping[Any, Any]) -> bool:
    """True for a vocabulary: consecutive numbers, numbered texts, or many values of one type."""
    if len(values) > 200 and len(set(map(type, values.values()))) == 1:
        return True
    if all(str(key).isdigit() and isinstance(value, str) for key, value in values.items()):
        return True
    numbers = {value for value in values.values() if type(value) is int}
    consecutive = len(numbers) == len(values) > 3 and max(numbers) - min(numbers) < len(numbers)
    return consecutive and (min(numbers) == 0 or len(numbers) > 12)


def _unread_beside(path: Path) -> dict[str, Any]:
    return {name: "not read" for name in UNREAD_SETTINGS if path.with_name(name).is_file()}


def _document_beside(path: Path) -> dict[str, Any]:
    """The JSON object in the first settings file next to the weights; empty if there is none."""
    for name in SETTINGS_FILES:
        file = path.parent / name
        if file.is_file():
            try:
                document = source_json(file)
            except ConvertError as error:
                raise ConvertError(f"{error} (next to the weights)") from error
            if isinstance(document, dict):
                return document
    return {}
