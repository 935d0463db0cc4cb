"""By code: imports a model whose logits are computed by its owner's code.

The checkpoint stores the weights, the vocabulary, the owner's source files, and the facts that were
measured by running that code (`model/owner_code/process/measure.py`). Unlike the other imports,
this one needs no knowledge of the computation, but the checkpoint can be served only if its code is
allowed to run.
"""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.checkpoint.checkpoint import (
    CheckpointInfo,
    TrainingRecord,
    save_checkpoint,
)
from logitd.model.convert.by_role.names import SETTINGS
from logitd.model.convert.by_role.owner_code import (
    CAUSAL_TOLERANCE,
    OwnerCode,
    assumed_defaults,
    doubtful_eps,
    request_of,
    require_causal,
    require_one_eps,
    require_read,
    said_in,
    unpassed_in,
)
from logitd.model.convert.by_role.positions import CONTEXT_IF_UNKNOWN
from logitd.model.convert.by_role.read import RoleOptions, recognize_file
from logitd.model.convert.by_role.resolution import flag
from logitd.model.convert.by_role.stated import setting
from logitd.model.convert.foreign import (
    FLOATS,
    ConvertError,
    ForeignTokenizer,
    common_dtype,
    count_or_zero,
    plausible_loss,
)
from logitd.model.convert.hf.folder import refuse_adapter
from logitd.model.convert.importing import reporting_damage
from logitd.model.convert.origin import record_of_code, record_of_import
from logitd.model.convert.state_file import StateFile, find_state_file, read_state_file
from logitd.model.convert.vocabulary.choose import choose_vocabulary
from logitd.model.dtypes import DTypeName
from logitd.model.files import read_regular, require_new, written_to
from logitd.model.owner_code.config import CodeConfig, CodeConfigError
from logitd.model.owner_code.connection import (
    CodeError,
    compare,
    measure,
    request_to_repeat,
    storable,
    write_sources,
)
from logitd.model.owner_code.process.build import Request

KIND = "its owner's code"
COMPARED = 24
"""Length of the sequences whose logits are compared with those of the stored model."""
PADDING_TOLERANCE = 1e-4
"""Padding counts as harmless if it changes no logit by more than this."""
SOURCE_BYTES = 2**22
"""Maximum size of a source file, in bytes."""


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """The user's choices for importing a model with its owner's code.

    code            the owner's class, and the call that returns logits
    answers         the user's values for fields of a `Computation`
    tokenizer, dtype, skip_normalizer, unused_rows
                    as for `import_model`
    context_length  number of positions to keep; None means the number in the settings, or else the
                    largest number that works
    lens            names of the final norm and of the head, for the logit lens; None: no lens
    """

    code: OwnerCode
    answers: Mapping[str, Any]
    tokenizer: str | None = None
    dtype: DTypeName = "auto"
    context_length: int | None = None
    skip_normalizer: bool = False
    unused_rows: bool = False
    lens: tuple[str, str] | None = None


def import_by_code(
    source: Path, destination: Path, options: CodeOptions, *, log: Callable[[str], None]
) -> CheckpointInfo:
    """Save the model at `source`, together with its owner's code, as a new checkpoint at
    `destination`. `log` is called with each line of the report. Raises ConvertError if the model
    cannot be imported, and FileError if `destination` exists or cannot be written."""
    require_new(destination)
    code = options.code
    refuse_adapter(source)
    with reporting_damage(source):
        path = find_state_file(source) if source.is_dir() else source
        file = read_state_file(path)
        require_read(code, file.unknown)
    request = _request(file, options)
    facts = _measured(file, request, options)
    require_one_eps(code, request, facts["kept"])
    _check_facts(code, facts, options)
    with reporting_damage(path):
        vocabulary = choose_vocabulary(
            options.tokenizer,
            contents=file.contents,
            folder=path.parent,
            facts={},
            rows=facts["rows"],
            skip_normalizer=options.skip_normalizer,
            unused_rows=options.unused_rows,
            text=None,
        )
    sources = _sources(Path(facts["root"]), facts["files"])
    config = _config(code, facts, vocabulary, sources, options)
    weights, stored = _weights(file, options.dtype)
    try:
        expected = _logits(config, Path(facts["root"]), file.tensors)
    except CodeError as error:
        raise ConvertError(str(error)) from error
    _require_complete(config, sources, weights, expected)
    notes = [*file.left_out, *_report(config, facts)]
    if assumed := assumed_defaults(code, facts["kept"]):
        notes.append(f"warning: {assumed}")
    for note in (*notes, *vocabulary.notes):
        log(note)
    with written_to(destination):
        return save_checkpoint(
            destination,
            config=config,
            weights=weights,
            tokenizer=vocabulary.tokenizer,
            training=_record(source, file, options),
            card=_card(destination.name, config, notes, vocabulary, FLOATS[stored]),
            dtype=stored,
            chat_template=vocabulary.chat_template,
            sources=sources,
        )


