"""`logitd import`: writes a model trained elsewhere as a checkpoint. `logitd serve --import` uses
this module as well."""

from pathlib import Path

from logitd.model.checkpoint.checkpoint import CheckpointError, read_checkpoint
from logitd.model.convert.by_role.map_file import read_map_file
from logitd.model.convert.by_role.read import RoleOptions, draft_of
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.importing import fingerprint, import_model, importable
from logitd.model.convert.state_file import SUFFIXES
from logitd.model.plural import pluralize
from logitd.service.cli.commands.servable import NotServable
from logitd.service.cli.program_name import command
from logitd.service.cli.terminal import say
from logitd.service.settings.imports import ImportSettings

ERRORS = ConvertError, CheckpointError, OSError
IMPORTED = Path("checkpoints")
"""Folder in which `logitd serve --import` writes checkpoints, below the working directory."""


def run(settings: ImportSettings) -> int:
    checkpoint = import_model(
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
            code=settings.code,
            draft=draft_of(settings.destination),
        ),
        check=settings.check,
        ignored_settings=settings.ignore_setting,
        log=say,
    )
    config = checkpoint.config
    say(
        f"{checkpoint.path}: {pluralize(config.n_layer, 'layer')}, width {config.d_model}, context "
        f"{config.context_length:,}, vocabulary {config.vocab_size:,}"
    )
    say(f"\nserve it:  {command('serve', checkpoint.path)}")
    return 0


def for_serving(source: Path, *, may_import: bool) -> Path:
    """The checkpoint of a model trained elsewhere. It is imported now, unless it was imported from
    the same source before. Raises NotServable."""
    destination = IMPORTED / _name(source)
    importing, serving = command("import", source, destination), command("serve", destination)
    try:
        known = importable(source)
    except (ConvertError, OSError) as error:  # such as an unreadable config.json
        raise NotServable(str(error)) from error
    if not known:
        raise NotServable(
            f"{source} is neither a checkpoint nor an importable model: a file of weights "
            f"({', '.join(SUFFIXES)}) or a folder with one. Serve the bundled checkpoint with"
            f"\n\n  {command('serve')}"
        )
    if not may_import:
        raise NotServable(
            f"{source} is not a checkpoint of logitd. Try to import it first:\n\n"
            f"  {importing}\n  {serving}\n\n"
            f"or do both at once: {command('serve', source, '--import')}"
        )
    try:
        if not destination.exists():
            roles = RoleOptions(draft=draft_of(destination))
            import_model(source, destination, roles=roles, log=say)
        elif read_checkpoint(destination).training.data.get("fingerprint") != fingerprint(source):
            raise CheckpointError(
                f"{destination} exists, but was not imported from {source}: choose another "
                f"destination with {command('import', source, 'DEST')}"
            )
    except ERRORS as error:
        raise NotServable(
            f"{error}\n\n`serve --import` has no flags for the import; if it needs some, run\n\n"
            f"  {importing} ...\n  {serving}"
        ) from error
    return destination


def _name(source: Path) -> str:
    """The name of the checkpoint that is imported from a file or a folder."""
    resolved = source.resolve()
    return resolved.name if source.is_dir() else f"{resolved.parent.name}-{resolved.stem}"
