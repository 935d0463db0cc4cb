"""`logitd merge`: an adapter and the checkpoint that it was trained on, as one checkpoint."""

import sys

from logitd.model.checkpoint.adapter import merge
from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.device import DeviceError
from logitd.service.cli.program_name import program_name
from logitd.service.settings.train import MergeSettings


def run(settings: MergeSettings) -> int:
    try:
        info = merge(settings.base, settings.adapter, settings.dest, save_dtype=settings.save_dtype)
    except (CheckpointError, DeviceError, OSError) as error:
        print(f"logitd merge: {error}", file=sys.stderr)
        return 1
    print(f"merged into {info.path}, weights sha256 {info.weights_sha256}")
    print(f"\nserve it:  {program_name()} serve {info.path}")
    return 0