def _request(file: StateFile, options: CodeOptions) -> Request:
    """The request to the owner's process. It states everything that is known about the model from
    the settings, from the user and, if the tensors are recognized, from their roles."""
    code, answers = options.code, _under_all_names(options.answers)
    try:
        roles = RoleOptions(answers=options.answers)
        recognized = recognize_file(file, roles, options.context_length)
        request = request_of(code, recognized.tensors, recognized.findings, file.values)
    except ConvertError:  # not a known kind of GPT
        request = Request(
            file=str(code.file.resolve()),
            expression=code.expression,
            call=code.call,
            said=said_in(file.values, answers),
            doubtful={} if "norm_eps" in answers else doubtful_eps(file.values),
            unpassed=unpassed_in(file.values),
        )
    given = {} if options.context_length is None else {"context_length": options.context_length}
    return replace(request, said={**request.said, **answers, **_under_all_names(given)})


def _under_all_names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for name, value in values.items() for key in SETTINGS.get(name, (name,))}


def _measured(file: StateFile, request: Request, options: CodeOptions) -> dict[str, Any]:
    context = options.context_length or request.shape.get("context_length")
    if context in (None, CONTEXT_IF_UNKNOWN):  # no table of positions, and no known kind of GPT
        context = count_or_zero(setting(file.settings, "context_length")[0]) or None
    try:
        name = str(options.code)
        return measure(name, request, file.tensors, context=context, lens=options.lens)
    except CodeError as error:
        raise ConvertError(str(error)) from error


def _check_facts(code: OwnerCode, facts: Mapping[str, Any], options: CodeOptions) -> None:
    """Raise ConvertError unless the model can be served."""
    require_causal(code, facts["not_causal"])
    for name in options.answers:
        if not set(facts["read"]) & {*SETTINGS.get(name, ()), name}:
            raise ConvertError(
                f"{flag(name)} has no effect with --run-code, because {code} reads no value of "
                "this name: remove it"
            )
    asked = options.context_length
    if asked is not None and facts["context_length"] < asked:
        raise ConvertError(
            f"--context-length is {asked}, but {code} computes at most {facts['context_length']} "
            "positions"
        )
    if (off := facts["state"]) is not None and off > CAUSAL_TOLERANCE:
        raise ConvertError(
            f"{code}: its logits_and_state and its forward return logits that differ by up to "
            f"{off:.3g}, but they must be equal"
        )


def _sources(root: Path, files: Sequence[str]) -> dict[str, bytes]:
    """The contents of the owner's files, by their paths relative to `root`."""
    return {
        Path(name).relative_to(root).as_posix(): read_regular(Path(name), SOURCE_BYTES)
        for name in files
    }


def _require_complete(
    config: CodeConfig,
    sources: Mapping[str, bytes],
    weights: Mapping[str, Tensor],
    expected: Tensor,
) -> None:
    """Raise ConvertError unless the model computes the expected logits (`_logits`) with only the
    source files and the weights that the checkpoint keeps. A buffer that is drawn anew whenever the
    model is made, for example, changes them."""
    with tempfile.TemporaryDirectory(prefix="logitd-code-") as folder:
        write_sources(Path(folder), sources)
        try:
            logits = _logits(config, Path(folder), weights, seed=1)
        except CodeError as error:
            raise ConvertError(
                f"without the other files of its folder, {error}. A checkpoint keeps only the "
                f"source files ({', '.join(sources)}): put the values that the code reads from "
                "other files into the code"
            ) from error
    difference = float((logits - expected).abs().max())
    if config.deterministic and not difference <= PADDING_TOLERANCE:
        raise ConvertError(
            f"{config.code} returns other logits each time that the model is made from the same "
            f"weights: they differ by {difference:.3g}; the limit is {PADDING_TOLERANCE:g}. Store "
            "what the code draws or reads in a buffer of its state dict"
        )


