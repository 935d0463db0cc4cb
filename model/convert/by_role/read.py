"""Read: reads a model saved by any program, by finding the roles of its tensors.

The steps are: recognize the tensors' roles, or take them from a map file; find evidence in the
file; resolve what is open; build a `ForeignModel`; report. The report lists the tensor name and
shape for each role, the value and origin of each field, and the changes to weights. If variants
were compared, it also lists their losses or differences. `model/convert/state_file.py` reads the
files.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from logitd.model.convert.by_role.build import build
from logitd.model.convert.by_role.finding import UNUSED, Finding, unused
from logitd.model.convert.by_role.left_out import require_roles
from logitd.model.convert.by_role.map_file import (
    MapFile,
    check_answers,
    draft,
    partial_draft,
    recognize_with,
    tensor_map,
)
from logitd.model.convert.by_role.objective import (
    CheckText,
    LogitsObjective,
    Objective,
    text_objectives,
)
from logitd.model.convert.by_role.owner_code import (
    OwnerCode,
    numbers_in,
    owner_logits,
    require_read,
)
from logitd.model.convert.by_role.positions import CONTEXT_IF_UNKNOWN, check_rotary_width
from logitd.model.convert.by_role.questions import contradicted_sizes, find
from logitd.model.convert.by_role.recognize import NotRecognized, is_buffer, recognize
from logitd.model.convert.by_role.resolution import Alternative, OpenQuestions, Resolution
from logitd.model.convert.by_role.resolve import answered, resolve
from logitd.model.convert.by_role.stated import is_number, setting
from logitd.model.convert.by_role.tensor_map import (
    IDENTITY,
    MappedTensors,
    Part,
    Role,
    TensorMap,
    check,
)
from logitd.model.convert.foreign import (
    ConvertError,
    ForeignModel,
    UnusableTensor,
    naming,
    plausible_loss,
)
from logitd.model.convert.state_file import StateFile
from logitd.model.files import write_whole
from logitd.model.transformer.config import GPTConfig

KIND = "its own code"


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """The user's answers about a model.

    answers    the user's values for fields of a `Computation`
    code       the owner's code
    draft      path for a draft of a map file, which is written if roles are unknown or questions
               stay open
    """

    answers: Mapping[str, Any] = field(default_factory=dict)
    map_file: MapFile | None = None
    code: OwnerCode | None = None
    draft: Path | None = None

    @property
    def given(self) -> bool:
        """True if an option is set that only applies to recognition by role."""
        return bool(self.answers) or self.map_file is not None or self.code is not None


@dataclass(frozen=True)
class Recognized:
    """The tensors of a file by role, and the evidence about its computation. `contradicted` are the
    stated sizes that the tensors contradict."""

    file: StateFile
    tensors: MappedTensors
    findings: Mapping[str, Finding]
    contradicted: Mapping[str, Any] = field(default_factory=dict)
    code: OwnerCode | None = None
    draft: Path | None = None
    special_ids: frozenset[int] = frozenset()
    kind = KIND

    @property
    def rows(self) -> int:
        return self.tensors.shape("token_embedding")[0]

    @property
    def contents(self) -> Mapping[str, Any]:
        return self.file.contents

    @property
    def unknown(self) -> Mapping[str, Any]:
        return {**self.file.unknown, **self.contradicted}

    @property
    def notes(self) -> Sequence[str]:
        return self.file.left_out

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts that help to find the model's vocabulary."""
        dataset = self.file.settings.get("dataset")
        return {"dataset": dataset} if isinstance(dataset, str) else {}


def draft_of(destination: Path) -> Path:
    """The path for a draft of a map file. It is next to the destination of the import."""
    return destination.parent / f"{destination.name}.map.toml"


def recognize_file(
    file: StateFile, options: RoleOptions, context_length: int | None = None
) -> Recognized:
    """Find the roles of a file's tensors and the evidence about the computation. `context_length`
    is used if the file does not state a context length. Raises ConvertError."""
    mapped = _checked_map(file, options)
    tensors = MappedTensors(file.where, file.tensors, mapped)
    ignored = {name: file.tensors[name] for name in mapped.ignored}
    answers = answered(check_answers("the flags", options.answers))
    if (given := options.map_file) is not None:
        named = {"positions": "learned"} if ("positions", "weight") in given.names else {}
        answers = answered({**named, **given.answers}, given.path.name) | answers
    findings = find(tensors, ignored, file.settings, answers)
    if context_length is not None and findings["context_length"].values == (CONTEXT_IF_UNKNOWN,):
        findings["context_length"] = Finding((context_length,), "--context-length")
    check_rotary_width(tensors, ignored, findings)
    contradicted = contradicted_sizes(tensors, file.settings)
    return Recognized(file, tensors, findings, contradicted, options.code, options.draft)


