"""Map files: a `TensorMap` and a `Computation` in TOML, for models that cannot be recognized.

If `logitd import` cannot recognize a model, it writes a draft of a map file. The user completes the
draft and passes it with `--map`. Roles that the file leaves out are recognized by names and shapes.

    state = "model_state"             # key of the state dict; omit it if the file is a state dict

    [tensors]                         # {N} is the layer's number, {M} the head's number
    token_embedding.weight = "emb.weight"
    query.weight = "blocks.{N}.heads.{M}.q.weight"
    mlp_down.weight = "identity"      # the source has no such matrix

    [computation]                     # the flags, by their names with underscores
    n_head = 4

    [files]
    ignore = ["*.mask"]               # tensors that are not weights
    transposed = ["mlp_up"]           # matrices that are stored (in, out)
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
)
from torch import Tensor

from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.finding import FIELDS, Findings
from logitd.model.convert.by_role.recognize import recognize
from logitd.model.convert.by_role.tensor_map import (
    IDENTITY,
    LAYER_ROLES,
    OUTER_ROLES,
    QKV,
    SEPARATE,
    Part,
    Role,
    TensorMap,
    glob,
)
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.source_file import source_text
from logitd.model.files import CONFIG_BYTES
from logitd.model.first_error import first_error

MOST_DOTS = 100
"""Maximum number of dots in a line, not counting dots in strings. The memory that the parser needs
grows with the square of the number of parts of a dotted key."""
_ATTENTION: tuple[Role, ...] = (*QKV, "query_norm", "key_norm", "attention_out")
_QUOTED = re.compile(r"""\"[^\"]*\"|'[^']*'""")


@dataclass(frozen=True)
class MapFile:
    """The contents of a map file. If `names` is empty, all tensors are recognized by their names
    and shapes."""

    path: Path
    state: str | None = None
    names: Mapping[tuple[Role, Part], str] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    transposed: frozenset[Role] | None = None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Files(_Strict):
    ignore: list[str] = []
    transposed: list[Role] | None = None


_Model = TypeVar("_Model", bound=BaseModel)
_KINDS = {int: PositiveInt, float: PositiveFloat}
Answers: type[BaseModel] = create_model(  # type: ignore[call-overload]
    "Answers",
    __config__=ConfigDict(extra="forbid", strict=True),
    **{name: (_KINDS.get(kind, kind), None) for name, kind in get_type_hints(Computation).items()},
)
"""The pydantic model that validates the fields of a `Computation`. Each field is optional."""


class _Document(_Strict):
    state: str | None = None
    tensors: dict[Role, dict[Part, Annotated[str, Field(min_length=1)]]] = {}
    computation: Answers = Answers()
    files: _Files = _Files()


def read_map_file(path: Path) -> MapFile:
    """Read a map file. Raises ConvertError if it is invalid; the error names the invalid key or
    line."""
    text = source_text(path, CONFIG_BYTES).removeprefix("\ufeff")  # some editors write it
    for number, line in enumerate(text.splitlines(), start=1):
        if (dots := _QUOTED.sub("", line).count(".")) > MOST_DOTS:
            raise ConvertError(
                f"line {number} of {path} has {dots:,} dots; the limit is {MOST_DOTS}"
            )
    try:
        parsed = tomllib.loads(text)
    except RecursionError as error:
        raise ConvertError(f"{path} is not TOML: it is nested too deeply") from error
    except ValueError as error:  # also for a number of thousands of digits
        raise ConvertError(f"{path} is not TOML: {error}") from error
    document = _validated(str(path), _Document, parsed)
    names = {
        (role, part): name
        for role, parts in document.tensors.items()
        for part, name in parts.items()
    }
    for (role, part), name in names.items():
        known = {"{N}", "{M}"} if role in LAYER_ROLES else set()
        if unknown := set(re.findall(r"\{[^}]*\}", name)) - known:
            raise ConvertError(
                f"{path}: {role}.{part} is {name!r}, which contains {sorted(unknown)}; the only "
                "placeholders are {N} and {M}, and only names in the layers may contain them"
            )
    return MapFile(
        path=path,
        state=document.state,
        names=names,
        answers=document.computation.model_dump(exclude_unset=True),
        ignore=tuple(document.files.ignore),
        transposed=None
        if document.files.transposed is None
        else frozenset(document.files.transposed),
    )


