"""`logitd merge`: merges an adapter and its base into one checkpoint."""

from logitd.model.checkpoint.adapter import merge
from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.device import DeviceError
from logitd.service.cli.program_name import command
from logitd.service.cli.terminal import say
from logitd.service.settings.train import MergeSettings

ERRORS = CheckpointError, DeviceError, OSError


def run(settings: MergeSettings) -> int:
    info = merge(settings.base, settings.adapter, settings.dest, save_dtype=settings.save_dtype)
    say(f"merged into {info.path}, weights sha256 {info.weights_sha256}")
    say(f"\nserve it:  {command('serve', info.path)}")
    return 0
