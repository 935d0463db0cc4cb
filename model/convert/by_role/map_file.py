"""Map file: a `TensorMap` and a `Computation` as TOML, for what names and shapes do not say.

`logitd import` writes a draft where it stops; a person completes it, and gives it back by `--map`.

    state = "model_state"             # key of the state dict; leave out where the file is one

    [tensors]                         # {N} is the number of the layer, {M} that of the head
    token_embedding.weight = "emb.weight"
    query.weight = "blocks.{N}.heads.{M}.q.weight"
    mlp_down.weight = "identity"      # there is none, and nothing in its place

    [computation]                     # the flags, by their names with underscores
    n_head = 4

    [files]
    ignore = ["*.mask"]               # tensors that are not weights
    transposed = ["mlp_up"]           # matrices that lie (in, out)
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torch import Tensor

from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.questions import FIELDS, Finding, Findings
from logitd.model.convert.by_role.tensor_map import (
    IDENTITY,
    LAYER_ROLES,
    OUTER_ROLES,
    Part,
    Role,
    TensorMap,
    glob,
)
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.source_file import source_text
from logitd.model.files import CONFIG_BYTES

SECTIONS = ("state", "tensors", "computation", "files")


@dataclass(frozen=True)
class MapFile:
    """What a map file says. `names` may be empty: then tensors are recognised."""

    path: Path
    state: str | None = None
    names: Mapping[tuple[Role, Part], str] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    transposed: frozenset[Role] = frozenset()


def read_map_file(path: Path) -> MapFile:
    """Read a map file. Raises ConvertError, naming the key that is wrong."""
    try:
        document = tomllib.loads(source_text(path, CONFIG_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConvertError(f"{path} is not TOML: {error}") from error
    _check_known(path, document, SECTIONS, "section")
    files = _section(path, document, "files")
    _check_known(path, files, ("ignore", "transposed"), "key of [files]")
    transposed = _texts(path, files, "transposed")
    roles = (*OUTER_ROLES, *LAYER_ROLES)
    _check_known(path, transposed, roles, "role in transposed")
    state = document.get("state")
    if state is not None and not isinstance(state, str):
        raise ConvertError(f"{path}: state is {state!r}; expected the key of the state dict")
    return MapFile(
        path=path,
        state=state,
        names=_names(path, _section(path, document, "tensors")),
        answers=check_answers(f"{path} [computation]", _section(path, document, "computation")),
        ignore=tuple(_texts(path, files, "ignore")),
        transposed=frozenset(transposed),  # type: ignore[arg-type]
    )


def _names(path: Path, section: Mapping[str, Any]) -> dict[tuple[Role, Part], str]:
    names: dict[tuple[Role, Part], str] = {}
    _check_known(path, section, (*OUTER_ROLES, *LAYER_ROLES), "role")
    for role, parts in section.items():
        if not isinstance(parts, dict):
            raise ConvertError(f"{path}: {role} is {parts!r}; expected {role}.weight = NAME")
        _check_known(path, parts, get_args(Part), f"part of {role}")
        for part, name in parts.items():
            if not isinstance(name, str) or not name:
                raise ConvertError(f"{path}: {role}.{part} is {name!r}; expected a tensor's name")
            if role in LAYER_ROLES and name != IDENTITY and "{" in name:
                _check_placeholders(path, name)
            elif role not in LAYER_ROLES and ("{N}" in name or "{M}" in name):
                raise ConvertError(
                    f"{path}: {role}.{part} is {name!r}; {role} is outside the layers, so its name "
                    "has neither {N} nor {M}"
                )
            names[role, part] = name  # type: ignore[index]
    return names


def _check_placeholders(path: Path, name: str) -> None:
    if unknown := set(re.findall(r"\{[^}]*\}", name)) - {"{N}", "{M}"}:
        raise ConvertError(f"{path}: {name!r} has {sorted(unknown)}; known are {{N}} and {{M}}")


def check_answers(where: str, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Answers by field, each of its kind. Raises ConvertError."""
    kinds = get_type_hints(Computation)
    checked: dict[str, Any] = {}
    for name, value in answers.items():
        if name not in kinds:
            raise ConvertError(f"{where}: unknown field {name!r}; known are {', '.join(FIELDS)}")
        options = get_args(kinds[name])
        if options and value not in options:
            raise ConvertError(f"{where}: {name} is {value!r}; it must be one of {list(options)}")
        if kinds[name] is bool and not isinstance(value, bool):
            raise ConvertError(f"{where}: {name} is {value!r}; it must be true or false")
        if kinds[name] is int and (type(value) is not int or value < 1):
            raise ConvertError(f"{where}: {name} is {value!r}; it must be an integer above 0")
        if kinds[name] is float:
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConvertError(f"{where}: {name} is {value!r}; it must be a number above 0")
            value = float(value)
        checked[name] = value
    return checked