def check_answers(where: str, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the user's answers, which are keyed by field. Raises ConvertError."""
    return _validated(where, Answers, answers).model_dump(exclude_unset=True)


def _validated(where: str, model: type[_Model], values: Mapping[str, Any]) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first, problem = error.errors()[0], first_error(error)
    asked = model is Answers or first["loc"][0] == "computation"
    if first["type"] == "extra_forbidden" and asked:
        problem += f"; the fields are {', '.join(FIELDS)}"
    raise ConvertError(f"{where}: {problem}")


def tensor_map(file: MapFile, tensors: Mapping[str, Tensor], ignored: Iterable[str]) -> TensorMap:
    """The TensorMap that a map file describes. The numbers of layers and heads are determined from
    the tensors' names. `ignored` are tensors that are known not to be weights. Raises ConvertError
    if a name in the file matches no tensor.
    """
    weights = {role for role, part in file.names if part == "weight"}
    attention = () if "qkv" in weights else SEPARATE
    up = "mlp_gate_up" if "mlp_gate_up" in weights else "mlp_up"
    needed = ("token_embedding", "attention_norm", *attention, "mlp_norm", up)
    if missing := [role for role in needed if role not in weights]:
        try:
            return recognize_with(file, str(file.path), tensors)
        except ConvertError as error:
            raise ConvertError(
                f"{file.path}: [tensors] lacks {', '.join(missing)}, and not all of these roles "
                f"could be recognized: {error}"
            ) from error
    layers = _numbers(file, tensors, "N")
    unnamed = [name for name in ignored if name not in file.names.values()]
    return TensorMap(
        n_layer=len(layers) or 1,
        first_layer=min(layers, default=0),
        n_head=len(_numbers(file, tensors, "M")),
        names=file.names,
        ignored=tuple(dict.fromkeys([*unnamed, *glob(file.ignore, list(tensors))])),
        transposed=file.transposed or frozenset(),
    )


def recognize_with(file: MapFile, where: str, tensors: Mapping[str, Tensor]) -> TensorMap:
    """The TensorMap of a map file that names only some roles, or none. Gives usual names to the
    tensors that the file names, and then recognizes all tensors. Raises ConvertError."""
    named = [_pattern(pattern) for pattern in file.names.values()]
    ignored = [
        name
        for name in glob(file.ignore, list(tensors))
        if not any(pattern.fullmatch(name) for pattern in named)
    ]
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    given = {key: name for key, name in file.names.items() if name != IDENTITY}
    usual = {_usual_name(key, name): name for key, name in given.items()}
    renamed: dict[str, Tensor] = {}
    for name, tensor in kept.items():
        matches = (
            _numbered(_usual_name(key, pattern), match.groupdict())
            for key, pattern in given.items()
            if (match := _pattern(pattern).fullmatch(name)) is not None
        )
        renamed[next(matches, name)] = tensor
    for pattern in given.values():
        if not any(_pattern(pattern).fullmatch(name) for name in kept):
            raise ConvertError(f"{where}: no tensor has the name {pattern!r}")
    mapped = recognize(where, renamed)
    names = {key: usual.get(name, name) for key, name in mapped.names.items()} | dict(file.names)
    return replace(
        mapped,
        names=names,
        ignored=(*mapped.ignored, *ignored),
        transposed=mapped.transposed | (file.transposed or frozenset()),
        unclear=mapped.unclear if file.transposed is None else frozenset(),
    )


def _usual_name(key: tuple[Role, Part], pattern: str) -> str:
    """A name by which `recognize` finds the tensor with this role, with the layer prefix of
    `pattern`."""
    role, part = key
    before = pattern.partition("{N}")[0] + "{N}." if "{N}" in pattern else ""
    name: str = role
    if role in _ATTENTION:
        name = f"attn.heads.{{M}}.{role}" if "{M}" in pattern else f"attn.{role}"
    elif role.startswith("mlp_") and role != "mlp_norm":
        name = role.replace("_", ".", 1)
    return f"{before}{name}.{part}"


def _numbered(name: str, numbers: Mapping[str, str]) -> str:
    for mark, number in numbers.items():
        name = name.replace(f"{{{mark}}}", number)
    return name


def _pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression for a name with placeholders. Its groups N and M are the numbers of the
    layer and the head."""
    expression = re.escape(pattern)
    for mark in "NM":
        expression = expression.replace(rf"\{{{mark}\}}", rf"(?P<{mark}>\d+)", 1)
        expression = expression.replace(rf"\{{{mark}\}}", f"(?P={mark})")
    return re.compile(expression)


def _numbers(file: MapFile, tensors: Mapping[str, Tensor], mark: str) -> set[int]:
    """The numbers of the layers (if `mark` is N) or of the heads (if it is M) in the tensors'
    names."""
    numbers: set[int] = set()
    for (role, part), pattern in file.names.items():
        if f"{{{mark}}}" not in pattern:
            continue
        compiled = _pattern(pattern)
        matches = {int(m[mark]) for name in tensors if (m := compiled.fullmatch(name))}
        if not matches:
            raise ConvertError(
                f"{file.path}: {role}.{part} is {pattern!r}, but no tensor has such a name; the "
                f"tensors are {', '.join(list(tensors)[:4])}, ..."
            )
        numbers |= matches
    return numbers


def _tensor_lines(state: str | None, names: Mapping[tuple[Role, Part], str]) -> list[str]:
    lines = [f'state = "{state}"'] if state else []
    roles = (f'{role}.{part} = "{name}"' for (role, part), name in names.items())
    return [*lines, "", "[tensors]", *roles]


def partial_draft(
    state: str | None, known: Mapping[tuple[Role, Part], str], tensors: Mapping[str, Tensor]
) -> str:
    """A draft of a map file with the known roles, and commented lines for the other tensors."""
    lines = [
        "# Recognized roles of tensors. In the other lines, replace ROLE by the role and remove #.",
        "# The import still tries to recognize lines that remain comments. Roles are:",
        f"# {', '.join((*OUTER_ROLES, *LAYER_ROLES))}",
        *_tensor_lines(state, known),
    ]
    patterns = {name: re.sub(r"\d+", "{N}", name, count=1) for name in tensors}
    numbered = Counter(patterns.values())
    taken = set(known.values())
    for name, pattern in patterns.items():
        shown = pattern if numbered[pattern] > 1 else name
        if taken.isdisjoint((name, pattern)):
            part = "bias" if shown.rpartition(".")[2] == "bias" else "weight"
            lines.append(f'# ROLE.{part} = "{shown}"  # {list(tensors[name].shape)}')
            taken.add(pattern if shown == pattern else name)
    return "\n".join([*lines, "", "[files]", '# ignore = ["*.mask"]', "# transposed = []"]) + "\n"


def draft(state: str | None, mapped: TensorMap, findings: Findings) -> str:
    """A draft of a map file with everything that was recognized, and commented lines for the open
    fields."""
    lines = [
        "# Recognized and open fields. Complete the file and pass it with --map.",
        *_tensor_lines(state, mapped.names),
        "",
        "[computation]",
    ]
    for name in FIELDS:
        finding = findings[name]
        value = _toml(finding.values[0])
        if finding.resolved:
            lines.append(f"{name} = {value}  # {finding.origin}")
        elif finding.ambiguous:
            values = " | ".join(map(_toml, finding.values))
            lines.append(f"# {name} = {values}  # open: {finding.origin}")
        else:
            lines.append(f"# {name} = {value}  # assumed unless you set it")
    lines += ["", "[files]"]
    if mapped.ignored:
        lines.append(f"ignore = [{', '.join(f'{name!r}' for name in _patterns(mapped.ignored))}]")
    if mapped.transposed:
        lines.append(f"transposed = [{', '.join(f'{r!r}' for r in sorted(mapped.transposed))}]")
    return "\n".join(lines) + "\n"


def _patterns(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "{N}", name) for name in names))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
