"""`logitd export`: writes a checkpoint in another program's format."""

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.convert.exporting import export_model
from logitd.model.convert.foreign import ConvertError
from logitd.model.device import DeviceError
from logitd.service.cli.terminal import say
from logitd.service.settings.tools import ExportSettings

ERRORS = ConvertError, CheckpointError, DeviceError, OSError


def run(settings: ExportSettings) -> int:
    export_model(
        settings.checkpoint,
        settings.destination,
        to=settings.to,
        dtype=settings.dtype,
        pre=settings.pre,
        log=say,
    )
    say(f"{settings.destination} was written")
    return 0
