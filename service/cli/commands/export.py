"""`logitd export`: a checkpoint in other programs' formats."""

import sys

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.convert.exporting import export_model
from logitd.model.convert.foreign import ConvertError
from logitd.model.device import DeviceError
from logitd.service.settings.tools import ExportSettings


def run(settings: ExportSettings) -> int:
    try:
        export_model(
            settings.checkpoint,
            settings.destination,
            to=settings.to,
            dtype=settings.dtype,
            pre=settings.pre,
            log=print,
        )
    except (ConvertError, CheckpointError, DeviceError, OSError) as error:
        print(f"logitd export: {error}", file=sys.stderr)
        return 1
    print(f"{settings.destination} is written")
    return 0