def tensor_map(
    where: str, file: MapFile, tensors: Mapping[str, Tensor], ignored: Iterable[str]
) -> TensorMap:
    """The map that a file describes, with layers and heads counted in the tensors' names. `ignored`
    are tensors that are known not to be weights. Raises ConvertError for a name without a match."""
    weights = {role for role, part in file.names if part == "weight"}
    attention = () if "qkv" in weights else ("query", "key", "value")
    up = "mlp_gate_up" if "mlp_gate_up" in weights else "mlp_up"
    needed = ("token_embedding", "attention_norm", *attention, "mlp_norm", up)
    if file.names and (missing := [role for role in needed if role not in weights]):
        raise ConvertError(
            f"{file.path}: [tensors] lacks {missing[0]}.weight; every GPT has {', '.join(needed)}"
        )
    layers = _numbers(file, tensors, "{N}")
    heads = _numbers(file, tensors, "{M}")
    named = set(file.names.values())
    return TensorMap(
        n_layer=len(layers) or 1,
        first_layer=min(layers, default=0),
        n_head=len(heads),
        names=file.names,
        ignored=tuple(
            dict.fromkeys(
                [*(n for n in ignored if n not in named), *glob(file.ignore, list(tensors))]
            )
        ),
        transposed=file.transposed,
    )


def _numbers(file: MapFile, tensors: Mapping[str, Tensor], mark: str) -> set[int]:
    """The numbers that stand in place of a mark, over all names that have it."""
    numbers: set[int] = set()
    for (role, part), pattern in file.names.items():
        if mark not in pattern:
            continue
        other = "{M}" if mark == "{N}" else "{N}"
        expression = re.escape(pattern).replace(re.escape(mark), r"(\d+)")
        compiled = re.compile(expression.replace(re.escape(other), r"\d+"))
        matches = {int(m[1]) for name in tensors if (m := compiled.fullmatch(name))}
        if not matches:
            raise ConvertError(
                f"{file.path}: {role}.{part} is {pattern!r}, and no tensor has such a name; there "
                f"are {', '.join(list(tensors)[:4])}, ..."
            )
        numbers |= matches
    return numbers


def draft(state: str | None, mapped: TensorMap, findings: Findings) -> str:
    """A map file of what was recognised, with the open fields as lines to complete."""
    lines = ["# What was recognised, and what is open. Complete it and give it back with --map."]
    if state:
        lines.append(f'state = "{state}"')
    lines += ["", "[tensors]"]
    lines += [f'{role}.{part} = "{name}"' for (role, part), name in mapped.names.items()]
    lines += ["", "[computation]"]
    for name in FIELDS:
        finding = findings[name]
        value = _toml(finding.values[0])
        if finding.settled:
            lines.append(f"{name} = {value}  # {finding.origin}")
        elif finding.asked:
            values = " | ".join(map(_toml, finding.values))
            lines.append(f"# {name} = {values}  # open: {finding.origin}")
        else:
            lines.append(f"# {name} = {value}  # assumed unless you say otherwise")
    lines += ["", "[files]"]
    if mapped.ignored:
        lines.append(f"ignore = [{', '.join(f'{name!r}' for name in _patterns(mapped.ignored))}]")
    if mapped.transposed:
        lines.append(f"transposed = [{', '.join(f'{r!r}' for r in sorted(mapped.transposed))}]")
    return "\n".join(lines) + "\n"


def _patterns(names: Iterable[str]) -> list[str]:
    """Names with their numbers as {N}, each once."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "{N}", name) for name in names))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def settled_findings(file: MapFile, findings: Findings) -> dict[str, Finding]:
    """Findings with the file's answers."""
    answered = {
        name: Finding((value,), f"{name} in {file.path.name}")
        for name, value in file.answers.items()
    }
    return dict(findings) | answered


def _section(path: Path, document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name, {})
    if not isinstance(section, dict):
        raise ConvertError(f"{path}: {name} is {section!r}; expected a section [{name}]")
    return section


def _texts(path: Path, section: Mapping[str, Any], name: str) -> list[str]:
    values = section.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConvertError(f"{path}: {name} is {values!r}; expected a list of texts")
    return values


def _check_known(path: Path, keys: Iterable[str], known: Iterable[str], what: str) -> None:
    if unknown := sorted(set(keys) - set(known)):
        raise ConvertError(f"{path}: unknown {what} {unknown[0]!r}; known are {', '.join(known)}")