def _checked_map(file: StateFile, options: RoleOptions) -> TensorMap:
    """The roles of all tensors. If some roles are unknown, writes a draft of a map file with the
    known roles, and raises ConvertError. A tensor with unusable values gets no draft, because no
    map can help."""
    known: Mapping[tuple[Role, Part], str] = {}
    try:
        mapped = _tensor_map(file, options.map_file)
        known = mapped.names
        check(file.where, file.tensors, mapped)
    except UnusableTensor:
        raise
    except ConvertError as error:
        known = error.known if isinstance(error, NotRecognized) else known
        if options.draft is None or options.map_file is not None:
            raise
        shown = {n: t for n, t in file.tensors.items() if not is_buffer(n, t)}
        hint = _write_draft(options.draft, partial_draft(file.state, known, shown))
        raise ConvertError(f"{error}. {hint}") from error
    return mapped


def _tensor_map(file: StateFile, given: MapFile | None) -> TensorMap:
    if given is None:
        return recognize(file.where, file.tensors)
    if not given.names:
        return recognize_with(given, file.where, file.tensors)
    ignored = [name for name, tensor in file.tensors.items() if is_buffer(name, tensor)]
    return tensor_map(given, file.tensors, ignored)


def read_by_role(
    recognized: Recognized,
    *,
    text: CheckText | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ForeignModel:
    """Choose the computation and build the model. If `text` is given, its loss decides open
    questions. `log` is called with each line of the report. Raises OpenQuestions if a field stays
    open, and ConvertError if the model cannot be imported."""
    tensors, file = recognized.tensors, recognized.file
    resolution = _resolve(recognized, text)
    _check_rotary_width(recognized, resolution)
    require_roles(tensors, resolution.computation)
    dropout, val_loss = (setting(file.settings, name)[0] for name in ("dropout", "val_loss"))
    if not is_number(dropout) or not 0 <= dropout < 1:
        dropout = 0.0
    with naming(file.where):
        built = build(tensors, resolution.computation, dropout=float(dropout))
    for line in understood(tensors, built.config, resolution, built.folds):
        log(line)
    return ForeignModel(
        kind=KIND,
        config=built.config,
        weights=built.weights,
        dtype=torch.float32 if built.rescaled else check(file.where, file.tensors, tensors.map),
        step=file.step,
        val_loss=plausible_loss(val_loss),
        facts={
            "file": file.path.name,
            "verified": resolution.verified,
            **({"warning": resolution.warning} if resolution.warning else {}),
            "settled": {
                name: f"{getattr(resolution.computation, name)} ({origin})"
                for name, origin in resolution.origins.items()
                if origin != UNUSED
            },
        },
        notes=built.folds,
    )


def _check_rotary_width(recognized: Recognized, resolution: Resolution) -> None:
    """Raise ConvertError if a rotary table contradicts the number of heads that was chosen."""
    ignored = {name: recognized.file.tensors[name] for name in recognized.tensors.map.ignored}
    chosen = {
        name: Finding((getattr(resolution.computation, name),), resolution.origins[name])
        for name in ("n_head", "positions")
    }
    check_rotary_width(recognized.tensors, ignored, chosen)


def _resolve(recognized: Recognized, text: CheckText | None) -> Resolution:
    tensors, findings, code = recognized.tensors, recognized.findings, recognized.code
    objectives: Sequence[Objective] = ()
    if text is not None:
        length = findings["context_length"].values[0]
        objectives = text_objectives(text, length, recognized.file.loss)
    if code is not None:
        require_read(code, recognized.unknown)
        values, special = recognized.file.values, recognized.special_ids
        compared = owner_logits(code, tensors, findings, values, special_ids=special)
        _require_within(compared, recognized, numbers_in(code))
        objectives = [compared]
    try:
        return resolve(tensors, findings, *objectives)
    except OpenQuestions as error:
        if recognized.draft is None:
            raise
        document = draft(recognized.file.state, tensors.map, findings)
        hint = _write_draft(recognized.draft, document)
        raise OpenQuestions(f"{error}. {hint}", error.fields) from error


def _require_within(
    compared: LogitsObjective, recognized: Recognized, numbers: Collection[int]
) -> None:
    """Raise ConvertError if an unknown setting or a number of the code, such as a window, may show
    its effect only beyond the positions whose logits are compared. Sizes of tensors have none."""
    length, context = compared.length, recognized.findings["context_length"].values[0]
    sizes = {size for tensor in recognized.tensors.tensors.values() for size in tensor.shape}
    stated = {"a number of the code": sorted({*numbers} - sizes), **recognized.unknown}
    beyond = {
        name: number
        for name, value in stated.items()
        for number in (value if isinstance(value, list) else [value])
        if is_number(number) and length <= number < context
    }
    if beyond:
        raise ConvertError(
            f"{recognized.file.where}: {compared.name} was compared at up to {length:,} of "
            f"{context:,} positions, and this may have an effect only beyond them: "
            f"{', '.join(f'{name} {value!r}' for name, value in beyond.items())}. Set "
            f"--context-length {length}, or serve the owner's class with --run-code"
        )


def _write_draft(path: Path, text: str) -> str:
    """Write a draft of a map file, and return a sentence with its path. If writing fails, return a
    sentence with the reason instead of raising an error, which would hide the open questions."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        return f"The draft of a map file, {path}, cannot be written: {error.strerror or error}"
    return f"{path} is a draft of a map file: complete it and pass it with --map"


def understood(
    tensors: MappedTensors, config: GPTConfig, resolution: Resolution, folds: tuple[str, ...]
) -> Iterator[str]:
    """The lines of the report: the tensors, the computation, the changes to weights, and how well
    the computation was verified."""
    yield "tensors:"
    yield from _tensor_lines(tensors)
    yield "computation:"
    yield from _number_lines(tensors, config, resolution)
    if folds:
        yield "changes of weights:"
        yield from (f"  {fold}" for fold in folds)
    if resolution.alternatives:
        yield from table(resolution)
    if resolution.warning:
        yield f"warning: {resolution.warning}"
    verified = resolution.verified
    yield verified if verified.startswith("not ") else f"verified: {verified}"


def _tensor_lines(tensors: MappedTensors) -> Iterator[str]:
    mapped = tensors.map
    for (role, part), name in mapped.names.items():
        if name == IDENTITY:
            yield f"  {role:<16} none: the identity"
            continue
        shape = list(tensors.tensors[mapped.of(role, part)[0]].shape)
        label = role if part == "weight" else f"{role} {part}"
        yield f"  {label:<20} {name}  {shape}"
    if mapped.ignored:
        first = mapped.ignored[0]
        more = f" and {len(mapped.ignored) - 1} more" if len(mapped.ignored) > 1 else ""
        yield f"  {'not weights':<20} {first}{more}"


def _number_lines(
    tensors: MappedTensors, config: GPTConfig, resolution: Resolution
) -> Iterator[str]:
    head = "the head differs from the embedding"
    if config.tied_head:
        head = "the head is the embedding, or there is none"
    rows = tensors.shape("token_embedding")[0]
    yield _line("vocabulary", rows, "rows of the token embedding")
    yield _line("n_layer", config.n_layer, "running numbers in the names")
    yield _line("d_model", config.d_model, "columns of the token embedding")
    yield _line("n_kv_head", config.n_kv_head, "rows of the key")
    yield _line("head_dim", config.head_dim, "rows of the query, divided by n_head")
    yield _line("d_ff", config.d_ff, "columns of the feed-forward's second matrix")
    yield _line("tied_head", str(config.tied_head), head)
    how = resolution.computation
    hidden = unused(how)
    for name, origin in resolution.origins.items():
        if name not in hidden and origin != UNUSED:
            yield _line(name, getattr(how, name), origin)


def _line(name: str, value: object, origin: str) -> str:
    return f"  {name:<18} {_shown(value):<14} {origin}"


def table(resolution: Resolution) -> Iterator[str]:
    """The lines of the report about other values that were tried."""
    yield f"compared (lower is better; chosen: {resolution.penalty:.4g}):"
    by_field: dict[str, list[Alternative]] = {}
    for alternative in resolution.alternatives:
        by_field.setdefault(alternative.field, []).append(alternative)
    for name, others in by_field.items():
        tried = ", ".join(
            f"{_shown(other.value)} "
            f"{other.penalty:.4g}{'' if other.clear else ' (not distinguished)'}"
            for other in sorted(others, key=lambda other: other.penalty)[:6]
        )
        yield _line(name, getattr(resolution.computation, name), f"against {tried}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
