"""`logitd import`: writes a model trained elsewhere as a checkpoint. Also used by `logitd serve
--import`."""

from pathlib import Path
from typing import cast

from logitd.model.checkpoint.checkpoint import (
    CheckpointError,
    CheckpointInfo,
    read_checkpoint,
)
from logitd.model.convert.by_code import CodeOptions, import_by_code
from logitd.model.convert.by_role.map_file import read_map_file
from logitd.model.convert.by_role.owner_code import OwnerCode, parse_owner_code
from logitd.model.convert.by_role.read import RoleOptions, draft_of
from logitd.model.convert.by_role.resolution import OpenQuestions
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.importing import import_model, importable
from logitd.model.convert.origin import fingerprint, record_of_code
from logitd.model.convert.state_file import SUFFIXES
from logitd.model.owner_code.config import CodeConfig
from logitd.model.plural import pluralize
from logitd.service.cli.commands.servable import NotServable, beginnings
from logitd.service.cli.program_name import command
from logitd.service.cli.terminal import say
from logitd.service.settings.imports import ImportSettings

ERRORS = ConvertError, CheckpointError, OSError
BY_CODE = "If you trust this code, keep it in the checkpoint and let it compute the model:"
IMPORTED = Path("checkpoints")
"""Folder below the working directory in which `logitd serve --import` writes checkpoints."""


def run(settings: ImportSettings) -> int:
    try:
        checkpoint = _imported(settings)
    except ConvertError as error:
        has_flags = isinstance(error, OpenQuestions)  # flags answer its questions
        if has_flags or settings.code is None or settings.by_code or not settings.source.exists():
            raise
        again = command("import", settings.source, settings.destination, *_flags(settings))
        raise ConvertError(f"{error}\n\n{BY_CODE}\n\n  {again} --run-code") from error
    shape = checkpoint.shape
    size = (
        f"{shape.parameters:,} parameters"
        if isinstance(shape, CodeConfig)
        else f"{pluralize(shape.n_layer, 'layer')}, width {shape.d_model}"
    )
    say(
        f"{checkpoint.path}: {size}, context {shape.context_length:,}, vocabulary "
        f"{shape.vocab_size:,}"
    )
    allowing = ["--run-code"] if settings.by_code else []
    say(f"\nserve it:  {command('serve', checkpoint.path, *allowing)}")
    return 0


def _flags(settings: ImportSettings) -> list[str]:
    """The flags of both `logitd import` and `logitd serve` that are set, with their values."""
    values = {"--tokenizer": settings.tokenizer, "--code": settings.code,
              "--code-call": settings.code_call}  # fmt: skip
    return [word for flag, value in values.items() if value is not None for word in (flag, value)]


def _imported(settings: ImportSettings) -> CheckpointInfo:
    """Import a model. If `by_code` is set, the checkpoint runs the model's own code; otherwise the
    model becomes a GPT."""
    if settings.by_code:
        return _by_code(settings)
    return import_model(
        settings.source,
        settings.destination,
        tokenizer=settings.tokenizer,
        dtype=settings.dtype,
        context_length=settings.context_length,
        skip_normalizer=settings.skip_normalizer,
        unused_rows=settings.unused_rows,
        roles=RoleOptions(
            answers=settings.answers(),
            map_file=None if settings.map is None else read_map_file(settings.map),
            code=None if settings.code is None else _code(settings),
            draft=draft_of(settings.destination),
        ),
        check=settings.check,
        ignored_settings=settings.ignore_setting,
        log=say,
    )


def _by_code(settings: ImportSettings) -> CheckpointInfo:
    norm, head = settings.lens_norm, settings.lens_head
    if (norm is None) != (head is None):
        raise ConvertError("a lens needs both --lens-norm and --lens-head: give both or neither")
    options = CodeOptions(
        code=_code(settings),
        answers=settings.answers(),
        tokenizer=settings.tokenizer,
        dtype=settings.dtype,
        context_length=settings.context_length,
        skip_normalizer=settings.skip_normalizer,
        unused_rows=settings.unused_rows,
        lens=None if norm is None or head is None else (norm, head),
    )
    return import_by_code(settings.source, settings.destination, options, log=say)


def _code(settings: ImportSettings) -> OwnerCode:
    assert settings.code is not None
    return parse_owner_code(settings.code, settings.code_call)


def for_serving(
    source: Path,
    *,
    may_import: bool,
    code: str | None = None,
    code_call: str | None = None,
    tokenizer: str | None = None,
    run_code: bool = False,
) -> Path:
    """The checkpoint of a model trained elsewhere. The model is imported now, unless it was already
    imported from the same source, code and vocabulary. Raises NotServable."""
    destination = IMPORTED / _name(source)
    settings = cast(
        ImportSettings,  # for mypy, a base class of it
        ImportSettings.model_construct(
            source=source,
            destination=destination,
            tokenizer=tokenizer,
            code=code,
            code_call=code_call,
            by_code=run_code and code is not None,
        ),
    )
    allowing = ["--run-code"] if settings.by_code else []
    importing = command("import", source, destination, *_flags(settings), *allowing)
    serving = command("serve", destination, *allowing)
    try:
        known = importable(source)
    except (ConvertError, OSError) as error:  # such as an unreadable config.json
        raise NotServable(str(error)) from error
    if not known:
        raise NotServable(
            f"{source} is neither a checkpoint nor an importable model: importable models are "
            f"weight files ({', '.join(SUFFIXES)}) and folders that contain one. "
            f"{beginnings(Path('runs/first'))}"
        )
    if not may_import:
        raise NotServable(
            f"{source} is not a checkpoint of logitd. Try to import it first:\n\n"
            f"  {importing}\n  {serving}\n\n"
            f"or do both at once: {command('serve', source, '--import')}"
        )
    try:
        if destination.exists():
            _require_same(settings)
        else:
            _imported(settings)
    except ERRORS as error:
        if code is not None and not run_code:
            again = command("serve", source, *_flags(settings), "--run-code")
            raise NotServable(f"{error}\n\n{BY_CODE}\n\n  {again}") from error
        raise NotServable(
            f"{error}\n\n`import` has flags that `serve` lacks. If the model needs one, run\n\n  "
            f"{importing} ...\n  {serving}"
        ) from error
    return destination


def _require_same(settings: ImportSettings) -> None:
    """Raise CheckpointError unless the destination was imported from this source, with this code
    and, if one is named, this vocabulary."""
    source, destination = settings.source, settings.destination
    known = read_checkpoint(destination)
    data = known.training.data
    code = data if settings.code is None else record_of_code(_code(settings))
    if data.get("fingerprint") != fingerprint(source, data.get("tokenizer")):
        what = str(source)
    elif data.get("code_sha256") != code.get("code_sha256"):
        what = f"{source} with this --code"
    elif isinstance(known.shape, CodeConfig) is not settings.by_code:
        what = f"{source} {'with' if settings.by_code else 'without'} --run-code"
    elif settings.tokenizer not in (None, data.get("tokenizer")):
        what = f"{source} with --tokenizer {settings.tokenizer}"
    else:
        return
    raise CheckpointError(
        f"{destination} exists, but was not imported from {what}, as it is now: remove it to "
        f"import again, or choose another destination with {command('import', source, 'DEST')}"
    )


def _name(source: Path) -> str:
    """The name for a checkpoint imported from a file or a folder."""
    resolved = source.resolve()
    return resolved.name if source.is_dir() else f"{resolved.parent.name}-{resolved.stem}"
