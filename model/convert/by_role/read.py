"""Read: a model of any code as a `ForeignModel`, by the roles of its tensors.

The one way through this room: recognise the tensors, or take them from a map file; find what the
file says of the computation; settle the rest; build. Does not read files of weights
(`model/convert/state_file.py`) nor vocabularies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from logitd.model.convert.by_role.buffers import is_buffer
from logitd.model.convert.by_role.build import build
from logitd.model.convert.by_role.judge import text_judge
from logitd.model.convert.by_role.map_file import (
    MapFile,
    check_answers,
    draft,
    settled_findings,
    tensor_map,
)
from logitd.model.convert.by_role.owner_code import owner_logits, parse_owner_code
from logitd.model.convert.by_role.questions import CONTEXT_IF_UNKNOWN, Finding, find, setting
from logitd.model.convert.by_role.recognise import recognise
from logitd.model.convert.by_role.report import understood
from logitd.model.convert.by_role.settle import OpenQuestions, Settled, answer, settle
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
    draft     where a draft of a map file is written when questions stay open
    """

    answers: Mapping[str, Any] = field(default_factory=dict)
    map_file: MapFile | None = None
    code: str | None = None
    draft: Path | None = None

    @property
    def given(self) -> bool:
        """Whether there is anything that only a model recognised by role has use for."""
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

    @property
    def rows(self) -> int:
        """Rows of the token embedding."""
        return self.tensors.shape("token_embedding")[0]

    @property
    def kind(self) -> str:
        return KIND

    @property
    def contents(self) -> Mapping[str, Any]:
        """What the file holds beside its tensors."""
        return self.file.contents

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of the source, for finding its vocabulary."""
        dataset = self.file.settings.get("dataset")
        return {"dataset": dataset} if isinstance(dataset, str) else {}


def draft_of(destination: Path) -> Path:
    """Where the draft of a map file goes for a checkpoint that could not be written."""
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
        findings = settled_findings(options.map_file, findings)
    if context_length is not None and findings["context_length"].values == (CONTEXT_IF_UNKNOWN,):
        findings |= {"context_length": Finding((context_length,), "--context-length")}
    findings = answer(findings, check_answers("the flags", options.answers))
    return Recognised(file, tensors, findings, options)


def _tensor_map(file: StateFile, given: MapFile | None) -> TensorMap:
    if given is None:
        return recognise(file.where, file.tensors)
    if given.names:
        ignored = [name for name, tensor in file.tensors.items() if is_buffer(name, tensor)]
        return tensor_map(file.where, given, file.tensors, ignored)
    extra = tensor_map(file.where, given, file.tensors, ()).ignored
    kept = {name: tensor for name, tensor in file.tensors.items() if name not in extra}
    mapped = recognise(file.where, kept)
    return replace(mapped, ignored=(*mapped.ignored, *extra))


def read_by_role(
    recognised: Recognised,
    *,
    text: CheckText | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ForeignModel:
    """The model that computes what the source computes. Raises OpenQuestions where something is
    open, and ConvertError."""
    tensors, file = recognised.tensors, recognised.file
    settled = _settle(recognised, text)
    dropout = setting(file.settings, "dropout")
    value = dropout[0] if dropout is not None else 0.0
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
    try:
        built = build(tensors, settled.computation, dropout=float(value) if known else 0.0)
    except ConfigError as error:
        raise ConvertError(f"{file.where}: {error}") from error
    for line in understood(tensors, built.config, settled, built.folds):
        log(line)
    return ForeignModel(
        kind=KIND,
        config=built.config,
        weights=built.weights,
        dtype=torch.float32 if built.rescaled else check(file.where, file.tensors, tensors.map),
        step=_whole(file.settings, "step"),
        val_loss=_loss(file.settings),
        facts={
            "file": file.path.name,
            "verified": settled.verified,
            "settled": {
                name: f"{getattr(settled.computation, name)} ({origin})"
                for name, origin in settled.origins.items()
                if origin != "not used"
            },
        },
        notes=built.folds,
    )


def _settle(recognised: Recognised, text: CheckText | None) -> Settled:
    tensors, findings, options = recognised.tensors, recognised.findings, recognised.options
    logits, code = None, ""
    if options.code is not None:
        owner = parse_owner_code(options.code)
        logits, code = owner_logits(owner, tensors, findings, recognised.file.settings), str(owner)
    judge = None
    if text is not None:
        judge = text_judge(text.token_ids, findings["context_length"].values[0])
        if judge is None:
            raise ConvertError(f"{text.name} has {len(text.token_ids)} tokens: too few to check")
    try:
        return settle(
            tensors,
            findings,
            logits=logits,
            code=code,
            text=judge,
            text_name=text.name if text is not None else "",
        )
    except OpenQuestions as error:
        if options.draft is None:
            raise
        text_of_draft = draft(recognised.file.state, tensors.map, findings)
        raise OpenQuestions(
            f"{error}. {_drafted(options.draft, text_of_draft)}", error.fields
        ) from error


def _drafted(path: Path, text: str) -> str:
    """Writes a draft, and says where it is, or why it is not: the questions count more than it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        return f"The draft of a map file, {path}, cannot be written: {error.strerror or error}"
    return f"A draft with what was recognised is in {path}: complete it and give it back with --map"


def _whole(settings: Mapping[str, Any], name: str) -> int:
    said = setting(settings, name)
    return said[0] if said is not None and type(said[0]) is int and said[0] > 0 else 0


def _loss(settings: Mapping[str, Any]) -> float | None:
    """The best validation loss; nanoGPT's kind writes 1e9 for none."""
    said = setting(settings, "val_loss")
    if said is None or isinstance(said[0], bool) or not isinstance(said[0], int | float):
        return None
    return float(said[0]) if 0 <= said[0] < 1e6 else None
