"""Read: a model of any code as a `ForeignModel`, by the roles of its tensors.

The one way through this room: recognise the tensors, or take them from a map file; find what the
file says of the computation; resolve the rest; build. Does not read files of weights
(`model/convert/state_file.py`) nor vocabularies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from logitd.model.convert.by_role.build import build
from logitd.model.convert.by_role.map_file import (
    MapFile,
    check_answers,
    draft,
    mapped_findings,
    tensor_map,
)
from logitd.model.convert.by_role.objective import text_objective
from logitd.model.convert.by_role.owner_code import owner_logits, parse_owner_code
from logitd.model.convert.by_role.questions import (
    CONTEXT_IF_UNKNOWN,
    Finding,
    find,
    is_count,
    is_number,
    setting,
)
from logitd.model.convert.by_role.recognise import is_buffer, recognise
from logitd.model.convert.by_role.report import understood
from logitd.model.convert.by_role.resolve import OpenQuestions, Resolution, answer, resolve
from logitd.model.convert.by_role.tensor_map import MappedTensors, TensorMap, check
from logitd.model.convert.foreign import ConvertError, ForeignModel
from logitd.model.convert.state_file import StateFile
from logitd.model.files import write_whole
from logitd.model.transformer.config import ConfigError

KIND = "its own code"


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """What a person says of a model.

    answers   values of fields of a `Computation`
    code      FILE.py:NAME, the owner's own class
    draft     path of the draft of a map file, written if questions stay open
    """

    answers: Mapping[str, Any] = field(default_factory=dict)
    map_file: MapFile | None = None
    code: str | None = None
    draft: Path | None = None

    @property
    def given(self) -> bool:
        """True if there is anything that only recognition by role can use."""
        return bool(self.answers) or self.map_file is not None or self.code is not None


@dataclass(frozen=True)
class CheckText:
    """A text that the model should predict, as ids of the source."""

    name: str
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Recognised:
    """The tensors of a file by role, and what the file says of the computation."""

    file: StateFile
    tensors: MappedTensors
    findings: Mapping[str, Finding]
    options: RoleOptions
    kind = KIND

    @property
    def rows(self) -> int:
        """Rows of the token embedding."""
        return self.tensors.shape("token_embedding")[0]

    @property
    def contents(self) -> Mapping[str, Any]:
        """Everything in the file but its tensors."""
        return self.file.contents

    @property
    def unknown(self) -> Mapping[str, Any]:
        """Settings that may change logits and that nothing here understands."""
        return self.file.unknown

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the source that lead to its vocabulary."""
        dataset = self.file.settings.get("dataset")
        return {"dataset": dataset} if isinstance(dataset, str) else {}


def draft_of(destination: Path) -> Path:
    """The path of the draft of a map file, for a checkpoint that could not be written."""
    return destination.parent / f"{destination.name}.map.toml"


def recognise_file(
    file: StateFile, options: RoleOptions, context_length: int | None = None
) -> Recognised:
    """The roles of a file's tensors. `context_length` is for a file that does not say it. Raises
    ConvertError."""
    mapped = _tensor_map(file, options.map_file)
    check(file.where, file.tensors, mapped)
    tensors = MappedTensors(file.where, file.tensors, mapped)
    ignored = {name: file.tensors[name] for name in mapped.ignored}
    findings = find(tensors, ignored, file.settings)
    if options.map_file is not None:
        findings |= mapped_findings(options.map_file)
    if context_length is not None and findings["context_length"].values == (CONTEXT_IF_UNKNOWN,):
        findings["context_length"] = Finding((context_length,), "--context-length")
    findings = answer(findings, check_answers("the flags", options.answers))
    return Recognised(file, tensors, findings, options)


def _tensor_map(file: StateFile, given: MapFile | None) -> TensorMap:
    if given is None:
        return recognise(file.where, file.tensors)
    if given.names:
        ignored = [name for name, tensor in file.tensors.items() if is_buffer(name, tensor)]
        return tensor_map(given, file.tensors, ignored)
    extra = tensor_map(given, file.tensors, ()).ignored
    kept = {name: tensor for name, tensor in file.tensors.items() if name not in extra}
    mapped = recognise(file.where, kept)
    return replace(mapped, ignored=(*mapped.ignored, *extra))


def read_by_role(
    recognised: Recognised,
    *,
    text: CheckText | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ForeignModel:
    """The model that computes what the source computes. Raises OpenQuestions if something is open,
    and ConvertError."""
    tensors, file = recognised.tensors, recognised.file
    resolution = _resolve(recognised, text)
    dropout, step, val_loss = (
        said[0] if (said := setting(file.settings, name)) is not None else None
        for name in ("dropout", "step", "val_loss")
    )
    if not is_number(dropout) or not 0 <= dropout < 1:
        dropout = 0.0
    try:
        built = build(tensors, resolution.computation, dropout=float(dropout))
    except ConfigError as error:
        raise ConvertError(f"{file.where}: {error}") from error
    for line in understood(tensors, built.config, resolution, built.folds):
        log(line)
    return ForeignModel(
        kind=KIND,
        config=built.config,
        weights=built.weights,
        dtype=torch.float32 if built.rescaled else check(file.where, file.tensors, tensors.map),
        step=step if is_count(step) else 0,
        # nanoGPT's kind writes 1e9 for no evaluation.
        val_loss=float(val_loss) if is_number(val_loss) and 0 <= val_loss < 1e6 else None,
        facts={
            "file": file.path.name,
            "verified": resolution.verified,
            "settled": {
                name: f"{getattr(resolution.computation, name)} ({origin})"
                for name, origin in resolution.origins.items()
                if origin != "not used"
            },
        },
        notes=built.folds,
    )


def _resolve(recognised: Recognised, text: CheckText | None) -> Resolution:
    tensors, findings, options = recognised.tensors, recognised.findings, recognised.options
    logits, code = None, ""
    if options.code is not None:
        owner = parse_owner_code(options.code)
        logits, code = owner_logits(owner, tensors, findings, recognised.file.settings), str(owner)
    objective = None
    if text is not None:
        objective = text_objective(text.token_ids, findings["context_length"].values[0])
        if objective is None:
            raise ConvertError(f"{text.name} has {len(text.token_ids)} tokens: too few to check")
    try:
        return resolve(
            tensors,
            findings,
            logits=logits,
            code=code,
            text=objective,
            text_name=text.name if text is not None else "",
        )
    except OpenQuestions as error:
        if options.draft is None:
            raise
        document = draft(recognised.file.state, tensors.map, findings)
        hint = _write_draft(options.draft, document)
        raise OpenQuestions(f"{error}. {hint}", error.fields) from error


def _write_draft(path: Path, text: str) -> str:
    """Write a draft; a sentence with its path, or why it is not there: the questions count more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        return f"The draft of a map file, {path}, cannot be written: {error.strerror or error}"
    return f"A draft with what was recognised is in {path}: complete it and give it back with --map"
