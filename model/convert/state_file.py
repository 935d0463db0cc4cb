"""State files: reads the tensors, settings and other contents of weight files saved by any code.

It finds the state dict in a .pt, .pth, .bin, .ckpt or .safetensors file, even if the state dict is
nested. The settings are in the same file, which may be the metadata of safetensors, and in JSON
files next to it (`collected_settings.py`). Pickles are read as data only (`pt_file.py`). `by_role/`
interprets the tensors.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from logitd.model.convert.by_role.names import FIRST_WRAPPER
from logitd.model.convert.by_role.stated import counts_of
from logitd.model.convert.by_role.stated_loss import StatedLoss, stated_loss
from logitd.model.convert.collected_settings import (
    OPTIMIZER,
    collect_settings,
    collect_values,
    mentions,
    parsed,
)
from logitd.model.convert.containers import container_of, read_json_weights, read_npz
from logitd.model.convert.foreign import ConvertError, Unread
from logitd.model.convert.pt_file import read_pt, without_tensors
from logitd.model.convert.shards import (
    index_of,
    is_index,
    read_shards,
    require_whole,
    shards_of,
)
from logitd.model.convert.source_file import source_json
from logitd.model.convert.unknown_settings import unknown_settings, unshown
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
SETTINGS_FILES = (
    *("config.json", "model_config.json", "gpt_config.json", "args.json", "hparams.json"),
    *("hyperparameters.json", "params.json"),
)
"""Names of files next to the weights that are read as settings. So are `model.json` and
`model_config.json` next to `model.pt`."""
UNREAD_SETTINGS = tuple(
    f"{Path(name).stem}.{suffix}" for name in SETTINGS_FILES for suffix in ("yaml", "yml", "toml")
)
"""Names of files that may hold settings, but are not read."""
MOST_SHOWN = 6
"""Number of tensors outside the state dict that a sentence names."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""Keys under which torch's optimizers store tensors with the shapes of weights."""


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
    step       training step of the weights; 0 if the file does not state it
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
    step: int = 0
    loss: StatedLoss | None = None
    left_out: Sequence[str] = ()


def read_state_file(path: Path, *, state: str | None = None) -> StateFile:
    """Read a weight file. `state` is the key of the state dict, with nested keys joined by dots;
    None searches for the state dict. Raises ConvertError, also for one of several shards; their
    index reads them all."""
    require_whole(path)
    whole = loaded = read_tensors(path)
    key, left_out = "", list[str]()
    if is_index(path) or container_of(path) == "safetensors":
        whole = contents = read_metadata(path)
    else:
        key, loaded = _state_dict(path, whole, state)
        contents = without_tensors(whole)
        if state is None:
            _check_nothing_outside(path, whole, key, loaded)
        left_out = tensors_left_out(path, whole, key)
    where = f"{path} ({key})" if key else str(path)
    documents = _documents_beside(path)
    beside, inside = collect_settings(documents), collect_settings(whole)
    contradicted = _contradicted(inside, beside)
    values = dict[str, Any]()
    for document in documents.values():
        values = (collect_values(document) if isinstance(document, dict) else {}) | values
    return StateFile(
        path,
        where,
        named_tensors(where, loaded),
        state=key or None,
        settings=beside | inside | contradicted,
        values=values | beside | collect_values(whole) | inside | contradicted,
        contents=contents,
        unknown=unknown_settings(
            beside | collect_settings(whole, of_model_alone=True), by_role=True
        )
        | _unread_beside(path),
        step=_step(whole, key),
        loss=stated_loss(whole),
        left_out=left_out,
    )


def find_state_file(folder: Path) -> Path:
    """Find the only weight file in a folder, or else in its subfolders; the index if the model is
    in shards. Raises ConvertError if there is none, or more than one."""
    levels = [
        sorted({index_of(path) or path for path in filter(holds_weights, folder.glob(deep))})
        for deep in ("*", "*/*", "*/*/*")
    ]
    for arrays in (False, True):  # NumPy's files are usually data
        for level in levels:
            candidates = [path for path in level if (path.suffix == ".npz") == arrays]
            if len(candidates) == 1:
                return candidates[0]
            if candidates:
                require_whole(candidates[0])
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
    """Read the dictionary in a weight file, or the tensors of an index. Raises ConvertError."""
    if is_index(path):
        return read_shards(path, lambda shard: named_tensors(str(shard), read_tensors(shard)))
    match container_of(path):
        case "npz":
            return read_npz(path)
        case "json":
            return read_json_weights(path)
        case "torch" | "llama2.c":
            return read_pt(path)
    try:
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            # `save_model` stores a tensor with several names once, and the others as metadata.
            twins = (opened.metadata() or {}).items()
            return {twin: tensors[name] for twin, name in twins if name in tensors} | tensors
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ConvertError(f"{path} is not a complete safetensors file: {error}") from error


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the texts in the header of a safetensors file, by name, except further names of tensors.
    Texts that are JSON or a flag of Python become their values. Of an index, the headers of all
    shards are read; other containers have no such texts."""
    if is_index(path):
        return {k: v for shard in shards_of(path) for k, v in read_metadata(shard).items()}
    if container_of(path) != "safetensors":
        return {}
    with safe_open(path, framework="pt") as opened:
        names = frozenset(opened.keys())
        texts = {k: v for k, v in (opened.metadata() or {}).items() if v not in names}
    flags = {"True": True, "False": False, "None": None}
    return {name: flags[text] if text in flags else parsed(text) for name, text in texts.items()}


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


def _step(whole: Mapping[Any, Any], key: str) -> int:
    """The training step that a dictionary around the state dict `key` states, the innermost first;
    0 if none does. In a configuration, such a number may be a plan."""
    step, values = 0, whole
    for part in (*key.split("."), ""):
        step = next((count for _, count in counts_of("step", values)), step)
        inner = values.get(part)
        if not isinstance(inner, Mapping):
            break
        values = inner
    return step


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
        if name != key and not any(mentions(OPTIMIZER, part) for part in name.split("."))
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
        if not isinstance(key, str) or mentions(OPTIMIZER, key) or key in _MOMENTS:
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


def _unread_beside(path: Path) -> dict[str, Any]:
    return {name: "not read" for name in UNREAD_SETTINGS if path.with_name(name).is_file()}


def _contradicted(inside: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that may change a logit and differ between the weight file and the files next to
    it. Neither value is read."""
    return {
        name: Unread(f"{inside[name]!r} in the file, {beside[name]!r} next to it")
        for name in unshown(inside).keys() & beside.keys()
        if inside[name] != beside[name]
    }


def _documents_beside(path: Path) -> dict[str, Any]:
    """The contents of the settings files next to the weights, by file name."""
    documents = {}
    for name in (*SETTINGS_FILES, f"{path.stem}.json", f"{path.stem}_config.json"):
        file = path.with_name(name)
        if file.is_file() and file != path:
            try:
                documents[name] = source_json(file)
            except ConvertError as error:
                raise ConvertError(f"{error} (next to the weights)") from error
    return documents
