"""`logitd export`: a checkpoint in other programs' formats."""

import sys

from model.checkpoint.checkpoint import CheckpointError
from model.convert.exporting import export_model
from model.convert.foreign import ConvertError
from model.device import DeviceError
from service.settings.tools import ExportSettings


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