def _logits(
    config: CodeConfig, folder: Path, weights: Mapping[str, Tensor], *, seed: int = 0
) -> Tensor:
    """The logits that the source files in a folder compute for a few ids. Raises CodeError."""
    request = replace(request_to_repeat(config, folder), seed=seed)
    length = min(COMPARED, config.context_length)
    return compare(config.code, request, weights, rows=config.rows, length=length).logits


def _config(
    code: OwnerCode,
    facts: Mapping[str, Any],
    vocabulary: ForeignTokenizer,
    sources: Mapping[str, bytes],
    options: CodeOptions,
) -> CodeConfig:
    texts = (source.decode("utf-8", "replace") for source in sources.values())
    text = " ".join((*texts, code.expression, code.call or ""))
    words = {word.lower() for word in re.findall(r"[^\W\d]\w*", text)}
    own = code.file.read_bytes()
    same = (name for name in sources if Path(name).name == code.file.name and sources[name] == own)
    main = min(same, key=len)
    try:
        return CodeConfig.from_dict(
            {
                "vocab_size": vocabulary.tokenizer.vocab_size,
                "rows": facts["rows"],
                "order": None if vocabulary.order is None else list(vocabulary.order),
                "context_length": facts["context_length"],
                "parameters": facts["parameters"],
                "file": main,
                "expression": code.expression,
                "call": code.call,
                "values": {
                    kind: {name: value for name, value in values.items() if name.lower() in words}
                    for kind, values in facts["chosen"].items()
                },
                "deterministic": facts["deterministic"],
                "padding_is_harmless": facts["padding"] <= PADDING_TOLERANCE,
                "has_state": facts["state"] is not None,
                "lens": options.lens,
                "streams": facts["streams"],
                "stages": facts["stages"],
            }
        )
    except CodeConfigError as error:
        raise ConvertError(f"{code}: {error}") from error


def _report(config: CodeConfig, facts: Mapping[str, Any]) -> list[str]:
    """Sentences about the measured facts."""
    lines = [
        f"computed by its owner's code: {', '.join(Path(name).name for name in facts['files'])}",
        f"context length {config.context_length:,}, vocabulary {config.vocab_size:,}, "
        f"{config.parameters:,} parameters, {len(config.stages)} submodules as stages",
        f"a pass over {facts['timed_length']} tokens takes {facts['milliseconds']:.1f} ms; "
        + (
            "the model's own cache saves most of it"
            if config.has_state
            else "each token computes the sequence again"
        ),
        "verified: different later ids change no earlier logits",
    ]
    if not facts["context_is_known"]:
        lines.append(
            f"the context length is not stated: sequences of up to {config.context_length:,} ids "
            "worked; set another length with --context-length"
        )
    if facts["only_last"]:
        lines.append(
            "its forward returns only the last position, so each position of a prompt is a pass; "
            "if targets make it return all, --code-call 'model(ids, ids)' saves these passes"
        )
    if not config.deterministic:
        lines.append(
            f"not deterministic: two passes differ by up to {facts['not_deterministic']:.3g}. Does "
            "it apply dropout after eval()? Each pass is seeded, so replies are reproducible, "
            "but their numbers depend on this one seed"
        )
    if not config.padding_is_harmless:
        lines.append(
            f"ids on the right or other rows change logits by up to {facts['padding']:.3g}: "
            "--batch-code is not possible"
        )
    return lines


def _weights(file: StateFile, dtype: DTypeName) -> tuple[dict[str, Tensor], torch.dtype]:
    """The tensors, and the dtype in which those of floating-point numbers are stored."""
    weights = {name: storable(tensor) for name, tensor in file.tensors.items()}
    if dtype != "auto":
        return weights, getattr(torch, dtype)
    return weights, common_dtype({t.dtype for t in weights.values() if t.is_floating_point()})


def _record(source: Path, file: StateFile, options: CodeOptions) -> TrainingRecord:
    return record_of_import(
        source,
        KIND,
        options.tokenizer,
        record_of_code(options.code),
        step=file.step,
        val_loss=plausible_loss(setting(file.settings, "val_loss")[0]),
    )


def _card(
    name: str,
    config: CodeConfig,
    notes: Sequence[str],
    vocabulary: ForeignTokenizer,
    dtype: str,
) -> str:
    listed = "".join(f"- {note}\n" for note in (*notes, *vocabulary.notes))
    return (
        f"# {name}\n\nImported from a model of {KIND}, `{config.code}`; trained elsewhere. It is "
        f"served by running this code, with `--run-code`. Stored in {dtype}.\n\n"
        f"The license and the training data are the source's; they are not known here.\n\n{listed}"
    )
