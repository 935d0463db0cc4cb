"""`logitd import`: a model trained elsewhere as a checkpoint.

Also what `logitd serve` does with one: it names the command, or imports it.
"""

import sys
from pathlib import Path

from logitd.model.checkpoint.checkpoint import CheckpointError, read_checkpoint
from logitd.model.convert.by_role.map_file import read_map_file
from logitd.model.convert.by_role.read import RoleOptions, draft_of
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.importing import fingerprint, import_model, importable
from logitd.model.convert.state_file import SUFFIXES
from logitd.service.cli.program_name import command
from logitd.service.cli.terminal import say
from logitd.service.settings.imports import ImportSettings

ERRORS = ConvertError, CheckpointError, OSError
IMPORTED = Path("checkpoints")
"""Where `logitd serve --import` puts a checkpoint, below the working directory."""


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
        f"{checkpoint.path}: {config.n_layer} layers, width {config.d_model}, context "
        f"{config.context_length:,}, vocabulary {config.vocab_size:,}"
    )
    say(f"\nserve it:  {command('serve', checkpoint.path)}")
    return 0


def for_serving(source: Path, *, may_import: bool) -> Path | None:
    """The checkpoint of a model of somebody else's: imported now, or there already and from this
    very source. None, with the reason on stderr, where it may not or cannot be imported."""
    destination = IMPORTED / _name(source)
    try:
        if not importable(source):
            kinds = ", ".join(SUFFIXES)
            say(
                f"logitd serve: {source} is neither a checkpoint nor a model that may be imported: "
                f"a file of weights ({kinds}) or a folder with one. The bundled checkpoint is "
                f"served by\n\n  {command('serve')}",
                file=sys.stderr,
            )
            return None
    except (ConvertError, OSError) as error:  # its config.json is not even JSON
        say(f"logitd serve: {error}", file=sys.stderr)
        return None
    if not may_import:
        say(
            f"logitd serve: {source} is not a checkpoint of logitd, but it may be imported:\n\n"
            f"  {command('import', source, destination)}\n  {command('serve', destination)}\n\n"
            f"or both in one: {command('serve', source, '--import')}",
            file=sys.stderr,
        )
        return None
    try:
        if not destination.exists():
            import_model(
                source, destination, roles=RoleOptions(draft=draft_of(destination)), log=say
            )
        elif read_checkpoint(destination).training.data.get("fingerprint") != fingerprint(source):
            raise CheckpointError(
                f"{destination} exists and is not from {source}: name another destination, "
                f"{command('import', source, 'DEST')}"
            )
    except ERRORS as error:
        importing = command("import", source, destination)
        say(
            f"logitd serve: {error}\n\nserve takes no flags of an import; with them it is\n\n"
            f"  {importing} ...\n  {command('serve', destination)}",
            file=sys.stderr,
        )
        return None
    return destination


def _name(source: Path) -> str:
    """The name of a checkpoint that is imported from a file or a folder."""
    resolved = source.resolve()
    return resolved.name if source.is_dir() else f"{resolved.parent.name}-{resolved.stem}"
